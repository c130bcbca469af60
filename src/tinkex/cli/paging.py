"""Lists that come in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .output import say

__all__ = ["fetch_all"]


def fetch_all(
    page: Callable[[int, int], tuple[list[Any], int | None]],
    what: str,
    *,
    limit: int,
    offset: int,
    page_size: int,
) -> tuple[list[Any], int | None]:
    """Up to `limit` items from `offset` on (0 means all), and how many there are in all.

    `page(limit, offset)` gives a page and the total, if the service says it.
    """
    items: list[Any] = []
    while True:
        size = page_size if not limit else min(page_size, limit - len(items))
        found, total = page(size, offset + len(items))
        items += found
        wanted = limit or None
        if total is not None:
            wanted = min(wanted or total, max(0, total - offset))
        if len(found) < size or (wanted is not None and len(items) >= wanted):
            return items, total
        say(f"Fetching {what}: {len(items)}/{wanted if wanted is not None else '?'}")
