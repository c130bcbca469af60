"""`tinkex status`: what is running where."""

from __future__ import annotations

from typing import Any

import click

from .connection import Connection, connected, formatted
from .output import Output

__all__ = ["command"]


@click.command("status")
@connected
@formatted
def command(connection: Connection, output: Output) -> None:
    """The service, its models, and the runs that were used last."""
    with connection.service() as service:
        models = service.get_server_capabilities().model_names()
        rest = service.create_rest_client()
        runs = rest.list_training_runs(5, 0).result()
        checkpoints = rest.list_user_checkpoints(1, 0).result()
        url = service.config.base_url
    kept: Any = checkpoints.cursor.total_count if checkpoints.cursor else "?"
    facts = {
        "Service": url,
        "Base models": ", ".join(models) or "none",
        "Training runs": runs.cursor.total_count,
        "Checkpoints": kept,
        "Last used": ", ".join(run.training_run_id for run in runs.training_runs) or "none",
    }
    payload = {
        "base_url": url,
        "models": models,
        "runs": runs.cursor.total_count,
        "checkpoints": kept,
        "last_runs": runs.training_runs,
    }
    output.record(facts, payload)
