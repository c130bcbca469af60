"""The journal: accepted requests and their results in append-only files.

A record is on disk before it is acknowledged. Records that arrive together share one flush. The journal consists of
segment files. Compaction rewrites the records of the oldest segment that are still needed at the end of the journal
and deletes the segment. A record keeps its number when it moves, so a replay sees a request before its result,
however often either moved. After a crash the last record may be torn: it was never acknowledged, and it is cut off.
Anything else that is unreadable is damage: a copy of the segment is set aside, `damage` lists what is missing, and
`mend` rewrites the segment once the affected runs are marked.

After a failed flush it is unknown which pages are on disk, and a later flush would not report the loss. So records
stay in memory until they are flushed, and after a failure they are rewritten to a new segment.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tinkex.engine.files import flush, make_directory, sync

from .segments import PROLOGUE_BYTES, BodyPosition, Damage, Kind, Record, Torn, Writer, scan

__all__ = ["BodyPosition", "Damage", "Journal", "Kind", "Record"]

logger = logging.getLogger("tinkex.server")

SEGMENT_BYTES: Final = 64 << 20
#: Limit on unflushed bytes, which stay in memory: more are refused, so that a failing disk does not exhaust memory.
UNFLUSHED_BYTES: Final = 1 << 30
#: A flush starts without a waiter once one part in this many of that limit is unflushed.
_EARLY: Final = 32
#: Bytes that compaction handles before it yields to the event loop: about a millisecond of work.
_SLICE_BYTES: Final = 64 << 10
#: Attempts of a flush: a failed one is retried once, in a new segment, before its waiters get the error.
_TRIES: Final = 2


@dataclass
class _Segment:
    number: int
    path: Path
    descriptor: int
    size: int
    writer: Writer | None  # None: the segment can only be read
    flushed: int = 0
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class _Unflushed:
    """A record that must be rewritten if the flush fails, and the position of its end."""

    record: Record
    body: bytes
    end: tuple[int, int]


@dataclass
class _Flush:
    """The waiters of one flush, and the position up to which it flushes once it has started."""

    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    end: tuple[int, int] = (-1, 0)


class Journal:
    """One directory of segments, written by one process."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        unflushed_bytes: int = UNFLUSHED_BYTES,
        sync: Callable[[int], None] = sync,
        set_aside: Callable[[Path, str], object] = lambda path, why: None,
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._unflushed_limit = unflushed_bytes
        self._sync = sync
        self._set_aside = set_aside
        self._segments: dict[int, _Segment] = {}
        self._next_number = 0
        self._end = self._flushed = (-1, 0)  # positions: segment number and offset
        self._unflushed: deque[_Unflushed] = deque()
        self._unflushed_bytes = 0
        self._distrusted = False  # the last flush failed
        self._flush = self._under_way = _Flush()
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-journal")
        #: The unreadable parts found by `open`.
        self.damage: list[Damage] = []
        #: Called with every record that was rewritten, with its new place.
        self.on_moved: Callable[[Record], None] = lambda _: None

    # -- opening -----------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """Open the journal and return all records in the order in which they were first written."""
        make_directory(self._directory)
        records: dict[int, Record] = {}  # by number: a crash during a rewrite leaves two copies
        paths = sorted(self._directory.glob("*.log"))
        for path in paths:
            descriptor = os.open(path, os.O_RDWR)
            segment = _Segment(int(path.stem, 16), path, descriptor, 0, Writer.of(descriptor))
            self._segments[segment.number] = segment
            records.update(
                (record.number, record) for record in self._read(segment, last=path is paths[-1])
            )
            if not segment.size:  # the service crashed before its first record
                self._remove(segment)
                continue
            # An earlier process wrote it and may not have flushed it.
            self._sync(descriptor)
            segment.flushed = segment.size
        self._next_number = max(records, default=-1) + 1
        last = self._segments[max(self._segments)] if self._segments else None
        if last is None or last.writer is None or last.damaged or last.size > self._segment_bytes:
            last = self._roll()
        self._end = self._flushed = (last.number, last.flushed)
        return [records[number] for number in sorted(records)]

    def close(self) -> None:
        self._thread.shutdown()
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()

    def _read(self, segment: _Segment, *, last: bool) -> Iterator[Record]:
        """The records of a segment; cuts off a torn end and sets a copy of a damaged segment aside."""
        found: list[Damage] = []
        segment.size = os.fstat(segment.descriptor).st_size
        for entry in scan(segment.descriptor, segment.number):
            if isinstance(entry, Torn) and (last or segment.size <= PROLOGUE_BYTES):
                logger.info(
                    "%s: cut off an incomplete record of %d bytes at the end.",
                    segment.path,
                    entry.length,
                )
                segment.size = entry.offset
                os.ftruncate(segment.descriptor, entry.offset)
            elif isinstance(entry, Torn):
                found.append(Damage(entry.offset, entry.length))
            elif isinstance(entry, Damage):
                found.append(entry)
            else:
                yield entry
        if found:
            segment.damaged = True
            self.damage += found
            lost = sum(entry.length for entry in found)
            logger.error("%s is damaged: %d bytes cannot be read.", segment.path, lost)
            self._set_aside(segment.path, f"{lost} bytes of it cannot be read")

    def _roll(self) -> _Segment:
        """Start a new segment."""
        number = max(self._segments, default=-1) + 1
        path = self._directory / f"{number:012x}.log"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        writer = Writer()
        try:
            _write_all(descriptor, [writer.prologue], 0)
            flush(self._directory)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        segment = _Segment(number, path, descriptor, PROLOGUE_BYTES, writer)
        self._segments[number] = segment
        return segment

    # -- writing -----------------------------------------------------------------------------

    def append(self, kind: Kind, head: dict[str, Any], body: bytes) -> BodyPosition:
        """Write a record; it is durable once `flushed` returns. On a full disk, raises OSError and writes nothing."""
        place = self._append(self._next_number, kind, head, body)
        self._next_number += 1
        return place

    def _append(self, number: int, kind: Kind, head: dict[str, Any], body: bytes) -> BodyPosition:
        if self._unflushed_bytes > self._unflushed_limit:
            raise OSError(errno.EIO, "too many bytes wait for a disk that fails to flush")
        segment = self._segments[max(self._segments)]
        if segment.size > self._segment_bytes:
            segment = self._roll()
        unflushed = self._write(segment, number, kind, head, body)
        self._keep(unflushed)
        if self._unflushed_bytes > self._unflushed_limit // _EARLY and self._flushing is None:
            self._flush_soon()
        return unflushed.record.place

    def _flush_soon(self) -> None:
        """Start a flush without a waiter: nothing waits for the flush of a result."""
        with suppress(RuntimeError):  # no event loop is running
            loop = asyncio.get_running_loop()
            waiting: asyncio.Future[None] = loop.create_future()
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._flush.waiting.append(waiting)
            self._flushing = loop.create_task(self._flush_all())

    def _write(
        self, segment: _Segment, number: int, kind: Kind, head: dict[str, Any], body: bytes
    ) -> _Unflushed:
        """Write a record at the end of a segment."""
        assert segment.writer is not None
        parts = segment.writer.record(number, kind, head, body)
        try:
            _write_all(segment.descriptor, parts, segment.size)
        except OSError:
            with suppress(OSError):  # the next record overwrites the remains
                os.ftruncate(segment.descriptor, segment.size)
            raise
        place = BodyPosition(segment.number, segment.size + len(parts[0]), len(body))
        segment.size += sum(map(len, parts))
        return _Unflushed(Record(number, kind, head, place), body, (segment.number, segment.size))

    def _keep(self, unflushed: _Unflushed) -> None:
        self._unflushed.append(unflushed)
        self._unflushed_bytes += len(unflushed.body)
        self._end = unflushed.end

    def is_flushed(self, place: BodyPosition) -> bool:
        """Whether the record with its body at `place` is known to be on disk."""
        return (place.segment, place.offset + place.length) <= self._flushed

    async def flushed(self, place: BodyPosition | None = None) -> None:
        """Wait until everything appended so far is on disk, or only the record with its body at `place`."""
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
        try:
            while self._flush.waiting:
                flush, self._flush = self._flush, _Flush()
                self._under_way = flush
                error: Exception | None = None
                for _ in range(_TRIES):
                    error = await self._try_flush(flush)
                    if not isinstance(error, OSError):
                        break
                for waiting in flush.waiting:
                    if waiting.done():
                        continue
                    if error is None:
                        waiting.set_result(None)
                    else:
                        waiting.set_exception(error)
                flush.end = (-1, 0)  # no later waiter may join it
        finally:
            self._flushing = None

    async def _try_flush(self, flush: _Flush) -> Exception | None:
        """Flush everything written so far; return the error, if any."""
        loop = asyncio.get_running_loop()
        try:
            if self._distrusted:
                self._rewrite_unflushed()
            flush.end = self._end
            dirty = [each for each in self._segments.values() if each.size > each.flushed]
            sizes = [each.size for each in dirty]
            descriptors = [each.descriptor for each in dirty]
            await loop.run_in_executor(self._thread, self._sync_all, descriptors)
        except Exception as failure:  # any error: no waiter may wait for ever
            if isinstance(failure, OSError):
                logger.exception("The journal could not be flushed.")
                self._distrusted = True
            return failure
        for segment, size in zip(dirty, sizes, strict=True):
            segment.flushed = size
        self._flushed = max(self._flushed, flush.end)
        while self._unflushed and self._unflushed[0].end <= self._flushed:
            self._unflushed_bytes -= len(self._unflushed.popleft().body)
        return None

    def _rewrite_unflushed(self) -> None:
        """Write the unflushed records to a new segment and cut them off the old ones."""
        distrusted = [each for each in self._segments.values() if each.size > each.flushed]
        segment = self._roll()
        try:
            moved = [
                self._write(
                    segment, each.record.number, each.record.kind, each.record.head, each.body
                )
                for each in self._unflushed
            ]
        except OSError:
            self._remove(segment)
            raise
        self._distrusted = False
        self._unflushed.clear()
        self._unflushed_bytes = 0
        self._end = (segment.number, segment.size)
        for each in moved:
            self._keep(each)
            self.on_moved(each.record)
        for old in distrusted:
            old.size = old.flushed
            if not old.size:
                self._remove(old)
                continue
            with suppress(OSError):
                os.ftruncate(old.descriptor, old.size)
        logger.warning("Rewrote the unflushed records to %s.", segment.path)

    # -- reading -----------------------------------------------------------------------------

    def read(self, place: BodyPosition) -> bytes:
        return os.pread(self._segments[place.segment].descriptor, place.length, place.offset)

    # -- compaction --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    async def compact(self, needed: Callable[[Record], bool]) -> bool:
        """Delete the oldest full segment after rewriting its `needed` records; calls `on_moved` for each of them.

        Returns whether any record was dropped. The journal can be read and written meanwhile.
        """
        oldest = min(self._segments)
        if oldest == max(self._segments):
            return False
        return await self._rewrite(self._segments[oldest], needed)

    async def mend(self) -> None:
        """Rewrite the readable records of damaged segments and delete the segments."""
        for segment in [each for each in self._segments.values() if each.damaged]:
            await self._rewrite(segment, lambda _: True)
        self.damage.clear()

    async def _rewrite(self, segment: _Segment, needed: Callable[[Record], bool]) -> bool:
        gained = False
        paused_at = 0
        for record in scan(segment.descriptor, segment.number):
            if not isinstance(record, Record):
                continue
            if record.place.offset - paused_at > _SLICE_BYTES:
                paused_at = record.place.offset
                await asyncio.sleep(0)
            if needed(record):
                body = self.read(record.place)
                place = self._append(record.number, record.kind, record.head, body)
                self.on_moved(replace(record, place=place))
            else:
                gained = True
        await self.flushed()
        self._remove(segment)
        return gained

    def _remove(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        os.close(segment.descriptor)
        segment.path.unlink(missing_ok=True)

    def _sync_all(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            self._sync(descriptor)


def _write_all(descriptor: int, parts: list[bytes], offset: int) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
