from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from tinkex.engine import base_models
from tinkex.engine.native import library
from tinkex.engine.trainer import LanguageModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Use one thread: small models are faster on it, and sums are reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


KERNELS = {
    "native": ["-march=native"],
    "not optimized": ["-march=native", "-O0"],  # as other versions of the compiler translate them
    "AVX2": ["-march=haswell"],
    "SSE2": ["-march=x86-64"],
}


@pytest.fixture(scope="module", params=KERNELS)
def compiled(request: pytest.FixtureRequest, compiled_kernels: Path) -> ctypes.CDLL:
    """The kernels in C: for this processor, for one that has AVX2 alone, and for one that has not even that."""
    compiler, cpuinfo = shutil.which("cc"), Path("/proc/cpuinfo")
    assert compiler is not None, "these tests need a C compiler"
    known = cpuinfo.read_text() if cpuinfo.is_file() else ""
    needed = {"AVX2": " avx2 ", "SSE2": " sse2 "}.get(request.param, "")
    if needed not in known:
        pytest.skip(f"this processor has no {request.param}")
    return library.build(compiler, compiled_kernels, KERNELS[request.param])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> base_models.PreparedModel:
    cache: Path = tmp_path_factory.mktemp("models")
    return base_models.prepare(base_models.parse_spec(base_models.TINY), cache)


def load(tiny: base_models.PreparedModel):
    """Load a new copy of the model with transformers."""
    return base_models.load(tiny, device="cpu", dtype=torch.float32)


@pytest.fixture(params=["native", "torch"])
def language_model(tiny, request) -> LanguageModel:
    """The tiny model, once with the kernels in C and once with those of torch."""
    native = request.param == "native"
    return LanguageModel(load(tiny), context_length=tiny.context_length, native=native)
