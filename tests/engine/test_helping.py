"""One pass on several engines gives the bits of one engine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tinkex._wire.pass_parts import PassPart
from tinkex.engine import base_models
from tinkex.engine.base_models import TINY
from tinkex.engine.engine import TorchEngine
from tinkex.engine.helping import Helping
from tinkex.engine.parcels import FileDepot, Parcel
from tinkex.engine.shards import Block, ShardSums, divide
from tinkex.engine.trainer import Gradients
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob
from tinkex.errors import InvalidInputError

from ..running import finish

SPEC = LoraSpec(4, seed=3)


@pytest.fixture
def engines(tmp_path):
    """Two engines of one pool and one that is alone."""
    tiny = base_models.prepare(base_models.parse_spec(TINY), tmp_path / "models")
    depot = tmp_path / "depot"
    depot.mkdir()
    pool = [TorchEngine([tiny], depot=FileDepot(depot)) for _ in range(2)]
    return (*pool, TorchEngine([tiny]))


def examples(seed, count=16):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(random.integers(100, 250))
        targets = random.integers(0, 256, length)
        made.append(Example(random.integers(0, 256, length), {"target_tokens": targets}))
    return made


def divided(home, helper, request, helped=(1, 2)):
    adapter = home.publish("m")
    count = len(divide(request.examples, home.token_budget))
    assert count > max(helped)
    own = [number for number in range(count) if number not in helped]
    parts = [finish(helper.help_pass(adapter, request, list(helped)))]
    parts.append(finish(home.run_shards("m", request, own)))
    return home.finish_pass("m", request, parts)


def weights(engine, directory: Path):
    engine.save_state("m", directory, optimizer=True)
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    return {
        (name, key): value.tobytes()
        for name in names
        for key, value in load_file(directory / name).items()
    }


def test_divided_passes_and_steps_end_in_the_same_bits(engines, tmp_path):
    home, helper, alone = engines
    for engine in (home, alone):
        engine.create_model("m", TINY, SPEC)
    for step in range(3):
        request = PassJob(examples(step), "cross_entropy")
        expected = finish(alone.run_pass("m", request))
        result = divided(home, helper, request)
        assert result.metrics == expected.metrics
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            assert one.tobytes() == other.tobytes()
        assert home.optim_step("m", AdamStep(1e-2)) == alone.optim_step("m", AdamStep(1e-2))
    assert weights(home, tmp_path / "home") == weights(alone, tmp_path / "alone")


def test_parts_of_a_pass_can_be_divided_and_begun_again(engines, tmp_path):
    home, helper, alone = engines
    for engine in (home, alone):
        engine.create_model("m", TINY, SPEC)
    for index in range(3):
        part = PassPart("p", index, 3)
        request = PassJob(examples(index), "cross_entropy", part=part)
        finish(alone.run_pass("m", request))
        finish(home.run_shards("m", request, [0]))  # the helper died: the part begins again
        divided(home, helper, request, helped=(0, 3))
    for engine in (home, alone):
        engine.optim_step("m", AdamStep(1e-2))
    assert weights(home, tmp_path / "home") == weights(alone, tmp_path / "alone")


def test_invalid_pass_leaves_no_gradient_and_drops_the_parts_before_it(engines, tmp_path):
    home, _, alone = engines
    for engine in (home, alone):
        engine.create_model("m", TINY, SPEC)
    first = PassJob(examples(0), "cross_entropy", part=PassPart("p", 0, 2))
    finish(home.run_pass("m", first))
    bad = Example(np.array([9999]), {"target_tokens": np.array([1])})
    second = PassJob([bad], "cross_entropy", part=PassPart("p", 1, 2))
    with pytest.raises(InvalidInputError):
        finish(home.run_shards("m", second, [0]))
    with pytest.raises(InvalidInputError, match="earlier request"):
        finish(home.run_shards("m", PassJob(examples(1), "ppo", part=PassPart("p", 1, 2)), [0]))
    for engine in (home, alone):
        engine.optim_step("m", AdamStep(1e-2))
    assert weights(home, tmp_path / "home") == weights(alone, tmp_path / "alone")


def test_depot_is_empty_after_a_pass(engines, tmp_path):
    home, helper, _ = engines
    home.create_model("m", TINY, SPEC)
    for step in range(2):
        divided(home, helper, PassJob(examples(step), "cross_entropy"))
        assert not list((tmp_path / "depot").iterdir())


def test_gradients_without_room_for_all_of_them_leave_none(tmp_path):
    class Full(FileDepot):
        def put(self, name: str, data: bytes) -> Parcel:
            if any(tmp_path.iterdir()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().put(name, data)

    gradients: Gradients = [torch.ones(2)]
    blocks = [Block(start, 1, gradients) for start in range(2)]
    with pytest.raises(OSError, match="No space left"):
        Helping(Full(tmp_path)).packed(ShardSums(blocks=blocks))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("after", ["undivided pass", "step", "unload"])
def test_adapter_of_a_pass_that_failed_does_not_stay_in_the_depot(engines, tmp_path, after):
    home, *_ = engines
    home.create_model("m", TINY, SPEC)
    home.publish("m")
    assert len(list((tmp_path / "depot").iterdir())) == 1
    if after == "step":
        home.optim_step("m", AdamStep(1e-2))
    elif after == "unload":
        home.unload_model("m")
    else:
        finish(home.run_pass("m", PassJob(examples(0, 1), "cross_entropy")))
    assert not list((tmp_path / "depot").iterdir())
