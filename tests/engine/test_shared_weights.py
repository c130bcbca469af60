"""Weights that several engines of a machine keep in memory once."""

from __future__ import annotations

import errno
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tinkex.engine.engine import TorchEngine
from tinkex.engine.shared_weights import SharedWeights
from tinkex.engine.values import Example, LoraSpec, PassJob

from ..running import finish
from .test_llama_files import FAMILIES, saved


@pytest.fixture
def shared(tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir()
    return SharedWeights(directory), directory


def loaded(model, weights=None, dtype=torch.float32):
    engine = TorchEngine([model], dtype=dtype, shared_weights=weights)
    engine.load(model)
    return engine


def weight_of(engine, model):
    return engine._in_memory(model).language.llama.layers[0].gate_up.weight


def logprobs(engine, model):
    engine.create_model("m", model.name, LoraSpec(2, seed=1))
    tokens = np.random.default_rng(0).integers(0, 300, 90)
    example = Example(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]})
    return finish(engine.run_pass("m", PassJob([example], "cross_entropy"))).logprobs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_that_shares_weights_gives_the_bits_of_one_that_does_not(
    tmp_path, shared, family, dtype
):
    model = saved(tmp_path, family)
    expected = logprobs(loaded(model, dtype=dtype), model)
    for _ in range(2):  # the first engine writes the file, the second maps it
        np.testing.assert_array_equal(
            logprobs(loaded(model, shared[0], dtype), model), expected, strict=True
        )


def test_engines_read_the_same_memory(tmp_path, shared):
    model = saved(tmp_path, "llama")
    first, second = (loaded(model, shared[0]) for _ in range(2))
    weight_of(first, model)[0, 0] = 17.0
    assert weight_of(second, model)[0, 0] == 17.0
    assert [path.stat().st_mode & 0o777 for path in shared[1].glob("weights-*")] == [0o600]


def test_engines_keep_their_own_copies_if_there_is_no_room(tmp_path, shared, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = saved(tmp_path, "llama")
    expected = logprobs(loaded(model), model)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        np.testing.assert_array_equal(logprobs(loaded(model, shared[0]), model), expected)
    (told,) = caplog.records  # once, although every engine finds it
    assert f"{shared[1]} needs 0." in told.getMessage()
    assert "0.0 MB" not in told.getMessage()
    assert list(shared[1].glob("*weights-*")) == []


def test_engine_keeps_its_own_copy_if_the_directory_is_gone(tmp_path, shared, caplog):
    model = saved(tmp_path, "llama")
    expected = logprobs(loaded(model), model)
    shared[1].rmdir()
    np.testing.assert_array_equal(logprobs(loaded(model, shared[0]), model), expected)
    assert "No such file" in caplog.text


def test_engine_keeps_the_weights_that_it_wrote_into_a_directory_that_is_removed(tmp_path, shared):
    weights, directory = shared
    model = saved(tmp_path, "llama")
    parts = [torch.ones(2, 4), torch.zeros(2, 4)]
    with weights.joining([model.directory / "model.safetensors"], parts) as join:
        joined = join(parts)
        shutil.rmtree(directory)
    np.testing.assert_array_equal(joined, torch.cat(parts))


def test_weights_leave_room_for_adapters_and_gradients(tmp_path, shared, monkeypatch):
    weights, directory = shared
    model = saved(tmp_path, "llama")
    size = sum(
        weight.nbytes for weight in loaded(model)._in_memory(model).language.model.parameters()
    )
    for free, files in ((size * 1.1, 0), (size * 1.5, 1)):
        place = SimpleNamespace(f_bavail=int(free), f_frsize=1)
        monkeypatch.setattr(os, "fstatvfs", lambda _, place=place: place)
        loaded(model, weights)
        assert len(list(directory.glob("*weights-*"))) == files


def test_model_that_cannot_be_loaded_leaves_no_file(tmp_path, shared):
    weights, directory = shared
    model = saved(tmp_path, "llama")
    with (
        pytest.raises(ValueError, match="broken"),
        weights.joining([model.directory / "model.safetensors"], [torch.zeros(4, 4)]),
    ):
        raise ValueError("broken")
    assert list(directory.glob("*weights-*")) == []


def test_file_that_a_killed_engine_did_not_finish_is_written_again(tmp_path, shared):
    weights, directory = shared
    model = saved(tmp_path, "llama")
    loaded(model, weights)
    (whole,) = directory.glob("weights-*")
    whole.rename(directory / f".{whole.name}")
    (directory / f".{whole.name}").write_bytes(b"half")
    expected = logprobs(loaded(model), model)
    np.testing.assert_array_equal(logprobs(loaded(model, weights), model), expected)
    assert list(directory.glob("*weights-*")) == [whole]


def test_model_whose_files_have_changed_is_read_again(tmp_path, shared):
    old = saved(tmp_path, "llama")
    before = weight_of(loaded(old, shared[0]), old).clone()
    new = saved(tmp_path, "llama", intermediate_size=96)
    after = weight_of(loaded(new, shared[0]), new)
    assert (len(before), len(after)) == (128, 192)


def test_types_of_one_model_have_files_of_their_own(tmp_path, shared):
    model = saved(tmp_path, "llama")
    for dtype in (torch.float32, torch.bfloat16):
        assert weight_of(loaded(model, shared[0], dtype), model).dtype == dtype
    assert len(list(shared[1].glob("weights-*"))) == 2
