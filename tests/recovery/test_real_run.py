"""A real run of a real service, damaged on disk: the service reports it as corrupted, and it is restored."""

from __future__ import annotations

import contextlib
import json

import pytest

import tinkex
from tinkex.objectives import completion
from tinkex.recovery import AutoCheckpoint, RecoveryExecutor, RecoveryMonitor, RecoveryPolicy
from tinkex.telemetry.events import RecoveryEvent

from ..chaos.served import Served

DATA = [completion([5, 6, 7, 8], [9, 10, 11, 12])]
ADAM = tinkex.AdamParams(learning_rate=1e-3)


def step(training):
    passed = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(ADAM).result(60)
    return passed.result(60).loss


def loss_of(training):
    return training.forward(DATA, "cross_entropy").result(60).loss


def damage_snapshot(data_dir):
    """Flip a bit in the snapshots of a model; the service may be writing the next one meanwhile."""
    for current in data_dir.glob("snapshots/*/current.json"):
        changes = json.loads(current.read_text())["changes"]
        weights = current.parent / str(changes) / "adapter_model.safetensors"
        with contextlib.suppress(FileNotFoundError):
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)


def corrupt(served, data_dir, training):
    """Damage snapshots and kill the engine until the run cannot be restored."""
    while True:
        damage_snapshot(data_dir)
        served.kill_engine()
        error = training.optim_step(ADAM).exception(60)
        if error is not None:
            assert isinstance(error, tinkex.RequestFailedError)
            assert "corrupted" in str(error)
            return


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path, "--snapshot-every=0")
    served.start()
    yield served
    served.stop()


def test_corrupted_run_is_restored_from_its_last_checkpoint(served, tmp_path, heard):
    events, told = heard(RecoveryEvent), []
    policy = RecoveryPolicy(
        enabled=True, poll_interval=0.2, on_recovery=lambda *what: told.append(what)
    )
    with (
        tinkex.ServiceClient(base_url=served.url, api_key="tml-local", recovery=policy) as service,
        RecoveryMonitor(RecoveryExecutor()) as monitor,
    ):
        training = service.create_lora_training_client("tinkex/tiny", rank=4)
        watched = monitor.monitor_run(training, service)
        with AutoCheckpoint(training, every_steps=4, keep=1) as auto:
            losses = [step(training) for _ in range(4)]
        assert auto.last is not None
        expected = loss_of(training)
        corrupt(served, tmp_path, training)

        restored = watched.result(60)
        assert restored.checkpoint == auto.last.path
        assert told == [(training, restored.client, auto.last.path)]
        assert step(restored.client) == expected < losses[0]
        assert loss_of(restored.client) < expected
        rest = service.create_rest_client()
        assert rest.get_training_run(training.model_id).result(60).corrupted
        assert not rest.get_training_run(restored.client.model_id).result(60).corrupted
    assert [event.name.removeprefix("tinkex.recovery.") for event in events] == [
        *("detected", "started", "checkpoint_selected", "client_created", "completed")
    ]
