"""`tinkex billing`: usage by the hour and storage, as the service counts them; `tinkex usage` sums it up."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from .connection import Connection, connected, formatted
from .human import size
from .output import Output, plain, say

__all__ = ["amount", "command"]

#: How much, as kinds of events call it.
_AMOUNTS = ("token_count", "count", "gigabyte_hours")
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("billing")
def command() -> None:
    """What was used, in full."""


@command.command("usage")
@click.argument("starting_on")
@click.argument("ending_before")
@click.option("--csv", "file", type=_FILE, help="Also write it to a file.")
@click.option("--sessions-csv", "sessions", type=_FILE, help="Write the sessions to a file.")
@connected
@formatted
def usage(
    starting_on: str,
    ending_before: str,
    file: Path | None,
    sessions: Path | None,
    connection: Connection,
    output: Output,
) -> None:
    """Usage by the hour between two dates or full UTC hours, at most 14 days apart."""
    with connection.rest() as rest:
        answer = plain(rest.get_billing_usage(starting_on, ending_before).result())
    events = [_flat(event) for event in answer["data"]]
    columns = ["bucket_start", "base_model", "session_id", "type", "amount"]
    rows = [[_shown(event.get(column)) for column in columns] for event in events]
    output.table(["Hour", "Model", "Session", "What", "How much"], rows, answer)
    if file is not None:
        _write(file, events)
    if sessions is not None:
        found = answer["sessions"].items()
        _write(sessions, [{"session_id": one, **_metadata(facts)} for one, facts in found])


@command.command("checkpoint-storage")
@click.option("--project-id", help="Of one project.")
@click.option("--csv", "file", type=_FILE, help="Also write it to a file.")
@connected
@formatted
def checkpoint_storage(
    project_id: str | None, file: Path | None, connection: Connection, output: Output
) -> None:
    """What checkpoints take up now."""
    with connection.rest() as rest:
        answer = plain(rest.get_current_checkpoint_storage_usage(project_id).result())
    rows = [
        [
            _shown(item["user_email"] or item["user_name"]),
            _shown(item["project_id"]),
            item["checkpoint_count"],
            size(item["size_bytes"]),
            _shown(item["estimated_monthly_cost_usd"]),
        ]
        for item in answer["data"]
    ]
    output.table(["User", "Project", "Checkpoints", "Size", "USD a month"], rows, answer)
    if file is not None:
        _write(file, answer["data"])


def _flat(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event with the facts of its kind beside those all have."""
    facts = {name: value for name, value in event.items() if name != "event_info"}
    own: dict[str, Any] = event["event_info"]
    return {**facts, **own, "amount": amount(own)}


def amount(event_info: Mapping[str, Any]) -> Any:
    """How much an event is about, of whatever its kind counts."""
    return next(event_info[name] for name in _AMOUNTS if name in event_info)


def _metadata(facts: Mapping[str, Any]) -> dict[str, Any]:
    return dict(facts.get("user_metadata") or {})


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="") as content:
        writer = csv.DictWriter(content, names)
        writer.writeheader()
        writer.writerows(rows)
    say(f"Written to {file}.")
