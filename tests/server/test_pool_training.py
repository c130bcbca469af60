"""A run on several real engines ends in the bits of a run on one, also when engines die and when their number changes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tinkex.testing import service
from tinkex.types import AdamParams, Datum, ModelInput

STEPS = 4


def data(step: int) -> list[Datum]:
    """A pass of about 5,000 tokens: enough for several engines."""
    random = np.random.default_rng(step)
    made = []
    for length in random.integers(60, 200, 40):
        tokens, targets = random.integers(0, 256, length), random.integers(0, 256, length)
        made.append(Datum(ModelInput.from_ints(tokens.tolist()), {"target_tokens": targets}))
    return made


def kill_an_engine(number: int) -> None:
    """Kill one of the engine processes that this process has started."""
    asked = ["pgrep", "-P", str(os.getpid()), "-f", "tinkex.engine"]
    pids = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(pids[number % len(pids)]), signal.SIGKILL)


def train(client, steps, *, kills=False, path=None):
    """Train and return the path of the last checkpoint; a kill comes in the middle of each step."""
    if path is None:
        training = client.create_lora_training_client("tinkex/tiny", rank=8, seed=1)
    else:
        training = client.create_training_client_from_state_with_optimizer(path)
    for step in steps:
        passed = training.forward_backward(data(step), "cross_entropy")
        stepped = training.optim_step(AdamParams(learning_rate=1e-3))
        if kills:
            kill_an_engine(step)
        passed.result()
        stepped.result()
    return training.save_state(f"after-{max(steps)}").result().path


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


def test_two_engines_end_in_the_bits_of_one(expected, tmp_path):
    with service("torch", data_dir=tmp_path, engines=2) as running:
        train(running.client(), range(STEPS))
    assert saved(tmp_path, f"after-{STEPS - 1}") == expected


def test_engines_that_are_killed_change_no_bit(expected, tmp_path):
    with service("torch", data_dir=tmp_path, engines=3) as running:
        train(running.client(), range(STEPS), kills=True)
        assert running.client().health().engines is not None
    assert saved(tmp_path, f"after-{STEPS - 1}") == expected


def test_the_number_of_engines_may_change_during_a_run(expected, tmp_path):
    with service("torch", data_dir=tmp_path, engines=2) as running:
        path = train(running.client(), range(2))
    with service("torch", data_dir=tmp_path, engines=3) as running:
        train(running.client(), range(2, STEPS), path=path)
    assert saved(tmp_path, f"after-{STEPS - 1}") == expected
