"""The journal: accepted requests and their results in append-only files.

A record is on the disk before anybody is told that it is kept. Records that arrive together share one flush. Files
are cut into segments; when the records of the oldest one that somebody still needs are few, they are written anew
at the end and the segment goes. A record keeps its number when it moves, so that whoever reads the journal meets a
request before its result, however often either was moved. After a crash the last record may be torn: its checksum
does not match, it was never acknowledged, and it is cut off. One that is damaged between others is told and passed
over; what it was is missed by those who read the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import orjson

from tinkex.engine.files import flush, make_directory, sync

__all__ = ["Journal", "Kind", "Place", "Record"]

logger = logging.getLogger("tinkex.server")

_MAGIC: Final = b"tinkexj1"
#: Checksum of all that follows, kind, number, length of the head, length of the body.
_HEADER: Final = struct.Struct("<IBQII")
SEGMENT_BYTES: Final = 64 << 20
#: How much of a segment is compacted before others have their turn: a millisecond's work.
_SLICE_BYTES: Final = 64 << 10


class Kind(IntEnum):
    REQUEST = 1
    RESULT = 2


_KINDS: Final = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the body of a record lies."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Record:
    """One entry: `head` is small and says what it is, the body is bytes."""

    number: int
    kind: Kind
    head: dict[str, Any]
    place: Place


@dataclass
class _Segment:
    number: int
    path: Path
    descriptor: int
    size: int
    damaged: int = 0


@dataclass
class _Flush:
    """Those who wait for one flush, and up to where it goes once it has begun."""

    descriptors: set[int] = field(default_factory=set)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    end: tuple[int, int] = (-1, 0)


class Journal:
    """One directory of segments, written by one process."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        sync: Callable[[int], None] = sync,
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._segments: dict[int, _Segment] = {}
        self._next_number = 0
        self._end = self._flushed = (-1, 0)  # positions: a segment, and how much of it
        self._flush = self._under_way = _Flush()
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-journal")

    # -- opening -----------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """All records in the order in which they were first written."""
        make_directory(self._directory)
        records: dict[int, Record] = {}  # a crash in the middle of a move leaves two copies
        for path in sorted(self._directory.glob("*.log")):
            if path.stat().st_size < len(_MAGIC):  # a crash came before its first record
                path.unlink()
                continue
            segment = _Segment(int(path.stem, 16), path, os.open(path, os.O_RDWR), 0)
            self._segments[segment.number] = segment
            records.update((record.number, record) for record in self._scan(segment))
        self._next_number = max(records, default=-1) + 1
        self._go_on()
        return [records[number] for number in sorted(records)]

    def close(self) -> None:
        self._thread.shutdown()
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()

    def _scan(self, segment: _Segment) -> Iterator[Record]:
        """The whole records of a segment, whose size then is where they end.

        Behind a damaged record the next one is looked for where its header says that it ends, and nowhere else:
        a body may hold whatever its sender wanted to pass for a record.
        """
        end = os.fstat(segment.descriptor).st_size
        segment.size = segment.damaged = 0
        if os.pread(segment.descriptor, len(_MAGIC), 0) != _MAGIC:
            return
        segment.size = offset = len(_MAGIC)
        while offset + _HEADER.size <= end:
            header = os.pread(segment.descriptor, _HEADER.size, offset)
            checksum, kind, number, head_size, body_size = _HEADER.unpack(header)
            begin, body_at = offset, offset + _HEADER.size + head_size
            offset = body_at + body_size
            if offset > end or kind not in _KINDS:
                break
            rest = os.pread(segment.descriptor, head_size + body_size, begin + _HEADER.size)
            if zlib.crc32(rest, zlib.crc32(header[4:])) != checksum:
                continue
            segment.damaged += begin - segment.size
            segment.size = offset
            place = Place(segment.number, body_at, body_size)
            yield Record(number, Kind(kind), orjson.loads(rest[:head_size]), place)

    def _go_on(self) -> None:
        """Cut a torn end off and go on there, or begin a new segment."""
        last = max(self._segments, default=-1)
        for segment in self._segments.values():
            excess = os.fstat(segment.descriptor).st_size - segment.size
            if excess and segment.number == last and segment.size:
                os.ftruncate(segment.descriptor, segment.size)
                excess = 0
            lost = segment.damaged + excess
            if lost:  # more than the end of a crash: left for a person to look at
                logger.error("%s is damaged: %d bytes cannot be read.", segment.path, lost)
        # Of what another process wrote nobody knows whether it is on the disk.
        self._flush.descriptors.update(each.descriptor for each in self._segments.values())
        if last < 0 or not 0 < self._segments[last].size <= self._segment_bytes:
            self._roll()

    def _roll(self) -> _Segment:
        """Begin a new segment."""
        number = max(self._segments, default=-1) + 1
        path = self._directory / f"{number:012x}.log"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(descriptor, [_MAGIC], 0)
            flush(self._directory)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        segment = self._segments[number] = _Segment(number, path, descriptor, len(_MAGIC))
        self._flush.descriptors.add(descriptor)
        return segment

    # -- writing -----------------------------------------------------------------------------

    def append(self, kind: Kind, head: dict[str, Any], body: bytes) -> Place:
        """Write a record; it is safe once `flushed` has returned. A full disk raises OSError and leaves no trace."""
        place = self._append(self._next_number, kind, head, body)
        self._next_number += 1
        return place

    def _append(self, number: int, kind: Kind, head: dict[str, Any], body: bytes) -> Place:
        segment = self._segments[max(self._segments)]
        if segment.size > self._segment_bytes:
            segment = self._roll()
        head_bytes = orjson.dumps(head)
        header = _HEADER.pack(0, kind, number, len(head_bytes), len(body))[4:]
        checksum = zlib.crc32(body, zlib.crc32(head_bytes, zlib.crc32(header)))
        parts = [checksum.to_bytes(4, "little") + header + head_bytes, body]
        try:
            _write_all(segment.descriptor, parts, segment.size)
        except OSError:
            os.ftruncate(segment.descriptor, segment.size)
            raise
        place = Place(segment.number, segment.size + len(parts[0]), len(body))
        segment.size = place.offset + place.length
        self._end = segment.number, segment.size
        self._flush.descriptors.add(segment.descriptor)
        return place

    def is_flushed(self, place: Place) -> bool:
        """Whether the record whose body lies there is known to be on the disk."""
        return (place.segment, place.offset + place.length) <= self._flushed

    async def flushed(self, place: Place | None = None) -> None:
        """Wait until everything appended so far is on the disk, or only the record whose body lies there."""
        if place is not None and self.is_flushed(place):
            return
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        covered = (
            self._flushing is not None
            and place is not None
            and (place.segment, place.offset + place.length) <= self._under_way.end
        )
        (self._under_way if covered else self._flush).waiting.append(waiting)
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush_all())
        await waiting

    async def _flush_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._flush.waiting:
                flush, self._flush = self._flush, _Flush()
                self._under_way, flush.end = flush, self._end
                error: Exception | None = None
                try:
                    await loop.run_in_executor(self._thread, self._sync_all, flush.descriptors)
                except Exception as failure:  # whatever it is, nobody shall wait for ever
                    error = failure
                    self._flush.descriptors |= flush.descriptors
                else:
                    self._flushed = flush.end
                for waiting in flush.waiting:
                    if waiting.done():
                        continue
                    if error is None:
                        waiting.set_result(None)
                    else:
                        waiting.set_exception(error)
        finally:
            self._flushing = None

    # -- reading -----------------------------------------------------------------------------

    def read(self, place: Place) -> bytes:
        return os.pread(self._segments[place.segment].descriptor, place.length, place.offset)

    # -- forgetting --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    async def compact(
        self, needed: Callable[[Record], bool], moved: Callable[[Record], None]
    ) -> bool:
        """Let the oldest full segment go; records that are `needed` are written anew and reported as `moved`.

        Whether that has gained anything. Others read and write meanwhile.
        """
        oldest = min(self._segments)
        if oldest == max(self._segments):
            return False
        segment = self._segments[oldest]
        gained = False
        paused_at = 0
        for record in self._scan(replace(segment)):
            if record.place.offset - paused_at > _SLICE_BYTES:
                paused_at = record.place.offset
                await asyncio.sleep(0)
            if needed(record):
                body = self.read(record.place)
                moved(
                    replace(
                        record, place=self._append(record.number, record.kind, record.head, body)
                    )
                )
            else:
                gained = True
        await self.flushed()
        del self._segments[oldest]
        os.close(segment.descriptor)
        segment.path.unlink()
        return gained

    def _sync_all(self, descriptors: set[int]) -> None:
        for descriptor in descriptors:
            self._sync(descriptor)


def _write_all(descriptor: int, parts: list[bytes], offset: int) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
