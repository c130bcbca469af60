"""The database: sessions, training runs, checkpoints, samplers and usage. Request bodies are in the journal instead.

SQLAlchemy Core on SQLite or PostgreSQL, with the same statements on both. Every method is one transaction. It is on
disk when the method returns, except for methods that only count (`durable=False`): a power cut may undo the last of
these. Rows are frozen dataclasses, times are aware UTC datetimes, JSON columns hold users' metadata.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine, make_url

from tinkex.types import CheckpointType

__all__ = [
    "AliasRow",
    "AuditRow",
    "CheckpointRow",
    "Database",
    "RunRow",
    "SamplerRow",
    "SessionRow",
    "Store",
    "TelemetryRow",
    "UsageRow",
]

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")

_metadata = sa.MetaData()


class _UTC(sa.TypeDecorator[datetime]):
    """Times in UTC; SQLite does not store the zone, so it is added on reading."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_sessions = sa.Table(
    "sessions",
    _metadata,
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("created_at", _UTC, nullable=False, index=True),
    sa.Column("last_heartbeat", _UTC, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("sdk_version", sa.String, nullable=False),
    sa.Column("project_id", sa.String),
    sa.Column("display_name", sa.String),
    sa.Column("status", sa.JSON, nullable=False),
    sa.Column("idempotency_key", sa.String, unique=True),
)
_runs = sa.Table(
    "runs",
    _metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column(
        "session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False, index=True
    ),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("lora", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("created_at", _UTC, nullable=False),
    sa.Column("last_request_at", _UTC, nullable=False, index=True),
    sa.Column("corrupted", sa.Boolean, nullable=False, default=False),
)
_checkpoints = sa.Table(
    "checkpoints",
    _metadata,
    sa.Column("run_id", sa.String, sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("created_at", _UTC, nullable=False, index=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False, default=False),
    sa.Column("expires_at", _UTC, index=True),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("request_id", sa.String),
)
_samplers = sa.Table(
    "samplers",
    _metadata,
    sa.Column("sampler_id", sa.String, primary_key=True),
    sa.Column(
        "session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False, index=True
    ),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("model_path", sa.String),
    sa.Column("clones", sa.Integer, nullable=False, default=0),
    sa.Column("created_at", _UTC, nullable=False),
    sa.Column("unnamed", sa.Boolean, nullable=False, default=False),
    sa.Column("expires_at", _UTC, index=True),
)
_usage = sa.Table(
    "usage",
    _metadata,
    sa.Column("bucket_start", _UTC, primary_key=True),
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("base_model", sa.String, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
)
_audit = sa.Table(
    "audit",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", _UTC, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("topic", sa.String, nullable=False),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("run_id", sa.String),
    sa.Column("tinker_path", sa.String),
)
_telemetry = sa.Table(
    "telemetry",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("received_at", _UTC, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("event", sa.JSON, nullable=False),
    sa.Column("event_id", sa.String),
    sa.Index("telemetry_once", "owner", "session_id", "event_id", unique=True),
)
_aliases = sa.Table(
    "aliases",
    _metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("path", sa.String, nullable=False),
    sa.Column("created_at", _UTC, nullable=False),
)
_version = sa.Table("schema_version", _metadata, sa.Column("version", sa.Integer, primary_key=True))
#: A table of one row: the identity that this database shares with its data directory.
_identity = sa.Table("identity", _metadata, sa.Column("identity", sa.String, primary_key=True))

#: The size of an event, as an expression that works in both databases.
_EVENT_BYTES: Final = sa.func.length(sa.cast(_telemetry.c.event, sa.Text))

#: Statements that migrate a database from each version to the next; a new database starts at the newest. New tables
#: need no statement: missing tables are created first.
_MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        "ALTER TABLE telemetry ADD COLUMN event_id VARCHAR",
        "CREATE UNIQUE INDEX telemetry_once ON telemetry (owner, session_id, event_id)",
    ),
    (
        "ALTER TABLE samplers ADD COLUMN unnamed BOOLEAN DEFAULT FALSE NOT NULL",
        "ALTER TABLE samplers ADD COLUMN expires_at TIMESTAMP WITH TIME ZONE",
        "CREATE INDEX ix_samplers_expires_at ON samplers (expires_at)",
    ),
)
#: One lease per schema of a database; the first number identifies tinkex.
_TAKE_LEASE: Final = "SELECT pg_try_advisory_lock(1953066596, hashtext(current_schema()))"
#: With these, PostgreSQL notices within a minute that the machine of a lease holder is down.
_LEASE_KEEPALIVE: Final = (
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
)
#: SQLite's error codes for a full disk and for a file that may not grow.
_NO_ROOM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
)
#: SQLite's other disk errors, by the last byte of their codes.
_ERRNO: Final = {sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_IOERR: errno.EIO}
SCHEMA_VERSION: Final = 1 + len(_MIGRATIONS)
#: Most calls that share a transaction: the first one should not wait long for the last.
_SHARED_CALLS: Final = 100
#: Execution option of a connection: whether its commits wait until they are on disk.
_DURABLE: Final = "tinkex_durable"
#: Note on a connection to SQLite: its current setting of `synchronous`.
_SYNCHRONOUS: Final = "tinkex_synchronous"
#: Size of SQLite's write-ahead log: 1,000 pages, after which it is written from the front again, and a large commit.
_LOG_BYTES: Final = 4_500_000
#: Inserts that can skip existing rows; both dialects have the same methods.
_INSERTS: Final[Mapping[str, Callable[[sa.Table], Any]]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


@dataclass(frozen=True)
class SessionRow:
    session_id: str
    owner: str
    created_at: datetime
    last_heartbeat: datetime
    tags: Sequence[str]
    user_metadata: Mapping[str, Any] | None
    sdk_version: str
    project_id: str | None
    display_name: str | None
    status: Mapping[str, Any]
    idempotency_key: str | None = None


@dataclass(frozen=True)
class RunRow:
    run_id: str
    session_id: str
    owner: str
    base_model: str
    lora: Mapping[str, Any]
    user_metadata: Mapping[str, Any] | None
    created_at: datetime
    last_request_at: datetime
    corrupted: bool = False


@dataclass(frozen=True)
class CheckpointRow:
    run_id: str
    kind: CheckpointType
    name: str
    owner: str
    created_at: datetime
    size_bytes: int
    public: bool = False
    expires_at: datetime | None = None
    user_metadata: Mapping[str, str] | None = None
    request_id: str | None = None  # the request that wrote it


@dataclass(frozen=True)
class SamplerRow:
    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None
    created_at: datetime
    clones: int = 0
    unnamed: bool = False  # made from a model's current weights, without a checkpoint
    expires_at: datetime | None = None

    @property
    def has_weights(self) -> bool:
        """Whether it has weights besides the base model."""
        return self.unnamed or self.model_path is not None


@dataclass(frozen=True)
class AliasRow:
    """A name that an owner gave to a checkpoint."""

    owner: str
    name: str
    path: str
    created_at: datetime


@dataclass(frozen=True)
class UsageRow:
    """Usage of one kind within one hour."""

    bucket_start: datetime
    owner: str
    session_id: str
    base_model: str
    kind: str
    count: int


@dataclass(frozen=True)
class AuditRow:
    at: datetime
    owner: str
    topic: str
    event: str
    details: Mapping[str, Any]
    run_id: str | None = None
    tinker_path: str | None = None


@dataclass(frozen=True)
class TelemetryRow:
    received_at: datetime
    owner: str
    session_id: str
    event: Mapping[str, Any]
    event_id: str | None  # None for events stored by an older release


class Store:
    """The database of one service; `open` creates or migrates its tables."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: Engine | None = None
        self._shared: Connection | None = None  # while several methods share a transaction
        self._lease: Connection | None = None

    def open(self) -> None:
        self._engine = _new_engine(self._url)
        try:
            self._bring_up_to_date()
            with self._transaction():  # nobody else writes to the log meanwhile
                _extend_log(make_url(self._url))
        except BaseException:
            self.close()
            raise

    def _bring_up_to_date(self) -> None:
        """Create or migrate the tables, in one transaction: a crash leaves the old schema or the new one."""
        with self._transaction() as connection:
            _metadata.create_all(connection)
            found = connection.scalar(sa.select(_version.c.version))
            if found is None:
                connection.execute(_version.insert().values(version=SCHEMA_VERSION))
                return
            if found > SCHEMA_VERSION:
                raise RuntimeError(
                    f"the database has version {found}, but this release supports up to {SCHEMA_VERSION}; "
                    "use a newer release"
                )
            for statements in _MIGRATIONS[found - 1 :]:
                for statement in statements:
                    connection.execute(sa.text(statement))
            connection.execute(_version.update().values(version=SCHEMA_VERSION))

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    def close(self) -> None:
        self._drop_lease()
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    # -- lease -------------------------------------------------------------------------------

    def take_lease(self) -> bool:
        """Take the exclusive lease of the database, or check that this store still has it; False if another has it.

        In PostgreSQL the lease is an advisory lock of a connection, so it ends when its holder exits or crashes. After
        a lost connection it is taken again, unless another store has it by now. SQLite needs no lease: its file
        is in a data directory, which has its own lock.
        """
        assert self._engine is not None, "the store is not open"
        if self._engine.dialect.name != "postgresql":
            return True
        if self._lease is not None:
            try:
                self._lease.execute(sa.select(1))
            except sa.exc.DBAPIError:
                self._drop_lease()
            else:
                return True
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            for statement in _LEASE_KEEPALIVE:
                connection.execute(sa.text(statement))
            taken = bool(connection.scalar(sa.text(_TAKE_LEASE)))
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        if taken:
            self._lease = connection
        else:
            connection.close()
        return taken

    def _drop_lease(self) -> None:
        if self._lease is not None:
            self._lease.invalidate()  # not back to the pool: the connection holds the lock
            self._lease.close()
            self._lease = None

    # -- identity ----------------------------------------------------------------------------

    def identity(self) -> str | None:
        """The identity that links this database to its data directory; None before it is set."""
        with self._transaction() as connection:
            found: str | None = connection.scalar(sa.select(_identity.c.identity))
            return found

    def set_identity(self, identity: str) -> None:
        with self._transaction() as connection:
            connection.execute(_identity.delete())
            connection.execute(_identity.insert().values(identity=identity))

    # -- sessions ----------------------------------------------------------------------------

    def add_session(self, session: SessionRow) -> SessionRow:
        """Add a session; if one has the same idempotency key, return that instead."""
        with self._transaction() as connection:
            if session.idempotency_key is not None:
                known = _first(connection, SessionRow, _sessions, _keyed(session.idempotency_key))
                if known is not None:
                    return known
            _add(connection, _sessions, session)
        return session

    def session_of_key(self, idempotency_key: str) -> SessionRow | None:
        with self._transaction() as connection:
            return _first(connection, SessionRow, _sessions, _keyed(idempotency_key))

    def session(self, session_id: str) -> SessionRow | None:
        with self._transaction() as connection:
            return _first(connection, SessionRow, _sessions, _sessions.c.session_id == session_id)

    def sessions(self, owner: str | None, *, limit: int, offset: int) -> list[SessionRow]:
        """Sessions, newest first; `owner=None` means those of all owners."""
        with self._transaction() as connection:
            return _page(
                connection, SessionRow, _sessions, owner, _sessions.c.created_at, limit, offset
            )

    def active_sessions(self) -> list[SessionRow]:
        """The active sessions of all owners."""
        with self._transaction() as connection:
            active = _sessions.c.status["type"].as_string() == "active"
            return _all(connection, SessionRow, _sessions, active, _sessions.c.created_at)

    def sessions_by_id(self, session_ids: Collection[str]) -> dict[str, SessionRow]:
        with self._transaction() as connection:
            named = _sessions.c.session_id.in_(session_ids)
            rows = _all(connection, SessionRow, _sessions, named, _sessions.c.created_at)
            return {row.session_id: row for row in rows}

    def update_session(self, session_id: str, **changes: Any) -> bool:
        return self._update(_sessions, _sessions.c.session_id == session_id, changes)

    def search_sessions(
        self,
        *,
        owners: Sequence[str] | None = None,
        project_ids: Sequence[str] | None = None,
        before: tuple[datetime, str] | None = None,
        limit: int,
    ) -> list[SessionRow]:
        """The newest matching sessions that are older than `before`."""
        statement = sa.select(_sessions)
        if owners is not None:
            statement = statement.where(_sessions.c.owner.in_(owners))
        if project_ids is not None:
            statement = statement.where(_sessions.c.project_id.in_(project_ids))
        if before is not None:
            at, session_id = before
            older = _sessions.c.created_at < at
            tied = sa.and_(_sessions.c.created_at == at, _sessions.c.session_id < session_id)
            statement = statement.where(sa.or_(older, tied))
        order = _sessions.c.created_at.desc(), _sessions.c.session_id.desc()
        with self._transaction() as connection:
            rows = connection.execute(statement.order_by(*order).limit(limit))
            return [_made(SessionRow, row) for row in rows]

    # -- runs --------------------------------------------------------------------------------

    def add_run(self, run: RunRow) -> None:
        """Add a run; an existing one is not changed."""
        with self._transaction() as connection:
            if _first(connection, RunRow, _runs, _runs.c.run_id == run.run_id) is None:
                _add(connection, _runs, run)

    def run(self, run_id: str) -> RunRow | None:
        with self._transaction() as connection:
            return _first(connection, RunRow, _runs, _runs.c.run_id == run_id)

    def runs(
        self, owner: str | None, *, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[list[RunRow], int]:
        """A page of runs, most recently used first, and the total number."""
        where = None
        if project_id is not None:
            of_project = sa.select(_sessions.c.session_id).where(
                _sessions.c.project_id == project_id
            )
            where = _runs.c.session_id.in_(of_project)
        with self._transaction() as connection:
            order = _runs.c.last_request_at
            page = _page(connection, RunRow, _runs, owner, order, limit, offset, where)
            return page, _count(connection, _runs, owner, where)

    def runs_by_id(self, owner: str, run_ids: Collection[str]) -> list[RunRow]:
        """Those of these runs that belong to the owner."""
        with self._transaction() as connection:
            named = sa.and_(_runs.c.run_id.in_(run_ids), _runs.c.owner == owner)
            return _all(connection, RunRow, _runs, named, _runs.c.created_at)

    def delete_run(self, run_id: str) -> None:
        """Delete a run that has no checkpoints."""
        with self._transaction() as connection:
            connection.execute(_runs.delete().where(_runs.c.run_id == run_id))

    def runs_of_session(self, session_id: str) -> list[RunRow]:
        with self._transaction() as connection:
            return _all(
                connection, RunRow, _runs, _runs.c.session_id == session_id, _runs.c.created_at
            )

    def corrupted_runs(self) -> list[RunRow]:
        with self._transaction() as connection:
            return _all(connection, RunRow, _runs, _runs.c.corrupted, _runs.c.created_at)

    def update_run(self, run_id: str, **changes: Any) -> bool:
        return self._update(_runs, _runs.c.run_id == run_id, changes)

    def touch_runs(self, times: Mapping[str, datetime]) -> None:
        """Record the time of the last request of each run."""
        if not times:
            return
        touched = _runs.update().where(_runs.c.run_id == sa.bindparam("run"))
        rows = [{"run": run_id, "at": at} for run_id, at in times.items()]
        with self._transaction(durable=False) as connection:
            connection.execute(touched.values(last_request_at=sa.bindparam("at")), rows)

    # -- checkpoints -------------------------------------------------------------------------

    def put_checkpoint(self, checkpoint: CheckpointRow) -> None:
        """Add a checkpoint; one with the same name is replaced."""
        with self._transaction() as connection:
            connection.execute(_checkpoints.delete().where(_is(checkpoint)))
            _add(connection, _checkpoints, checkpoint)

    def checkpoint(self, run_id: str, kind: CheckpointType, name: str) -> CheckpointRow | None:
        with self._transaction() as connection:
            return _first(connection, CheckpointRow, _checkpoints, _named(run_id, kind, name))

    def checkpoints_of_run(self, run_id: str) -> list[CheckpointRow]:
        with self._transaction() as connection:
            of_run = _checkpoints.c.run_id == run_id
            return _all(connection, CheckpointRow, _checkpoints, of_run, _checkpoints.c.created_at)

    def checkpoint_totals(self, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """The number and bytes of the checkpoints of each run that has some."""
        run_id, size = _checkpoints.c.run_id, sa.func.sum(_checkpoints.c.size_bytes)
        statement = sa.select(run_id, sa.func.count(), size).where(run_id.in_(run_ids))
        with self._transaction() as connection:
            rows = connection.execute(statement.group_by(run_id))
            return {name: (count, int(total)) for name, count, total in rows}

    def newest_checkpoints(
        self, run_ids: Sequence[str], viewer: str
    ) -> dict[tuple[str, CheckpointType], CheckpointRow]:
        """The newest checkpoint that the viewer may see, by run and kind."""
        columns = [_checkpoints.c[field.name] for field in fields(CheckpointRow)]
        place = sa.func.row_number().over(
            partition_by=(_checkpoints.c.run_id, _checkpoints.c.kind),
            order_by=_checkpoints.c.created_at.desc(),
        )
        seen = sa.or_(_checkpoints.c.owner == viewer, _checkpoints.c.public)
        ranked = sa.select(*columns, place.label("place")).where(
            _checkpoints.c.run_id.in_(run_ids), seen
        )
        newest = ranked.subquery()
        statement = sa.select(*(newest.c[column.name] for column in columns))
        with self._transaction() as connection:
            rows = connection.execute(statement.where(newest.c.place == 1))
            found = [_made(CheckpointRow, row) for row in rows]
        return {(row.run_id, row.kind): row for row in found}

    def checkpoints(
        self, owner: str | None, *, limit: int, offset: int, external: bool = True
    ) -> tuple[list[CheckpointRow], int]:
        """A page of checkpoints, newest first, and the total number; external ones only on request."""
        where = None if external else _checkpoints.c.kind != "external"
        with self._transaction() as connection:
            order = _checkpoints.c.created_at
            page = _page(
                connection, CheckpointRow, _checkpoints, owner, order, limit, offset, where
            )
            return page, _count(connection, _checkpoints, owner, where)

    def update_checkpoint(
        self, run_id: str, kind: CheckpointType, name: str, **changes: Any
    ) -> bool:
        return self._update(_checkpoints, _named(run_id, kind, name), changes)

    def delete_checkpoint(self, run_id: str, kind: CheckpointType, name: str) -> bool:
        with self._transaction() as connection:
            done = connection.execute(_checkpoints.delete().where(_named(run_id, kind, name)))
            return done.rowcount > 0

    def storage(self, owner: str, project_id: str | None) -> list[tuple[str | None, int, int]]:
        """The projects of an owner, with the number and bytes of their checkpoints."""
        project = _sessions.c.project_id
        size = sa.func.coalesce(sa.func.sum(_checkpoints.c.size_bytes), 0)
        statement = (
            sa.select(project, sa.func.count(), size)
            .select_from(_checkpoints.join(_runs).join(_sessions))
            .where(_checkpoints.c.owner == owner)
            .group_by(project)
            .order_by(project)
        )
        if project_id is not None:
            statement = statement.where(project == project_id)
        with self._transaction() as connection:
            return [
                (name, count, int(total)) for name, count, total in connection.execute(statement)
            ]

    def expired_checkpoints(self, now: datetime) -> list[CheckpointRow]:
        with self._transaction() as connection:
            due = _checkpoints.c.expires_at <= now
            return _all(connection, CheckpointRow, _checkpoints, due, _checkpoints.c.expires_at)

    # -- aliases -----------------------------------------------------------------------------

    def alias(self, owner: str, name: str) -> AliasRow | None:
        with self._transaction() as connection:
            return _first(connection, AliasRow, _aliases, _is_alias(owner, name))

    def aliases(self, owner: str) -> list[AliasRow]:
        with self._transaction() as connection:
            return _all(connection, AliasRow, _aliases, _aliases.c.owner == owner, _aliases.c.name)

    def put_alias(self, alias: AliasRow) -> None:
        """Add an alias, or replace the one with its name."""
        with self._transaction() as connection:
            connection.execute(_aliases.delete().where(_is_alias(alias.owner, alias.name)))
            connection.execute(_aliases.insert().values(_values(alias)))

    def delete_alias(self, owner: str, name: str) -> bool:
        with self._transaction() as connection:
            return bool(
                connection.execute(_aliases.delete().where(_is_alias(owner, name))).rowcount
            )

    # -- samplers ----------------------------------------------------------------------------

    def add_sampler(self, sampler: SamplerRow) -> SamplerRow:
        """Add a sampler; if one has the same id, return that instead."""
        with self._transaction() as connection:
            same = _samplers.c.sampler_id == sampler.sampler_id
            known = _first(connection, SamplerRow, _samplers, same)
            if known is None:
                _add(connection, _samplers, sampler)
        return known or sampler

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        with self._transaction() as connection:
            return _first(connection, SamplerRow, _samplers, _samplers.c.sampler_id == sampler_id)

    def active_samplers(self) -> list[tuple[str, str]]:
        """The session and owner of each sampler of an active session."""
        active = _sessions.c.status["type"].as_string() == "active"
        statement = (
            sa.select(_samplers.c.session_id, _samplers.c.owner).join(_sessions).where(active)
        )
        with self._transaction() as connection:
            return [(session_id, owner) for session_id, owner in connection.execute(statement)]

    def samplers_of_session(self, session_id: str) -> list[SamplerRow]:
        with self._transaction() as connection:
            of_session = _samplers.c.session_id == session_id
            return _all(connection, SamplerRow, _samplers, of_session, _samplers.c.created_at)

    def expired_samplers(self, now: datetime) -> list[SamplerRow]:
        with self._transaction() as connection:
            due = _samplers.c.expires_at <= now
            return _all(connection, SamplerRow, _samplers, due, _samplers.c.expires_at)

    def delete_sampler(self, sampler_id: str) -> None:
        with self._transaction() as connection:
            connection.execute(_samplers.delete().where(_samplers.c.sampler_id == sampler_id))

    def next_clone(self, sampler_id: str) -> int | None:
        """The number for one more client of a sampler, from 1; None if there is no such sampler."""
        with self._transaction() as connection:
            statement = (
                _samplers.update()
                .where(_samplers.c.sampler_id == sampler_id)
                .values(clones=_samplers.c.clones + 1)
                .returning(_samplers.c.clones)
            )
            number: int | None = connection.scalar(statement)
            return number

    # -- usage, audit log and telemetry --------------------------------------------------------

    def add_usage(self, rows: Sequence[UsageRow]) -> None:
        """Add usage; counts of the same hour, session, model and kind are summed in one row."""
        with self._transaction(durable=False) as connection:
            for row in rows:
                values = _values(row)
                count = values.pop("count")
                same = sa.and_(*(_usage.c[name] == value for name, value in values.items()))
                more = _usage.update().where(same).values(count=_usage.c.count + count)
                if not connection.execute(more).rowcount:
                    _add(connection, _usage, row)

    def usage(self, owner: str | None, start: datetime, end: datetime) -> list[UsageRow]:
        within = sa.and_(_usage.c.bucket_start >= start, _usage.c.bucket_start < end)
        if owner is not None:
            within = sa.and_(within, _usage.c.owner == owner)
        with self._transaction() as connection:
            return _all(connection, UsageRow, _usage, within, _usage.c.bucket_start)

    def add_audit(self, row: AuditRow) -> None:
        self._insert(_audit, row)

    def audit(
        self, owner: str, *, topic: str | None, start: datetime, end: datetime, limit: int = 10_000
    ) -> list[AuditRow]:
        where = sa.and_(_audit.c.owner == owner, _audit.c.at >= start, _audit.c.at < end)
        if topic is not None:
            where = sa.and_(where, _audit.c.topic == topic)
        columns = [_audit.c[field.name] for field in fields(AuditRow)]
        statement = sa.select(*columns).where(where).order_by(_audit.c.id).limit(limit)
        with self._transaction() as connection:
            return [_made(AuditRow, row) for row in connection.execute(statement)]

    def add_telemetry(self, rows: Sequence[TelemetryRow]) -> None:
        """Store events; idempotent, because a client that received no response sends them again."""
        with self._transaction(durable=False) as connection:
            insert = _INSERTS[connection.dialect.name](_telemetry)
            connection.execute(insert.on_conflict_do_nothing(), [_values(row) for row in rows])

    def telemetry(
        self, owner: str, session_id: str | None, *, limit: int, offset: int
    ) -> tuple[list[TelemetryRow], int]:
        """A page of telemetry events in order of arrival, and the total number."""
        where = None if session_id is None else _telemetry.c.session_id == session_id
        columns = [_telemetry.c[field.name] for field in fields(TelemetryRow)]
        statement = sa.select(*columns).where(_telemetry.c.owner == owner)
        if where is not None:
            statement = statement.where(where)
        page = statement.order_by(_telemetry.c.id).limit(limit).offset(offset)
        with self._transaction() as connection:
            rows = [_made(TelemetryRow, row) for row in connection.execute(page)]
            return rows, _count(connection, _telemetry, owner, where)

    def forget_telemetry(self, before: datetime) -> None:
        with self._transaction(durable=False) as connection:
            connection.execute(_telemetry.delete().where(_telemetry.c.received_at < before))

    def trim_telemetry(self, owner: str, size: int) -> None:
        """Delete the oldest events of an owner until at least this many bytes are freed."""
        before = sa.func.sum(_EVENT_BYTES).over(order_by=_telemetry.c.id) - _EVENT_BYTES
        events = (
            sa.select(_telemetry.c.id, before.label("before"))
            .where(_telemetry.c.owner == owner)
            .subquery()
        )
        last = sa.select(sa.func.max(events.c.id)).where(events.c.before < size)
        old = sa.and_(_telemetry.c.owner == owner, _telemetry.c.id <= last.scalar_subquery())
        with self._transaction() as connection:
            connection.execute(_telemetry.delete().where(old))

    def telemetry_bytes(self, owner: str | None = None) -> dict[str, int]:
        """The stored bytes of events, by owner."""
        size = sa.func.sum(_EVENT_BYTES)
        statement = sa.select(_telemetry.c.owner, size).group_by(_telemetry.c.owner)
        if owner is not None:
            statement = statement.where(_telemetry.c.owner == owner)
        with self._transaction() as connection:
            return {name: int(total) for name, total in connection.execute(statement)}

    def checkpoint_bytes(self) -> dict[str, int]:
        """The bytes of checkpoints, by owner."""
        size = sa.func.sum(_checkpoints.c.size_bytes)
        statement = sa.select(_checkpoints.c.owner, size).group_by(_checkpoints.c.owner)
        with self._transaction() as connection:
            return {name: int(total) for name, total in connection.execute(statement)}

    def counts(self) -> tuple[int, int, int]:
        """The numbers of sessions, runs and checkpoints."""
        with self._transaction() as connection:
            tables = (_sessions, _runs, _checkpoints)
            sessions, runs, checkpoints = (_count(connection, table, None) for table in tables)
            return sessions, runs, checkpoints

    # -- transactions --------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[Connection]:
        """One transaction; if it is not `durable`, a power cut soon after may undo it."""
        assert self._engine is not None, "the store is not open"
        if self._shared is not None:
            yield self._shared
            return
        try:
            with self._engine.connect() as connection:
                if not durable:
                    connection.execution_options(**{_DURABLE: False})
                with connection.begin():
                    yield connection
        except sa.exc.OperationalError as error:
            # Disk errors are raised as OSError; the transaction is rolled back.
            code = getattr(error.orig, "sqlite_errorcode", None)
            number = errno.ENOSPC if code in _NO_ROOM else _ERRNO.get((code or 0) & 0xFF)
            if number is not None:
                raise OSError(number, os.strerror(number)) from error
            raise

    @contextmanager
    def one_transaction(self) -> Iterator[None]:
        """Commit the methods called inside together; if anything fails, all of them are rolled back."""
        with self._transaction() as connection:
            self._shared = connection
            try:
                yield
            finally:
                self._shared = None

    def _insert(self, table: sa.Table, row: Any) -> None:
        with self._transaction() as connection:
            _add(connection, table, row)

    def _update(self, table: sa.Table, where: Any, changes: Mapping[str, Any]) -> bool:
        with self._transaction() as connection:
            return connection.execute(table.update().where(where).values(**changes)).rowcount > 0


def _new_engine(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return sa.create_engine(url, pool_pre_ping=True)
    _create_closed(make_url(url).database)
    engine = sa.create_engine(url, connect_args={"check_same_thread": False, "timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        # Python's driver would start transactions late, and none for schema changes.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA journal_mode=WAL")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        # With FULL every commit waits for the disk; with NORMAL only checkpoints of the write-ahead log do.
        wanted = "FULL" if connection.get_execution_options().get(_DURABLE, True) else "NORMAL"
        if connection.info.get(_SYNCHRONOUS) != wanted:
            driver.execute(f"PRAGMA synchronous={wanted}")
            connection.info[_SYNCHRONOUS] = wanted
        # IMMEDIATE: a transaction that starts with a read cannot write once another has written.
        driver.execute("BEGIN IMMEDIATE")

    return engine


def _create_closed(file: str | None) -> None:
    """Create the file of a new database, private to its owner; SQLite gives its other files the same mode."""
    if file and file != ":memory:":
        with suppress(OSError):  # SQLite's own error is clearer
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))


def _extend_log(url: sa.URL) -> None:
    """Fill the write-ahead log of SQLite with zeros up to the size at which SQLite writes it from the front again.

    A commit then overwrites blocks that the file already has. A commit that made the file longer would wait twice as
    long, because the new size is synced too. SQLite ignores the zeros: they are no frames with a valid checksum.
    """
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return
    with suppress(OSError), Path(f"{url.database}-wal").open("r+b") as log:
        log.write(bytes(max(0, _LOG_BYTES - log.seek(0, os.SEEK_END))))
        log.flush()
        os.fsync(log.fileno())


def _add(connection: Connection, table: sa.Table, row: Any) -> None:
    # The values are parameters, not part of the statement: SQLAlchemy then compiles the statement once.
    connection.execute(table.insert(), _values(row))


def _values(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}


def _made(kind: type[R], row: Any) -> R:
    return kind(**row._mapping)


def _is_alias(owner: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(_aliases.c.owner == owner, _aliases.c.name == name)


def _first(connection: Connection, kind: type[R], table: sa.Table, where: Any) -> R | None:
    row = connection.execute(sa.select(table).where(where)).first()
    return None if row is None else _made(kind, row)


def _all(connection: Connection, kind: type[R], table: sa.Table, where: Any, order: Any) -> list[R]:
    rows = connection.execute(sa.select(table).where(where).order_by(order))
    return [_made(kind, row) for row in rows]


def _page(
    connection: Connection,
    kind: type[R],
    table: sa.Table,
    owner: str | None,
    order: Any,
    limit: int,
    offset: int,
    where: Any = None,
) -> list[R]:
    keys = [
        column.desc() for column in table.primary_key
    ]  # a stable order: ties must not move between pages
    statement = sa.select(table).order_by(order.desc(), *keys).limit(limit).offset(offset)
    if owner is not None:
        statement = statement.where(table.c.owner == owner)
    if where is not None:
        statement = statement.where(where)
    return [_made(kind, row) for row in connection.execute(statement)]


def _count(connection: Connection, table: sa.Table, owner: str | None, where: Any = None) -> int:
    statement = sa.select(sa.func.count()).select_from(table)
    if owner is not None:
        statement = statement.where(table.c.owner == owner)
    if where is not None:
        statement = statement.where(where)
    return connection.scalar(statement) or 0


def _keyed(idempotency_key: str) -> Any:
    return _sessions.c.idempotency_key == idempotency_key


def _named(run_id: str, kind: str, name: str) -> Any:
    return sa.and_(
        _checkpoints.c.run_id == run_id, _checkpoints.c.kind == kind, _checkpoints.c.name == name
    )


def _is(checkpoint: CheckpointRow) -> Any:
    return _named(checkpoint.run_id, checkpoint.kind, checkpoint.name)


@dataclass(frozen=True)
class _Call:
    """A call for the database's thread, and the future that waits for it."""

    do: Callable[[], Any]
    can_share: bool  # a method of the store: it can be rolled back and retried
    done: Future[Any]

    def run(self) -> None:
        try:
            result = self.do()
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


class Database:
    """The store for the event loop: a dedicated thread runs one call after another.

    Store methods that wait at the same time share one transaction, so that many small requests wait for the disk once.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinkex-store")
        self._waiting: deque[_Call] = deque()
        #: Called with the duration of each call in seconds.
        self.on_call: Callable[[float], object] = lambda _: None

    async def __call__(self, method: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        started = loop.time()
        can_share = getattr(method, "__self__", None) is self.store and self.store.is_open
        call = _Call(partial(method, *args, **options), can_share, Future())
        self._waiting.append(call)
        self._thread.submit(self._work_off)
        try:
            result: T = await asyncio.wrap_future(call.done)
            return result
        finally:
            self.on_call(loop.time() - started)

    def _work_off(self) -> None:
        """Run the waiting calls in order."""
        calls: list[_Call] = []
        while self._waiting and len(calls) < _SHARED_CALLS:
            call = self._waiting.popleft()
            if call.done.set_running_or_notify_cancel():
                calls.append(call)
        for can_share, group in groupby(calls, lambda call: call.can_share):
            together = list(group)
            if not (can_share and len(together) > 1 and self._done_together(together)):
                for call in together:
                    call.run()

    def _done_together(self, calls: Sequence[_Call]) -> bool:
        """Run calls in one transaction; if one fails, roll back and return False."""
        try:
            with self.store.one_transaction():
                results = [call.do() for call in calls]
        except Exception:
            return False  # run one by one, each gets its own result or error
        for call, result in zip(calls, results, strict=True):
            call.done.set_result(result)
        return True

    def close(self) -> None:
        self._thread.shutdown()
        self.store.close()
