"""One metric of one run on disk: every point, and buckets of 64, 4,096, … points above them.

Files are only appended to. A read visits at most 64 records for each bucket of its answer, whatever the length of the
run: it starts at the coarsest level and goes to finer ones until the requested range has enough buckets for the plot. A
crash can leave the last record incomplete, or the buckets behind their points; both are repaired when the column is
opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .thinning import BUCKET, POINT, Axis, Records, buckets_of, points_as_buckets, thinned

__all__ = ["Column"]

#: Records that one record of the next level summarises.
FANOUT: Final = 64


class Column:
    """The points of one metric. One thread appends; any thread may read meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path  # without the suffix of a level
        #: Complete records by level, 0 for points. Replaced as a whole, so that readers see consistent numbers.
        self._counts: tuple[int, ...] = (0,)
        self._open()

    @property
    def count(self) -> int:
        return self._counts[0]

    @property
    def bytes(self) -> int:
        return sum(count * _size(level) for level, count in enumerate(self._counts))

    def append(self, points: Records) -> None:
        """Append points; they survive the process, but perhaps not a power cut."""
        _write(self._file(0), points, self._counts[0])
        self._counts = (self._counts[0] + len(points), *self._counts[1:])
        self._summarise()

    def last(self) -> Records | None:
        """The newest point."""
        count = self._counts[0]
        return self._records(0, count - 1, count)[0] if count else None

    def read(
        self, axis: Axis, start: float | None, end: float | None, width: int
    ) -> tuple[Records, int]:
        """At most `width` buckets of the points within a range of an axis, and how many points there were in all."""
        counts = self._counts
        level = len(counts) - 1
        places = np.arange(counts[level])
        while True:
            found = self._at(level, places, counts)
            kept = _overlaps(found, axis, start, end)
            if level == 0 or np.count_nonzero(kept) >= width:
                break
            below = (places[kept][:, None] * FANOUT + np.arange(FANOUT)).ravel()
            rest = np.arange(counts[level] * FANOUT, counts[level - 1])
            places, level = np.concatenate([below, rest]), level - 1
        parts = [found[kept]]
        for finer in range(level - 1, -1, -1):  # records that are too new to be in a bucket
            rest = np.arange(counts[finer + 1] * FANOUT, counts[finer])
            newest = self._at(finer, rest, counts)
            parts.append(newest[_overlaps(newest, axis, start, end)])
        return thinned(np.concatenate(parts), axis, width), counts[0]

    # -- files ---------------------------------------------------------------------------------

    def _file(self, level: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{level}")

    def _open(self) -> None:
        counts = [_complete(self._file(0), POINT.itemsize)]
        while counts[-1] >= FANOUT:
            level = len(counts)
            there = _complete(self._file(level), BUCKET.itemsize)
            if (
                there > counts[-1] // FANOUT
            ):  # after a power cut, points are lost and their buckets are not
                there = 0
                self._file(level).unlink()
            counts.append(there)
            self._counts = tuple(counts)
            self._summarise_level(level)
            counts = list(self._counts)
        self._counts = tuple(counts)

    def _summarise(self) -> None:
        level = 1
        while self._counts[level - 1] >= FANOUT:
            if level == len(self._counts):
                self._counts = (*self._counts, 0)
            self._summarise_level(level)
            level += 1

    def _summarise_level(self, level: int) -> None:
        """Write the buckets of a level whose records below are complete."""
        counts = self._counts
        have, want = counts[level], counts[level - 1] // FANOUT
        for start in range(have, want, 4096):  # so that repairing a long file needs little memory
            end = min(want, start + 4096)
            below = self._records(level - 1, start * FANOUT, end * FANOUT)
            if level == 1:
                below = points_as_buckets(below)
            _write(self._file(level), buckets_of(below, FANOUT), start)
        self._counts = (*counts[:level], want, *counts[level + 1 :])

    def _records(self, level: int, start: int, end: int) -> Records:
        kind = POINT if level == 0 else BUCKET
        if end <= start:
            return np.empty(0, kind)
        offset = start * kind.itemsize
        found = np.fromfile(self._file(level), kind, count=end - start, offset=offset)
        if len(found) < end - start:
            raise ValueError(f"{self._file(level).name} is shorter than it was")
        return found

    def _at(self, level: int, places: NDArray[np.intp], counts: tuple[int, ...]) -> Records:
        """The records at these positions, in order, as buckets."""
        if not len(places):
            return np.empty(0, BUCKET)
        start, end = int(places[0]), int(places[-1]) + 1
        if end - start == len(places):
            found = self._records(level, start, end)
        else:
            kind = POINT if level == 0 else BUCKET
            mapped = np.memmap(self._file(level), kind, "r", shape=(counts[level],))
            found = np.asarray(mapped[places])
        return points_as_buckets(found) if level == 0 else found


def _overlaps(
    buckets: Records, axis: Axis, start: float | None, end: float | None
) -> NDArray[np.bool_]:
    kept = np.ones(len(buckets), np.bool_)
    if start is not None:
        kept &= buckets[f"{axis}_to"] >= start
    if end is not None:
        kept &= buckets[f"{axis}_from"] <= end
    return kept


def _size(level: int) -> int:
    return POINT.itemsize if level == 0 else BUCKET.itemsize


def _complete(path: Path, size: int) -> int:
    """The number of complete records of a file; an incomplete last one is removed."""
    try:
        length = path.stat().st_size
    except FileNotFoundError:
        return 0
    if length % size:
        with path.open("r+b") as file:
            file.truncate(length - length % size)
    return length // size


def _write(path: Path, records: Records, place: int) -> None:
    """Write records from number `place` on: whatever a full disk left there is overwritten."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        data = memoryview(records.tobytes())
        offset = place * records.dtype.itemsize
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(descriptor)
