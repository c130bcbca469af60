"""The journal: accepted requests and their results in append-only files.

A record is on the disk before anybody is told that it is kept. Records that arrive together share one flush. Files
are cut into segments; when the records of the oldest one that somebody still needs are few, they are written anew
at the end and the segment goes. After a crash the last record may be torn: its checksum does not match, it was
never acknowledged, and it is cut off.
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import orjson

__all__ = ["Journal", "Kind", "Place", "Record"]

_MAGIC: Final = b"tinkexj1"
#: Checksum of all that follows, kind, length of the head, length of the body.
_HEADER: Final = struct.Struct("<IBII")
SEGMENT_BYTES: Final = 64 << 20


class Kind(IntEnum):
    REQUEST = 1
    RESULT = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where the body of a record lies."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Record:
    """One entry: `head` is small and says what it is, the body is bytes."""

    kind: Kind
    head: dict[str, Any]
    place: Place


@dataclass
class _Segment:
    number: int
    path: Path
    descriptor: int
    size: int


@dataclass
class _Flush:
    """Those who wait for one flush."""

    descriptors: set[int] = field(default_factory=set)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Journal:
    """One directory of segments, written by one process."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segments: dict[int, _Segment] = {}
        self._flush = _Flush()
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-journal")

    # -- opening -----------------------------------------------------------------------------

    def open(self) -> Iterator[Record]:
        """All records in the order in which they were written; must be read to the end before appending."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._directory.glob("*.log")):
            number = int(path.stem, 16)
            segment = _Segment(number, path, os.open(path, os.O_RDWR), 0)
            self._segments[number] = segment
            yield from self._scan(segment)
        self._roll()

    def close(self) -> None:
        self._thread.shutdown()
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()

    def _scan(self, segment: _Segment) -> Iterator[Record]:
        end = os.fstat(segment.descriptor).st_size
        offset = len(_MAGIC)
        if os.pread(segment.descriptor, offset, 0) != _MAGIC:
            end = 0
        while offset + _HEADER.size <= end:
            header = os.pread(segment.descriptor, _HEADER.size, offset)
            checksum, kind, head_size, body_size = _HEADER.unpack(header)
            body_at = offset + _HEADER.size + head_size
            if body_at + body_size > end:
                break
            rest = os.pread(segment.descriptor, head_size + body_size, offset + _HEADER.size)
            if zlib.crc32(rest, zlib.crc32(header[4:])) != checksum:
                break
            place = Place(segment.number, body_at, body_size)
            yield Record(Kind(kind), orjson.loads(rest[:head_size]), place)
            offset = body_at + body_size
        segment.size = offset
        os.ftruncate(segment.descriptor, offset if end else 0)

    def _roll(self) -> _Segment:
        """Begin a new segment."""
        number = max(self._segments, default=-1) + 1
        path = self._directory / f"{number:012x}.log"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, _MAGIC)
        segment = self._segments[number] = _Segment(number, path, descriptor, len(_MAGIC))
        self._flush.descriptors.add(descriptor)
        _sync_directory(self._directory)
        return segment

    # -- writing -----------------------------------------------------------------------------

    def append(self, kind: Kind, head: dict[str, Any], body: bytes) -> Place:
        """Write a record; it is safe once `flushed` has returned. A full disk raises OSError and leaves no trace."""
        segment = self._segments[max(self._segments)]
        if segment.size > self._segment_bytes:
            segment = self._roll()
        head_bytes = orjson.dumps(head)
        lengths = _HEADER.pack(0, kind, len(head_bytes), len(body))[4:]
        checksum = zlib.crc32(body, zlib.crc32(head_bytes, zlib.crc32(lengths)))
        parts = [checksum.to_bytes(4, "little") + lengths + head_bytes, body]
        try:
            _write_all(segment.descriptor, parts, segment.size)
        except OSError:
            os.ftruncate(segment.descriptor, segment.size)
            raise
        place = Place(segment.number, segment.size + len(parts[0]), len(body))
        segment.size = place.offset + place.length
        self._flush.descriptors.add(segment.descriptor)
        return place

    async def flushed(self) -> None:
        """Wait until everything appended so far is on the disk."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._flush.waiting.append(waiting)
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush_all())
        await waiting

    async def _flush_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._flush.waiting:
                flush, self._flush = self._flush, _Flush()
                error: OSError | None = None
                try:
                    await loop.run_in_executor(self._thread, _sync, flush.descriptors)
                except OSError as failure:
                    error = failure
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

    def compact(self, needed: Callable[[Record], bool], moved: Callable[[Record], None]) -> bool:
        """Let the oldest full segment go; records that are `needed` are written anew and reported as `moved`."""
        oldest = min(self._segments)
        if oldest == max(self._segments) or self._flushing is not None:
            return False
        segment = self._segments[oldest]
        for record in self._scan(segment):
            if needed(record):
                place = self.append(record.kind, record.head, self.read(record.place))
                moved(Record(record.kind, record.head, place))
        _sync({self._segments[max(self._segments)].descriptor})
        del self._segments[oldest]
        self._flush.descriptors.discard(segment.descriptor)
        os.close(segment.descriptor)
        segment.path.unlink()
        return True


def _write_all(descriptor: int, parts: list[bytes], offset: int) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written


def _sync(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.fsync(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
