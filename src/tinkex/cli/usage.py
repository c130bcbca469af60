"""`tinkex usage`: what was used."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from .connection import Connection, connected, formatted
from .output import Output

__all__ = ["command"]


@click.command("usage")
@click.option("--days", type=click.IntRange(1, 14), default=7, show_default=True)
@click.option(
    "--by", type=click.Choice(["kind", "session", "model"]), default="kind", show_default=True
)
@connected
@formatted
def command(days: int, by: str, connection: Connection, output: Output) -> None:
    """Tokens trained and sampled, and what checkpoints take."""
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    with connection.rest() as rest:
        usage = rest.get_billing_usage(end - timedelta(days=days), end).result()
        storage = rest.get_current_checkpoint_storage_usage().result()
    totals: Counter[tuple[str, str]] = Counter()
    for event in usage.data:
        kind = event.event_info.type
        group = {"kind": "", "session": event.session_id, "model": event.base_model}[by] or ""
        totals[group, kind] += _amount(event.event_info)
    rows = [[group, kind, f"{count:,}"] for (group, kind), count in sorted(totals.items())]
    rows += [
        ["", "checkpoints kept", f"{item.checkpoint_count} ({item.size_gigabytes:.3f} GB)"]
        for item in storage.data
    ]
    columns = ["", "What", "How much"] if by == "kind" else [by.capitalize(), "What", "How much"]
    output.table(
        columns,
        rows,
        {
            "usage": [
                {"group": group, "kind": kind, "count": count}
                for (group, kind), count in sorted(totals.items())
            ],
            "storage": storage.data,
        },
    )


def _amount(info: Any) -> int:
    return int(info.token_count if hasattr(info, "token_count") else info.count)
