"""A run on Ray ends in the bits of a run on one local engine, also when actors and nodes are killed."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.ray.inside.clusters import Machines
from tinkex.testing import service
from tinkex.types import AdamParams, Datum, ModelInput

STEPS = 40
_SCRIPT = Path(__file__).parents[2] / "server" / "pool_run.py"
NODES = 4


def data(step: int) -> list[Datum]:
    """A pass of about 3,500 tokens: enough for four engines and more."""
    drawn = np.random.default_rng(step)
    made = []
    for length in drawn.integers(60, 200, 28):
        tokens, targets = drawn.integers(0, 256, length), drawn.integers(0, 256, length)
        made.append(Datum(ModelInput.from_ints(tokens.tolist()), {"target_tokens": targets}))
    return made


def train(client, steps, *, before=lambda _: None, path=None) -> str:
    """Train and return the path of the last checkpoint; `before` is called while a step runs."""
    if path is None:
        training = client.create_lora_training_client("tinkex/tiny", rank=8, seed=1)
    else:
        training = client.create_training_client_from_state_with_optimizer(path)
    for step in steps:
        passed = training.forward_backward(data(step), "cross_entropy")
        stepped = training.optim_step(AdamParams(learning_rate=1e-3))
        before(step)
        passed.result()
        stepped.result()
    return str(training.save_state(f"after-{max(steps)}").result().path)


def saved(directory: Path, name: str) -> dict[str, bytes]:
    """The files of a checkpoint that hold numbers."""
    (found,) = directory.glob(f"checkpoints/*/*/{name}")
    return {file.name: file.read_bytes() for file in sorted(found.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    with service("torch", data_dir=directory) as running:
        train(running.client(), range(STEPS))
    return saved(directory, f"after-{STEPS - 1}")


@pytest.fixture(scope="module")
def machines():
    with Machines.running(NODES) as made:
        yield made


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
def test_same_bits_as_one_local_engine(engines, expected, machines, tmp_path):
    options = {"data_dir": tmp_path, "ray": machines.address, "engines": engines}
    with service("torch", **options) as running:
        train(running.client(), range(STEPS))
        listed = running.client().health().engines or []
        assert len(listed) == engines
        assert len({each.node for each in listed}) == len(listed)  # one on each node
    assert saved(tmp_path, f"after-{STEPS - 1}") == expected


def test_the_official_client_ends_in_the_same_bits(machines, tmp_path):
    official = os.environ["TINKEX_OFFICIAL_PYTHON"]
    found = []
    for number, options in enumerate(({}, {"ray": machines.address, "engines": 3})):
        directory = tmp_path / str(number)
        with service("torch", data_dir=directory, **options) as running:
            run = [official, str(_SCRIPT), "tinker", running.url, str(STEPS), "last"]
            # The script reads a line in each step.
            subprocess.run(run, input="\n" * STEPS, text=True, check=True, capture_output=True)
        found.append(saved(directory, "last"))
    assert found[0] == found[1]


def test_the_number_of_engines_may_change_during_a_run(expected, machines, tmp_path):
    with service("torch", data_dir=tmp_path, ray=machines.address, engines=2) as running:
        path = train(running.client(), range(STEPS // 2))
    with service("torch", data_dir=tmp_path, ray=machines.address, engines=3) as running:
        train(running.client(), range(STEPS // 2, STEPS), path=path)
    assert saved(tmp_path, f"after-{STEPS - 1}") == expected


def test_checkpoints_in_a_shared_directory_are_read_and_written_there(expected, machines, tmp_path):
    options = {"data_dir": tmp_path / "data", "ray": machines.address, "shared_dir": tmp_path}
    with service("torch", engines=2, **options) as running:
        train(running.client(), range(STEPS))
    assert saved(tmp_path / "data", f"after-{STEPS - 1}") == expected


def test_killed_actors_and_nodes_change_no_bit(expected, machines, tmp_path, request):
    kills = 20 if request.config.getoption("--long") else 4
    drawn = random.Random(7)
    doomed = dict.fromkeys(sorted(drawn.sample(range(1, STEPS - 1), kills)))

    def kill(step: int) -> None:
        if step not in doomed:
            return
        if step % 4 == 0:
            machines.kill_node(drawn.randrange(NODES))
            machines.join()
        else:
            machines.kill_actor(drawn.randrange(NODES))

    options = {"data_dir": tmp_path, "ray": machines.address, "snapshot_every": 0.5}
    with service("torch", engines="auto", **options) as running:
        train(running.client(), range(STEPS), before=kill)
    assert saved(tmp_path, f"after-{STEPS - 1}") == expected
