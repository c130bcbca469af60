from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinkex.engine import base_models
from tinkex.engine.trainer import LanguageModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Use one thread: small models are faster on it, and sums are reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
