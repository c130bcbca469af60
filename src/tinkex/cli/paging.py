"""Lists that services return in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .output import say

__all__ = ["fetch_all", "paged"]


def paged(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--limit` and `--offset`."""
    count = click.IntRange(min=0)
    for option in (
        click.option(
            "--offset", type=count, default=0, show_default=True, help="Number of entries to skip."
        ),
        click.option(
            "--limit",
            type=count,
            default=20,
            show_default=True,
            help="Number of entries; 0 means all.",
        ),
    ):
        command = option(command)
    return command


def fetch_all(
    page: Callable[[int, int], tuple[list[Any], int | None]],
    what: str,
    *,
    limit: int,
    offset: int,
    page_size: int,
) -> tuple[list[Any], int | None]:
    """Up to `limit` items from `offset` on (0 means all), and the total number if known.

    `page(limit, offset)` returns a page and the total, or None if the service does not give it. Without a total,
    a page that is not full is the last.
    """
    items: list[Any] = []
    while True:
        size = page_size if not limit else min(page_size, limit - len(items))
        found, total = page(size, offset + len(items))
        items += found
        wanted = limit or None
        if total is not None:
            wanted = min(limit or total, max(0, total - offset))
        is_last = not found or (total is None and len(found) < size)
        if is_last or (wanted is not None and len(items) >= wanted):
            return items, total
        say(f"Fetching {what}: {len(items)}/{wanted if wanted is not None else '?'}")
