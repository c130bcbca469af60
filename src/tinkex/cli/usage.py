"""`tinkex usage`: totals of usage, and their cost."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from .billing import LONGEST_SPAN, amount, unit, used_between
from .connection import Connection, connected, formatted
from .human import size
from .output import Output
from .prices import priced

if TYPE_CHECKING:
    from tinkex.telemetry import Prices
    from tinkex.types import BillingUsageEvent

__all__ = ["command"]


@click.command("usage")
@click.option(
    "--days",
    type=click.IntRange(1, LONGEST_SPAN.days),
    default=7,
    show_default=True,
    help="Number of days until now.",
)
@click.option(
    "--by",
    type=click.Choice(["kind", "session", "model"]),
    default="kind",
    show_default=True,
    help="How to group the lines of the table.",
)
@priced
@connected
@formatted
def command(days: int, by: str, prices: Prices, connection: Connection, output: Output) -> None:
    """Show tokens trained and sampled, their cost, and the storage of checkpoints."""
    from tinkex.telemetry.usage import dollars, total_cost

    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    with connection.rest() as rest:
        usage = used_between(rest, end - timedelta(days=days), end)
        storage = rest.get_current_checkpoint_storage_usage().result()
    groups: dict[tuple[str, str], list[BillingUsageEvent]] = defaultdict(list)
    for event in usage.data:
        group = {"kind": "", "session": event.session_id, "model": event.base_model}[by] or ""
        groups[group, _kind(event)].append(event)
    used = [
        {
            "group": group,
            "kind": kind,
            "count": sum(amount(event.event_info.model_dump()) for event in events),
            "unit": unit(events[0].event_info.model_dump()),
            "cost": total_cost(_cost(event, prices) for event in events),
        }
        for (group, kind), events in sorted(groups.items())
    ]
    cost = total_cost(row["cost"] for row in used)
    rows = [
        [
            row["group"],
            row["kind"].replace("_", " "),
            f"{row['count']:,} {row['unit']}",
            dollars(row["cost"]),
        ]
        for row in used
    ]
    rows.append(["", "in all", "", dollars(cost)])
    rows += [
        [
            "",
            "stored now",
            f"{item.checkpoint_count:,} checkpoints, {size(item.size_bytes)}",
            "",
        ]
        for item in storage.data
    ]
    columns = ["" if by == "kind" else by.capitalize(), "What", "How much", "Cost"]
    # The group and the cost column are dropped if they would be empty.
    shown = slice(by == "kind", None if prices.rates else 3)
    output.table(
        columns[shown],
        [row[shown] for row in rows if prices.rates or row[1] != "in all"],
        {"usage": used, "cost": cost, "storage": storage.data},
    )


def _kind(event: BillingUsageEvent) -> str:
    from tinkex.telemetry.usage import kind_of

    return kind_of(event.event_info) or event.event_info.type


def _cost(event: BillingUsageEvent, prices: Prices) -> float | None:
    """In dollars; only tokens have a price here."""
    from tinkex.telemetry.usage import tokens_of

    return prices.cost(event.base_model, tokens_of(event.event_info))
