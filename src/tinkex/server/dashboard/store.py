"""The metrics of all runs: buffered in memory, written in batches by one thread, read by others.

Layout: `<data>/metrics/of-<owner>/<run>/` with `names.json`, `state.json`, and the files of one column for every name.
Callers do not wait for the disk, so metrics never slow down a training step.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import orjson

from tinkex.engine.files import make_directory
from tinkex.errors import InvalidInputError, TinkerError

from ..quotas import Quota
from .columns import Column
from .thinning import POINT, Axis, Records

__all__ = ["MAX_NAMES", "MetricPoint", "MetricStore", "RunMetrics", "Written", "check_name"]

logger = logging.getLogger("tinkex.server")

P = ParamSpec("P")
T = TypeVar("T")

#: Metrics of one run.
MAX_NAMES: Final = 200
#: Runs that stay open, those used last: a page lists as many. One with 200 metrics takes 120 KB.
MAX_OPEN: Final = 1_000
#: Most points of a run that wait to be written. If the disk is full or slow, newer points are dropped.
_MAX_WAITING: Final = 100_000
#: What reading files raises that are shorter than they were, as after damage, or when a deleted run begins anew.
_DAMAGE: Final = IndexError, ValueError
#: Beginning of the name that the directory of a run has while it is removed.
_DELETED: Final = ".deleted-"
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,200}")


class MetricPoint(NamedTuple):
    name: str
    step: float
    tokens: float
    time: float
    value: float


@dataclass(frozen=True, slots=True)
class Written:
    """Points that can be read from now on."""

    points: Sequence[MetricPoint]
    #: By name: how many points the metric had before. A name that is missing was one too many for its run.
    before: Mapping[str, int]


def check_name(name: str, field_name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"the name {name!r:.80} must be 1 to 200 characters without control characters",
            field=field_name,
        )


class RunMetrics:
    """The columns of one run, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: Whether its files are being removed, or belong to a run that began anew.
        self.deleted = False
        self._damaged: set[str] = set()  # metrics whose damage is logged
        self._columns: dict[str, Column] = {}
        names = _read_json(directory / "names.json", [])
        for number, name in enumerate(names if isinstance(names, list) else []):
            self._columns[str(name)] = Column(directory / str(number))

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def bytes(self) -> int:
        return sum(column.bytes for column in list(self._columns.values()))

    def count(self, name: str) -> int:
        column = self._columns.get(name)
        return 0 if column is None else column.count

    def last(self, name: str) -> Records | None:
        return self._read(name, Column.last)

    def read(
        self, name: str, axis: Axis, start: float | None, end: float | None, width: int
    ) -> tuple[Records, int] | None:
        """At most `width` buckets of a metric within a range, and how many points the whole metric has."""
        return self._read(name, lambda column: column.read(axis, start, end, width))

    def _read(self, name: str, read: Callable[[Column], T | None]) -> T | None:
        """None if there is nothing to read, also because the run was deleted or its files are damaged."""
        column = self._columns.get(name)
        if column is None:
            return None
        try:
            return read(column)
        except (FileNotFoundError, *_DAMAGE) as error:
            if not self.deleted and name not in self._damaged:
                self._damaged.add(name)  # logged once, not with every look at the page
                logger.warning("Metric %r in %s cannot be read: %s", name, self.directory, error)
            return None

    def append(self, points: Sequence[MetricPoint]) -> Written:
        by_name: dict[str, list[tuple[float, ...]]] = {}
        for point in points:
            by_name.setdefault(point.name, []).append(point[1:])
        new = [name for name in by_name if name not in self._columns]
        if new:
            names = [*self._columns, *new][:MAX_NAMES]
            make_directory(self.directory, 0o700)
            write_json(self.directory / "names.json", names)
            for number, name in enumerate(names):
                if name not in self._columns:
                    self._columns[name] = Column(self.directory / str(number))
        before = {}
        for name, rows in by_name.items():
            if name in self._columns:
                before[name] = self._columns[name].count
                self._columns[name].append(np.array(rows, POINT))
        return Written(points, before)


