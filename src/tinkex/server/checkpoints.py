"""Checkpoints: their directories, their rows in the database, access and expiry."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from tinkex.engine import directories
from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.types import Checkpoint, CheckpointType, ParsedCheckpointTinkerPath

from .database import Database
from .file_threads import FileThreads
from .inputs import check_ttl
from .names import validate_name
from .quotas import Quota
from .tables import AuditRow, CheckpointRow, RunRow

__all__ = ["Checkpoints", "check_samplable", "checkpoint_of", "tinker_path"]

T = TypeVar("T")

_KINDS: Final[dict[str, CheckpointType]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def now_utc() -> datetime:
    return datetime.now(UTC)


class Checkpoints:
    """The checkpoints of one data directory."""

    def __init__(
        self,
        directory: Path,
        database: Database,
        files: FileThreads,
        quota: Quota,
        now: Callable[[], datetime] = now_utc,
        expiry: Callable[[], datetime] | None = None,
    ) -> None:
        self._directory = directory
        self._quota = quota
        self._db, self._files = database, files
        self._store = database.store
        self._now = now
        #: Locks by directory, held while the files and the row of a checkpoint change together.
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._changes: set[asyncio.Future[Any]] = set()
        self._expiry = expiry or now  # checkpoints that expire up to this time are expired
        #: Called on the event loop with the run of a checkpoint that was added, replaced or deleted.
        self.on_change: list[Callable[[str], None]] = []

    async def restore(self) -> None:
        """Count the checkpoint bytes of each owner."""
        for owner, size in (await self._db(self._store.checkpoint_bytes)).items():
            self._quota.add(owner, size)

    # -- names -------------------------------------------------------------------------------

    def place(self, run_id: str, kind: CheckpointType, name: str) -> Path:
        """The directory of a checkpoint. Safe: the service makes run ids, and names are validated."""
        return self._directory / run_id.replace("/", "_") / kind / name

    # -- reading -----------------------------------------------------------------------------

    async def readable(self, owner: str, path: str) -> tuple[CheckpointRow, Path]:
        """A checkpoint that the owner may read: its own or a public one. For any other the error is "not found"."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        row = await self._db(
            self._store.checkpoint, parsed.training_run_id, parsed.checkpoint_type, parsed.name
        )
        if row is None or not (row.owner == owner or row.public):
            raise NotFoundError(f"There is no checkpoint {path!r:.300}.")
        if self.has_expired(row):
            raise NotFoundError(f"The checkpoint {path!r:.300} has expired.")
        return row, self.place(row.run_id, row.kind, row.name)

    def has_expired(self, row: CheckpointRow) -> bool:
        """Whether a checkpoint has expired; the next cleanup deletes it."""
        return row.expires_at is not None and row.expires_at <= self._expiry()

    async def run_of(self, row: CheckpointRow) -> RunRow:
        """The run of a checkpoint, which its owner may have deleted since the checkpoint was read."""
        run = await self._db(self._store.run, row.run_id)
        if run is None:
            raise _gone(row)
        return run

    async def file_names(self, row: CheckpointRow) -> list[str]:
        """The names of a checkpoint's files; its owner may delete it meanwhile."""
        place = self.place(row.run_id, row.kind, row.name)
        try:
            return await self._files(lambda: sorted(file.name for file in place.iterdir()))
        except FileNotFoundError:
            raise _gone(row) from None

    async def take(
        self, row: CheckpointRow, put: Callable[[Path, Path], None], target: Path
    ) -> None:
        """Put the files of a checkpoint at `target`; its owner may delete or replace it meanwhile."""
        try:
            await self._files(put, self.place(row.run_id, row.kind, row.name), target)
        except directories.SourceGoneError:
            raise _gone(row) from None

    async def owned(self, owner: str, run_id: str, checkpoint_id: str) -> CheckpointRow:
        """A checkpoint of this owner, by the id used in REST paths."""
        kind, _, name = checkpoint_id.partition("/")
        if kind not in _KINDS or not name:
            raise InvalidInputError(
                f"must be <kind>/<name> with a kind of {', '.join(_KINDS)}, "
                f"got {checkpoint_id!r:.200}",
                field="checkpoint_id",
            )
        row = await self._db(self._store.checkpoint, run_id, _KINDS[kind], name)
        if row is None or row.owner != owner:
            raise NotFoundError(
                f"There is no checkpoint {checkpoint_id!r:.200} of {run_id!r:.200}."
            )
        return row

    # -- writing -----------------------------------------------------------------------------

    async def check_free(
        self,
        owner: str,
        run_id: str,
        kind: CheckpointType,
        name: str,
        *,
        size_bytes: int = 1,
        overwrite: bool = False,
        request_id: str | None = None,
    ) -> Path:
        """The directory for a new checkpoint; refused if the name is taken or the owner's limit is reached.

        An unknown size counts as one byte, so the last checkpoint may exceed the limit.
        """
        validate_name(name)
        there = await self._db(self._store.checkpoint, run_id, kind, name)
        if there is not None and self.has_expired(there):
            # Delete the expired one now: the cleanup would otherwise delete the new one.
            await self.delete(there, expired=True)
            there = None
        again = there is not None and request_id is not None and there.request_id == request_id
        if there is not None and not (overwrite or again):
            hint = "; overwrite=True replaces it" if kind == "training" else ""
            raise InvalidInputError(
                f"this run already has a {kind} checkpoint called {name!r:.200}{hint}", field="path"
            )
        if there is None:
            self.check_room(owner, size_bytes)
        return self.place(run_id, kind, name)

    def check_room(self, owner: str, size_bytes: int = 1) -> None:
        self._quota.check(owner, size_bytes)

    async def add(
        self,
        run_id: str,
        kind: CheckpointType,
        name: str,
        owner: str,
        size_bytes: int,
        *,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None = None,
        request_id: str | None = None,
        written: Path | None = None,
    ) -> CheckpointRow:
        """Add the row of a checkpoint whose files are complete: in place, or in `written`, which is moved there."""
        now = self._now()
        row = CheckpointRow(
            run_id,
            kind,
            name,
            owner,
            now,
            size_bytes,
            expires_at=_expiry(now, ttl_seconds),
            user_metadata=user_metadata,
            request_id=request_id,
        )
        replaced = await self._whole(self._put(row, written))
        self._quota.add(owner, size_bytes - replaced)
        return row

    async def _put(self, row: CheckpointRow, written: Path | None) -> int:
        """Move a checkpoint into place and add its row; return the size of the one it replaces.

        The lock keeps both together: otherwise the old checkpoint could expire in between, and its deletion would
        remove the new files. If adding the row fails, the old files are put back.
        """
        place = self.place(row.run_id, row.kind, row.name)
        placed = nullcontext() if written is None else directories.placed(written, place)
        async with self._lock(row), self._files.within(placed):
            replaced = await self._db(self._insert, row)
        self._changed(row.run_id)
        return replaced

    def _changed(self, run_id: str) -> None:
        for notify in self.on_change:
            notify(run_id)

    def _insert(self, row: CheckpointRow) -> int:
        there = self._store.checkpoint(row.run_id, row.kind, row.name)
        with self._noted(row, "checkpoint_created", {"size_bytes": row.size_bytes}):
            self._store.put_checkpoint(row)
        return 0 if there is None else there.size_bytes

    def _lock(self, row: CheckpointRow) -> asyncio.Lock:
        place = self.place(row.run_id, row.kind, row.name)
        lock = self._locks.get(place)
        if lock is None:
            lock = self._locks[place] = asyncio.Lock()
        return lock

    async def _whole(self, change: Awaitable[T]) -> T:
        """Finish a change of files and row even if its request is cancelled in the middle."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def stop(self) -> None:
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def delete(self, row: CheckpointRow, *, expired: bool = False) -> None:
        """Delete the row and files of a checkpoint, unless another one has replaced it.

        An expired one is kept if its owner has extended its life meanwhile.

        The directory is renamed first: after a crash the startup cleanup removes it, and if the disk is too full to
        change the database, the space is freed all the same.
        """
        doomed = self.place(row.run_id, row.kind, row.name).with_name(f".{uuid.uuid4().hex}")
        try:
            if await self._whole(self._take_off(row, doomed, expired=expired)):
                self._quota.release(row.owner, row.size_bytes)
        finally:
            await self._files.remove(doomed)

    async def _take_off(self, row: CheckpointRow, doomed: Path, *, expired: bool) -> bool:
        """Rename the files and delete the row; the lock makes sure that no other checkpoint appears in between."""
        async with self._lock(row):
            there = await self._db(self._there, row)
            if there is None or (expired and not self.has_expired(there)):
                return False
            with suppress(FileNotFoundError):  # an earlier attempt crashed after the rename
                await self._files(self.place(row.run_id, row.kind, row.name).replace, doomed)
            event = "checkpoint_expired" if expired else "checkpoint_deleted"
            gone = await self._db(self._delete_row, row, event)
        self._changed(row.run_id)
        return gone

    def _delete_row(self, row: CheckpointRow, event: str) -> bool:
        with self._noted(row, event):
            return self._store.delete_checkpoint(row.run_id, row.kind, row.name)

    def _there(self, row: CheckpointRow) -> CheckpointRow | None:
        """The current row of a checkpoint; None if it was deleted or replaced by another."""
        there = self._store.checkpoint(row.run_id, row.kind, row.name)
        return there if there is not None and there.created_at == row.created_at else None

    async def publish(self, row: CheckpointRow, *, public: bool) -> None:
        event = "checkpoint_published" if public else "checkpoint_unpublished"
        async with self._lock(row):
            await self._db(self._change, row, event, {}, {"public": public})

    async def set_ttl(self, row: CheckpointRow, ttl_seconds: int | None) -> None:
        check_ttl(ttl_seconds)
        expires_at = _expiry(self._now(), ttl_seconds)
        details = {"ttl_seconds": ttl_seconds}
        changes = {"expires_at": expires_at}
        async with self._lock(row):
            await self._db(self._change, row, "checkpoint_ttl_set", details, changes)

    def _change(
        self,
        row: CheckpointRow,
        event: str,
        details: Mapping[str, object],
        changes: Mapping[str, object],
    ) -> None:
        """Update the row of a checkpoint, but never of another that has the same name by now."""
        if self._there(row) is None:
            raise _gone(row)
        with self._noted(row, event, details):
            self._store.update_checkpoint(row.run_id, row.kind, row.name, **changes)

    async def copy(
        self, row: CheckpointRow, run_id: str, owner: str, ttl_seconds: int | None
    ) -> CheckpointRow:
        """Copy a checkpoint into another run."""
        check_ttl(ttl_seconds)
        target = await self.check_free(owner, run_id, row.kind, row.name, size_bytes=row.size_bytes)
        await self.take(row, directories.copy, target)
        return await self.add(
            run_id,
            row.kind,
            row.name,
            owner,
            row.size_bytes,
            ttl_seconds=ttl_seconds,
            user_metadata=row.user_metadata,
        )

    async def delete_expired(self) -> int:
        """Delete expired checkpoints and return how many."""
        expired = await self._db(self._store.expired_checkpoints, self._expiry())
        for row in expired:
            await self.delete(row, expired=True)
        return len(expired)

    def clear_scratch(self) -> None:
        """Remove incomplete directories that a crash left."""
        for leftover in self._directory.glob("*/*/.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _noted(
        self, row: CheckpointRow, event: str, details: Mapping[str, object] | None = None
    ) -> Iterator[None]:
        """Commit a change and its audit entry in one transaction."""
        entry = AuditRow(
            self._now(),
            row.owner,
            "checkpoints",
            event,
            details or {},
            row.run_id,
            tinker_path(row),
        )
        with self._store.one_transaction():
            yield
            self._store.add_audit(entry)


def tinker_path(row: CheckpointRow) -> str:
    return ParsedCheckpointTinkerPath.of(row.run_id, row.kind, row.name).tinker_path


def _gone(row: CheckpointRow) -> NotFoundError:
    return NotFoundError(
        f"The checkpoint {tinker_path(row)!r:.300} was deleted or replaced meanwhile."
    )


def check_samplable(row: CheckpointRow, field: str) -> None:
    """Refuse a checkpoint that cannot be sampled from; `field` is the field of the request that names it."""
    if row.kind == "external":
        raise InvalidInputError(
            "external weights cannot be sampled from; use sampler weights", field=field
        )


def checkpoint_of(row: CheckpointRow) -> Checkpoint:
    """A row in the form that clients receive."""
    path = ParsedCheckpointTinkerPath.of(row.run_id, row.kind, row.name)
    return Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=row.kind,
        time=row.created_at,
        tinker_path=path.tinker_path,
        size_bytes=row.size_bytes,
        public=row.public,
        expires_at=row.expires_at,
        user_metadata=None if row.user_metadata is None else dict(row.user_metadata),
    )


def _expiry(now: datetime, ttl_seconds: int | None) -> datetime | None:
    return None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds)
