"""Recover a lost training run: automatic checkpoints, a monitor, and a restore from the last checkpoint.

python examples/recovery.py [--base-url local] [--base-model tinkex/tiny] [--steps 12]

The example only simulates the corruption: a wrapper reports the run as corrupted to the monitor. Everything else is
real: the checkpoints, the new run, and its restored optimizer state.
"""

from __future__ import annotations

import argparse
from typing import Any

import tinkex
from tinkex.objectives import completion
from tinkex.recovery import AutoCheckpoint, RecoveryExecutor, RecoveryMonitor, RecoveryPolicy
from tinkex.telemetry.events import RecoveryEvent

DATA = [completion([5, 6, 7, 8], [9, 10, 11, 12]), completion([20, 21, 22], [23, 24, 25])]
ADAM = tinkex.AdamParams(learning_rate=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--base-model", default="tinkex/tiny")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    tinkex.telemetry.attach(lambda event: print(f"  {event.name}"), RecoveryEvent)
    policy = RecoveryPolicy(
        enabled=True,
        poll_interval=0.5,
        on_recovery=lambda old, new, checkpoint: print(f"  {old} continues as {new}"),
        on_failure=lambda run_id, error: print(f"  {run_id} is lost: {error}"),
    )
    with (
        tinkex.ServiceClient(base_url=options.base_url, recovery=policy) as service,
        RecoveryMonitor(RecoveryExecutor()) as monitor,
    ):
        training = service.create_lora_training_client(options.base_model, rank=8)
        with AutoCheckpoint(training, every_steps=options.steps // 3, keep=2) as saved:
            losses = [step(training) for _ in range(options.steps // 2)]
        assert saved.last is not None
        print(f"step {saved.step}, loss {losses[-1]:.3f}, last checkpoint {saved.last.path}")

        restored = monitor.monitor_run(training, Corrupting(service)).result(60)

        # The steps after the checkpoint are lost, so they are repeated.
        training, done = restored.client, saved.last.step
        with AutoCheckpoint(training, every_steps=options.steps // 3, keep=2, first_step=done):
            again = [step(training) for _ in range(options.steps - done)]
        print(f"step {options.steps}, loss {again[-1]:.3f}")
    assert again[: len(losses) - done] == losses[done:]  # the same losses as the first time
    assert again[-1] < losses[-1]


def step(training: tinkex.TrainingClient) -> float:
    passed = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(ADAM).result()
    loss = passed.result().loss
    assert loss is not None
    return loss


class Corrupting:
    """A client wrapper that reports every run as corrupted."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def create_rest_client(self) -> Any:
        return self

    async def get_training_run(self, run_id: str) -> tinkex.TrainingRun:
        run = await self._service.create_rest_client().get_training_run(run_id)
        return run.model_copy(update={"corrupted": True})


if __name__ == "__main__":
    main()
