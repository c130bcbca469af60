"""`tinkex status`: the service, its models and recent runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from tinkex.config import LOCAL

from .connection import Connection, connected, formatted
from .human import ago, size
from .listing import of_user
from .output import Output

if TYPE_CHECKING:
    from tinkex._client.service import ServiceClient
    from tinkex.types import EngineHealth

    from .payloads import Status

__all__ = ["command"]


@click.command("status")
@connected
@formatted
def command(connection: Connection, output: Output) -> None:
    """Show the service, its models, and the most recently used runs. Starts no service."""
    from tinkex import _local

    config = connection.config()
    here = _local.running()
    payload: Status = {
        "base_url": config.base_url,
        "running": config.base_url != LOCAL or here is not None,
        "local_url": here,
        "data_dir": str(_local.data_directory()),
        "models": [],
        "engines": [],
        "trouble": None,
        "runs": None,
        "checkpoints": None,
        "last_runs": [],
    }
    if payload["running"]:
        _ask(connection, payload)
    output.record(_facts(payload), payload)


def _ask(connection: Connection, payload: Status) -> None:
    with connection.service(patient=False) as service:
        payload["models"] = service.get_server_capabilities().model_names()
        payload["engines"], payload["trouble"] = _health(service)
        rest = service.create_rest_client()
        runs = rest.list_training_runs(5, 0).result()
        _, payload["checkpoints"] = of_user(rest, 1, 0)
    payload["runs"], payload["last_runs"] = runs.cursor.total_count, runs.training_runs


def _health(service: ServiceClient) -> tuple[list[EngineHealth], str | None]:
    """The engines, and why they cannot serve. A service that answers 503 lists them too: now they are wanted most."""
    from tinkex.errors import APIStatusError
    from tinkex.types import HealthResponse

    try:
        return service.health().engines or [], None
    except APIStatusError as error:
        if error.status_code != 503 or not isinstance(error.body, Mapping):
            raise
        listed = error.body.get("engines", [])
        return HealthResponse.model_validate({"engines": listed}).engines or [], error.message


def _facts(payload: Status) -> dict[str, object]:
    facts: dict[str, object] = {"Service": _service(payload)}
    if payload["base_url"] == LOCAL or payload["local_url"] is not None:
        facts["Local service"] = (
            f"{payload['local_url'] or 'not running'} (data in {payload['data_dir']})"
        )
    if payload["running"]:
        facts |= {
            "Base models": ", ".join(payload["models"]) or "none",
            **({} if payload["trouble"] is None else {"Trouble": payload["trouble"]}),
            **_engines(payload["engines"]),
            "Training runs": payload["runs"],
            "Checkpoints": "?" if payload["checkpoints"] is None else payload["checkpoints"],
        }
    if payload["last_runs"]:
        facts["Last used"] = "\n".join(
            f"{run.training_run_id}  {run.base_model}  {ago(run.last_request_time)}"
            for run in payload["last_runs"]
        )
    return facts


def _engines(engines: list[EngineHealth]) -> dict[str, str]:
    """One line per engine, if the service reports them."""
    lines = [
        f"{each.name}  {each.kind} on {_place(each)}  {_state(each)}  "
        f"models {each.models}  queued {each.in_line}  samples {each.samples}  restarts {each.restarts}"
        + ("" if each.memory_bytes is None else f"  {size(each.memory_bytes)}")
        + ("" if each.trouble is None else f"\n  {each.trouble}")
        for each in engines
    ]
    return {"Engines": "\n".join(lines)} if lines else {}


def _state(engine: EngineHealth) -> str:
    return "starting" if not engine.up else "up" if engine.trouble is None else "stuck"


def _place(engine: EngineHealth) -> str:
    """The device, and the machine if the service runs on several."""
    return ", ".join(filter(None, (engine.node, engine.device))) or "?"


def _service(payload: Status) -> str:
    """The address of the service, and whether it answers."""
    if payload["running"]:
        return f"{payload['base_url']} (answers)"
    return f"{payload['base_url']} (not running; the first command that needs it starts it)"
