"""The kernels in C compute what PyTorch computes; without a compiler, PyTorch does it."""

from __future__ import annotations

import ctypes
import logging
import subprocess

import pytest
import torch

from tinkex.engine.kernels import TorchKernels
from tinkex.engine.native import NativeKernels, kernels_for, library

TYPES = [torch.float32, torch.bfloat16]
#: Relative to the largest number; bfloat16 has 8 bits, and PyTorch rounds more than once where the kernel does once.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def native(compiled: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(compiled)


def rows(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def assert_close(found, expected, dtype):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    difference = (found.float() - expected.float()).abs().max()
    assert difference <= CLOSE[dtype] * expected.float().abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 37, 576])
def test_norms_and_residual_sums_equal_those_of_torch(native, dtype, width):
    x, delta, weight = rows(70, width), rows(70, width, 1).to(dtype), 1 + rows(1, width, 2)[0]
    torches = TorchKernels()
    assert_close(native.norm(x, weight, 1e-5, dtype), torches.norm(x, weight, 1e-5, dtype), dtype)
    assert torch.equal(native.add(x, delta), torches.add(x, delta))
    for found, expected in zip(
        native.add_norm(x, delta, weight, 1e-5),
        torches.add_norm(x, delta, weight, 1e-5),
        strict=True,
    ):
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gradient_of_a_norm_equals_that_of_torch(native, dtype):
    x, g, normed_g, weight = (
        rows(70, 576),
        rows(70, 576, 1),
        rows(70, 576, 2).to(dtype),
        rows(1, 576, 3)[0],
    )
    found, expected = g.clone(), g.clone()
    rounded = native.add_norm_back(found, x, normed_g, weight, 1e-5)
    TorchKernels().add_norm_back(expected, x, normed_g, weight, 1e-5)
    assert_close(found, expected, torch.float32)
    assert torch.equal(rounded, found.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_gated_rows_and_their_gradient_equal_those_of_torch(native, dtype):
    gate_up, g = (rows(70, 3072) * 20).to(dtype), rows(70, 1536, 1).to(dtype)
    torches = TorchKernels()
    assert_close(native.gated(gate_up), torches.gated(gate_up), dtype)
    for found, expected in zip(
        native.gated_back(gate_up, g), torches.gated_back(gate_up, g), strict=True
    ):
        assert_close(found, expected, dtype)
    assert torch.equal(native.gated_back(gate_up, g)[1], native.gated(gate_up))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_logprobs_over_a_vocabulary_and_their_gradient_equal_those_of_torch(native, dtype, count):
    logits = (rows(40, 5000) * 8).to(dtype)
    targets = torch.randint(0, 5000, (40, count), generator=torch.Generator().manual_seed(1))
    g = rows(40, count, 2)
    g[3] = 0
    torches = TorchKernels()
    total, expected = native.log_sum_exp(logits), torches.log_sum_exp(logits)
    assert_close(total, expected, torch.float32)
    found, reference = logits.clone(), logits.clone()
    native.logits_back(found, total, targets, g)
    torches.logits_back(reference, expected, targets, g)
    assert_close(found, reference, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_visible(native, bad):
    x = rows(4, 64)
    x[1, 5] = bad
    for found in (
        native.norm(x, torch.ones(64), 1e-5),
        native.log_sum_exp(x),
        native.gated(torch.cat([x, x], dim=1)),
    ):
        assert not found[1].isfinite().all()
        assert found[[0, 2, 3]].isfinite().all()


def test_a_row_has_the_same_bits_whatever_rows_and_threads_there_are(native):
    x, gate_up = rows(200, 576), rows(200, 3072).bfloat16()
    weight = torch.ones(576)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append((native.norm(x, weight, 1e-5), native.gated(gate_up)))
    torch.set_num_threads(1)
    alone = native.norm(x[7:8], weight, 1e-5), native.gated(gate_up[7:8])
    for one, three, single in zip(*found, alone, strict=True):
        assert torch.equal(one, three)
        assert torch.equal(one[7:8], single)


def test_only_types_and_devices_that_the_kernels_serve_get_them():
    assert kernels_for(CPU, torch.bfloat16).name == "native"
    assert kernels_for(CPU, torch.bfloat16, native=False).name == "torch"
    assert kernels_for(CPU, torch.float16).name == "torch"
    assert kernels_for(torch.device("meta"), torch.float32).name == "torch"


def test_without_a_compiler_the_engine_logs_it_once_and_uses_torch(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    library.library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "tinkex.engine"):
            assert kernels_for(CPU, torch.float32).name == "torch"
            assert kernels_for(CPU, torch.float32).name == "torch"
    finally:
        library.library.cache_clear()
    assert [record.message for record in caplog.records] == [
        "The engine computes with torch alone: there is no C compiler (cc)."
    ]


def test_a_compiler_that_fails_leaves_nothing_behind_and_its_reason_in_the_log(
    tmp_path, monkeypatch, caplog
):
    tools = tmp_path / "tools"
    tools.mkdir()
    compiler = tools / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "tinkex.engine"):
            assert library.library() is None
    finally:
        library.library.cache_clear()
    assert "no such flag" in caplog.text
    assert list((tmp_path / "tinkex" / "native").iterdir()) == []


def test_the_library_is_compiled_once_into_a_private_directory(tmp_path):
    directory = tmp_path / "native"
    library.build("cc", directory)
    (first,) = directory.iterdir()
    written = first.stat().st_mtime_ns
    library.build("cc", directory)
    (second,) = directory.iterdir()
    assert (second, second.stat().st_mtime_ns) == (first, written)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        library.build("cc", tmp_path)


def test_the_library_brings_no_openmp_runtime_of_its_own(tmp_path):
    library.build("cc", tmp_path)
    (path,) = tmp_path.iterdir()
    needed = subprocess.run(["ldd", path], capture_output=True, check=True, text=True).stdout
    assert "omp" not in needed