@dataclass
class _Waiting:
    """What was reported of a run and is not written yet."""

    owner: str
    points: list[MetricPoint] = field(default_factory=list)
    state: Mapping[str, Any] | None = None


@dataclass
class _Batch:
    """What waits to be written, by run, and whether that has been done."""

    runs: dict[str, _Waiting] = field(default_factory=dict)
    written: asyncio.Event = field(default_factory=asyncio.Event)


class MetricStore:
    """The metrics of one service."""

    def __init__(self, directory: Path, quota: Quota) -> None:
        self._directory = directory
        self._quota = quota
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-metrics")
        #: All opened runs. One in use is found again, so that no run is open twice and each file has one writer.
        self._runs: WeakValueDictionary[tuple[str, str], RunMetrics] = WeakValueDictionary()
        #: Those used last, which stay open.
        self._kept: OrderedDict[tuple[str, str], RunMetrics] = OrderedDict()
        #: Held while a run is opened or its directory is moved away, so that no files are opened that are being removed.
        self._opening = threading.Lock()
        self._next = _Batch()
        self._current = _Batch()  # what is being written
        self._newest: _Batch | None = None  # of those with something in them
        self._writing: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        #: Called on the event loop with an owner, a run and its new points when these can be read.
        self.on_written: list[Callable[[str, str, Written], None]] = []
        #: The same for new samples, without the samples.
        self.on_samples: list[Callable[[str, str], None]] = []

    async def restore(self) -> None:
        """Count what each owner has stored."""
        for owner, size in (await self.in_thread(_stored, self._directory)).items():
            self._quota.add(owner, size)

    async def stop(self) -> None:
        while self._next.runs or (self._newest is not None and not self._newest.written.is_set()):
            await self.flush()
        self._thread.shutdown()

    def directory(self, owner: str, run_id: str) -> Path:
        return self._directory / f"of-{owner}" / run_id.replace("/", "_")

    def run(self, owner: str, run_id: str) -> RunMetrics:
        """The metrics of a run; opening those of a long run reads a few file sizes.

        What others know of an opened run they keep by this object, so that it goes when the run is closed.
        """
        key = owner, run_id
        found = self._kept.get(key)
        if found is not None:
            with suppress(KeyError):  # another thread has closed it meanwhile
                self._kept.move_to_end(key)
            return found
        with self._opening:
            found = self._runs.get(key)
            if found is None:
                found = self._runs[key] = RunMetrics(self.directory(owner, run_id))
            self._kept[key] = found
            while len(self._kept) > MAX_OPEN:
                self._kept.popitem(last=False)
        return found

    def state(self, owner: str, run_id: str) -> dict[str, Any]:
        """The last state that was set for a run."""
        for batch in (self._next, self._current):
            waiting = batch.runs.get(run_id)
            if waiting is not None and waiting.state is not None:
                return dict(waiting.state)
        found = _read_json(self.directory(owner, run_id) / "state.json", {})
        return found if isinstance(found, dict) else {}

    # -- writing -------------------------------------------------------------------------------

    def check_room(self, owner: str, size: int) -> None:
        self._quota.check(owner, size)

    async def make_room(self, run_id: str, count: int) -> None:
        """Wait until `count` more points of a run can be taken: what is reported is acknowledged, so none may be lost."""
        waiting = self._next.runs.get(run_id)
        if waiting is not None and len(waiting.points) + count > _MAX_WAITING:
            await self.flush()

    def add(
        self,
        owner: str,
        run_id: str,
        points: Iterable[MetricPoint],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue points, and perhaps a new state, to be written soon; returns at once."""
        self._newest = self._next
        waiting = self._next.runs.setdefault(run_id, _Waiting(owner))
        waiting.points.extend(points)
        del waiting.points[_MAX_WAITING:]
        if state is not None:
            waiting.state = state
        self._write_soon()

    async def delete(self, owner: str, run_id: str) -> int:
        """Delete the metrics and samples of a run; returns how many bytes they had."""
        await self.flush()
        size = await self.in_thread(self._delete, owner, run_id)
        self._quota.release(owner, size)
        return size

    def _delete(self, owner: str, run_id: str) -> int:
        directory = self.directory(owner, run_id)
        deleted = directory.with_name(f"{_DELETED}{secrets.token_hex(8)}")
        with self._opening:
            self._kept.pop((owner, run_id), None)
            open_run = self._runs.pop((owner, run_id), None)
            if open_run is not None:
                open_run.deleted = True  # before its files are missing
            with suppress(FileNotFoundError):
                directory.rename(deleted)
        return _removed(deleted)

    def samples_stored(self, owner: str, run_id: str, size: int) -> None:
        """Count the bytes of samples that were written for a run, and announce that they can be read."""
        self._quota.add(owner, size)
        for notify in self.on_samples:
            notify(owner, run_id)

    async def flush(self) -> None:
        """Wait until everything so far can be read; what comes meanwhile is not waited for."""
        if self._newest is not None:  # batches are written in their order
            self._write_soon()  # if an error ended the last writing
            await self._newest.written.wait()

    async def in_thread(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a write of a run's files on the thread that writes them all."""
        call = partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _write_soon(self) -> None:
        if self._next.runs and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        while self._next.runs:
            self._current = batch = (
                self._next
            )  # in this order: other threads look in the next one first
            self._next = _Batch()
            try:
                for run_id, waiting in batch.runs.items():
                    await self._write_run(run_id, waiting)
            finally:
                self._current = _Batch()
                batch.written.set()

    async def _write_run(self, run_id: str, waiting: _Waiting) -> None:
        if not self.has_room(waiting.owner, len(waiting.points) * POINT.itemsize):
            return
        try:
            size, written = await self.in_thread(self._write, run_id, waiting)
        except (OSError, *_DAMAGE) as error:  # the other runs are written all the same
            self._warn(waiting.owner, str(error))
            return
        self._quota.add(waiting.owner, size)
        if waiting.points:  # a state alone draws nothing
            for notify in self.on_written:
                notify(waiting.owner, run_id, written)

    def has_room(self, owner: str, size: int) -> bool:
        """Whether an owner may store more; warns once if not."""
        try:
            self._quota.check(owner, size)
        except TinkerError as error:
            self._warn(owner, str(error))
            return False
        self._warned.discard(owner)
        return True

    def _warn(self, owner: str, why: str) -> None:
        if owner not in self._warned:  # once, not with every step of a training that continues
            self._warned.add(owner)
            logger.warning("Metrics of %s are not kept: %s", owner, why)

    def _write(self, run_id: str, waiting: _Waiting) -> tuple[int, Written]:
        """Write the waiting points; return by how many bytes the columns have grown, and what was written."""
        run = self.run(waiting.owner, run_id)
        before = run.bytes
        make_directory(run.directory, 0o700)
        written = run.append(waiting.points)
        if waiting.state is not None:
            write_json(run.directory / "state.json", waiting.state)
        return run.bytes - before, written


def _stored(directory: Path) -> dict[str, int]:
    """The bytes of points and samples by owner; the small files beside them do not count."""
    sizes: dict[str, int] = {}
    for owned in directory.glob("of-*"):
        for deleted in owned.glob(f"{_DELETED}*"):  # of a service that ended meanwhile
            _removed(deleted)
        sizes[owned.name.removeprefix("of-")] = _counted(owned)
    return sizes


def _counted(directory: Path) -> int:
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".json"]
    return sum(path.stat().st_size for path in files)


def _removed(directory: Path) -> int:
    size = _counted(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return size


def _read_json(path: Path, default: Any) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, ValueError):  # missing, or incomplete after a power cut
        return default


def write_json(path: Path, value: Any) -> None:
    """Replace a small file as a whole."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(orjson.dumps(value))
        new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
