"""Points and buckets of a metric, and how to reduce many of them to few; pure.

A bucket summarises consecutive points: the range of each axis, the lowest, highest and mean finite value, and how many
values were not finite. A plot of a million steps is drawn from buckets, so a single spike is still visible.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AXES",
    "BUCKET",
    "POINT",
    "Axis",
    "buckets_of",
    "merged",
    "points_as_buckets",
    "thinned",
]

Axis = Literal["step", "tokens", "time"]
AXES: Final[tuple[Axis, ...]] = get_args(Axis)

Records = NDArray[Any]

POINT: Final = np.dtype([(name, "<f8") for name in (*AXES, "value")])
_RANGES: Final = tuple(f"{axis}_{end}" for axis in AXES for end in ("from", "to"))
_COUNTS: Final = ("total", "finite", "nan", "above", "below")
BUCKET: Final = np.dtype([(name, "<f8") for name in (*_RANGES, "low", "high", *_COUNTS)])


def points_as_buckets(points: Records) -> Records:
    """Each point as a bucket of its own."""
    found = np.empty(len(points), BUCKET)
    for axis in AXES:
        found[f"{axis}_from"] = found[f"{axis}_to"] = points[axis]
    value = points["value"]
    finite = np.isfinite(value)
    # Values that are not finite must not become the lowest or highest.
    found["low"] = np.where(finite, value, np.inf)
    found["high"] = np.where(finite, value, -np.inf)
    found["total"] = np.where(finite, value, 0.0)
    found["finite"] = finite
    found["nan"] = np.isnan(value)
    found["above"] = value == np.inf
    found["below"] = value == -np.inf
    return found


def merged(buckets: Records, starts: NDArray[np.intp]) -> Records:
    """Consecutive buckets joined: one for each entry of `starts`, up to the next entry."""
    found = np.empty(len(starts), BUCKET)
    if not len(starts):
        return found
    for axis in AXES:
        found[f"{axis}_from"] = np.minimum.reduceat(buckets[f"{axis}_from"], starts)
        found[f"{axis}_to"] = np.maximum.reduceat(buckets[f"{axis}_to"], starts)
    found["low"] = np.minimum.reduceat(buckets["low"], starts)
    found["high"] = np.maximum.reduceat(buckets["high"], starts)
    with np.errstate(over="ignore", invalid="ignore"):  # sums of huge values, of both signs
        for name in _COUNTS:
            found[name] = np.add.reduceat(buckets[name], starts)
    return found


def buckets_of(buckets: Records, size: int) -> Records:
    """Buckets joined `size` at a time; their number is a multiple of it."""
    return merged(buckets, np.arange(0, len(buckets), size))


def thinned(buckets: Records, axis: Axis, width: int) -> Records:
    """At most `width` buckets, each for an equal part of the axis, in the order of the axis."""
    start = buckets[f"{axis}_from"]
    if len(start) > 1 and np.any(np.diff(start) < 0):  # a client may log its steps in any order
        buckets = buckets[np.argsort(start, kind="stable")]
        start = buckets[f"{axis}_from"]
    if len(buckets) <= width:
        return buckets
    first, last = start[0], start[-1]
    if not last > first:
        return merged(buckets, np.zeros(1, np.intp))
    place = np.minimum(((start - first) / (last - first) * width).astype(np.intp), width - 1)
    return merged(buckets, np.flatnonzero(np.diff(place, prepend=-1)))
