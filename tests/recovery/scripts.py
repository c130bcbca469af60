"""A scripted service with one run, which may be corrupted."""

from __future__ import annotations

from typing import Any

from tinkex.recovery import RecoveryPolicy

from ..client.helpers import LOAD, flags
from ..scripted import Answer, ScriptedServer

RUN = "s-0:train:0"
ASK = f"GET /api/v1/training_runs/{RUN}"
PATH = f"tinker://{RUN}/weights/auto-000040"
NEW = "s-1:train:0"
ENABLED = RecoveryPolicy(enabled=True)


def run(*, corrupted: bool = True, checkpoint: str | None = PATH, **more: Any) -> Answer:
    """The service's description of the run."""
    saved = {
        "checkpoint_id": "weights/auto-000040",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": checkpoint,
    }
    return Answer(
        {
            "training_run_id": RUN,
            "base_model": "some/model",
            "model_owner": "me",
            "is_lora": True,
            "corrupted": corrupted,
            "last_request_time": "2026-01-01T00:00:00Z",
            "last_checkpoint": None if checkpoint is None else saved,
            **more,
        }
    )


def answer_restoring(server: ScriptedServer) -> None:
    """Script the answers for loading checkpoints into new models."""
    flags(server, create_model_via_load_weights=True)
    server.on(LOAD, Answer({"path": PATH, "model_id": NEW}))
