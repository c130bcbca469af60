"""New points as events carry them, so that a page appends them to its curves instead of reading the curves again.

Each value has its number within its metric. A page that has read 40 values of a metric appends number 40, skips a lower
one, and knows from a higher one that it has missed some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import orjson

from .store import MetricPoint, Written

__all__ = ["MOST_ROWS", "MOST_VALUES", "UNGROWN", "Growth", "growth_of", "json_number"]

#: At most so many values in one write, and in one event over all its runs; beyond it the page reads the curves.
MOST_VALUES: Final = 5_000
#: The same for the steps of one run. A plot has room for 450 points at most, so more are read in any case.
MOST_ROWS: Final = 500


class Growth(NamedTuple):
    """New points of a run: one row of JSON for each step, serialised once for all pages."""

    rows: Sequence[orjson.Fragment] = ()
    values: int = 0


UNGROWN: Final = Growth()


def growth_of(written: Written) -> Growth | None:
    """None if there are too many values or steps for an event."""
    if len(written.points) > MOST_VALUES:
        return None
    counts = dict(written.before)
    rows: list[orjson.Fragment] = []
    values = 0
    for _, points in groupby(written.points, key=_place):
        row: dict[str, Any] = {}
        for point in points:
            if len(rows) > MOST_ROWS:  # not only at the end: each one takes the event loop 6 µs
                return None
            if point.name not in counts:
                continue
            if point.name in row:  # two values of a metric at the same place
                rows.append(_fragment(point, row))
                row = {}
            row[point.name] = counts[point.name], json_number(point.value)
            counts[point.name] += 1
            values += 1
        if row:
            rows.append(_fragment(point, row))
    return Growth(rows, values) if len(rows) <= MOST_ROWS else None


def _place(point: MetricPoint) -> tuple[float, float, float]:
    return point.step, point.tokens, point.time


def _fragment(point: MetricPoint, values: Mapping[str, tuple[int, float | str]]) -> orjson.Fragment:
    place = {"step": point.step, "tokens": point.tokens, "time": point.time}
    return orjson.Fragment(orjson.dumps({**place, "values": values}))


def json_number(value: float) -> float | str:
    """A number for JSON, which knows no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
