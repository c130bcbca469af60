"""`tinkex billing`: usage by the hour and storage, as the service counts them; `tinkex usage` shows the totals."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tinkex.errors import InvalidInputError

from .connection import Connection, connected, formatted
from .groups import Group
from .human import moment, size
from .output import Output, plain, say

if TYPE_CHECKING:
    from tinkex.types import BillingUsageResponse

__all__ = ["LONGEST_SPAN", "amount", "command", "unit", "used_between"]

#: The field of an event that holds the amount used, and its unit.
_AMOUNTS: Final = {
    "token_count": "tokens",
    "count": "checkpoints",
    "gigabyte_hours": "GB hours",
}
#: A service answers for at most 14 days; longer spans need several requests.
_WINDOW: Final = timedelta(days=14)
LONGEST_SPAN: Final = timedelta(days=366)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("billing", cls=Group)
def command() -> None:
    """Detailed usage and storage."""


@command.command("usage")
@click.argument("starting_on")
@click.argument("ending_before")
@click.option("--csv", "file", type=_FILE, help="Also write the usage to this file.")
@click.option(
    "--sessions-csv", "sessions", type=_FILE, help="Also write the sessions to this file."
)
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
    """Usage by the hour between two dates or full UTC hours, at most a year apart."""
    start, end = _when("starting_on", starting_on), _when("ending_before", ending_before)
    with connection.rest() as rest:
        answer = plain(used_between(rest, start, end))
    events = [_flat(event) for event in answer["data"]]
    columns = ["bucket_start", "base_model", "session_id", "type", "amount", "unit"]
    rows = [[_shown(event.get(column)) for column in columns] for event in events]
    output.table(["Hour", "Model", "Session", "What", "How much", "Unit"], rows, answer)
    if file is not None:
        _write(file, events)
    if sessions is not None:
        found = answer["sessions"].items()
        _write(sessions, [{"session_id": one, **_metadata(facts)} for one, facts in found])


@command.command("checkpoint-storage")
@click.option("--project-id", help="Only this project.")
@click.option("--csv", "file", type=_FILE, help="Also write the table to this file.")
@connected
@formatted
def checkpoint_storage(
    project_id: str | None, file: Path | None, connection: Connection, output: Output
) -> None:
    """Storage that checkpoints use now."""
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
    """An event as one flat row: its common fields, and those of its kind."""
    facts = {name: value for name, value in event.items() if name != "event_info"}
    own: dict[str, Any] = event["event_info"]
    return {**facts, **own, "amount": amount(own), "unit": unit(own)}


def amount(event_info: Mapping[str, Any]) -> Any:
    """The amount used, in the unit of the event's kind."""
    return next(event_info[name] for name in _AMOUNTS if name in event_info)


def unit(event_info: Mapping[str, Any]) -> str:
    return next(unit for name, unit in _AMOUNTS.items() if name in event_info)


def used_between(rest: Any, start: datetime, end: datetime) -> BillingUsageResponse:
    """The usage between two times, at most `LONGEST_SPAN` apart, combined from several requests."""
    from tinkex.types import BillingUsageResponse

    if not timedelta(0) < end - start <= LONGEST_SPAN:
        raise InvalidInputError(
            f"must be after STARTING_ON, by at most {LONGEST_SPAN.days} days",
            field="ending_before",
        )
    asked = [rest.get_billing_usage(*window) for window in _windows(start, end)]
    answers = [answer.result() for answer in asked]
    known = [one.cost_data_through for one in answers if one.cost_data_through is not None]
    return BillingUsageResponse(
        data=[event for answer in answers for event in answer.data],
        sessions={name: one for answer in answers for name, one in answer.sessions.items()},
        cost_data_through=max(known, default=None),
    )


def _windows(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    while start < end:
        until = min(start + _WINDOW, end)
        yield start, until
        start = until


def _when(field: str, text: str) -> datetime:
    when = moment(text)
    if when is None:
        raise InvalidInputError(
            f"{text!r:.80} is not a date such as 2026-01-31 or an hour such as 2026-01-31T08:00",
            field=field,
        )
    return when


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
