"""The database: sessions, training runs, checkpoints, samplers and usage. Request bodies are in the journal instead.

SQLAlchemy Core on SQLite or PostgreSQL, with the same statements on both. Every method is one transaction. It is on
disk when the method returns, except for methods that only count (`durable=False`): a power cut may undo the last of
these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine, make_url

from tinkex.types import CheckpointType

from . import tables
from .sql_engines import DURABLE, disk_error, extend_log, new_engine
from .tables import (
    MIGRATIONS,
    SCHEMA_VERSION,
    AliasRow,
    AuditRow,
    CheckpointRow,
    RunRow,
    SamplerRow,
    SessionRow,
    TelemetryRow,
    UsageRow,
)

__all__ = ["Store"]

R = TypeVar("R")

#: The size of an event, as an expression that works in both databases.
_EVENT_BYTES: Final = sa.func.length(sa.cast(tables.telemetry.c.event, sa.Text))

#: One lease per schema of a database; the first number identifies tinkex.
_TAKE_LEASE: Final = "SELECT pg_try_advisory_lock(1953066596, hashtext(current_schema()))"
#: With these, PostgreSQL notices within a minute that the machine of a lease holder is down.
_LEASE_KEEPALIVE: Final = (
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
)
#: Inserts that can skip existing rows; both dialects have the same methods.
_INSERTS: Final[Mapping[str, Callable[[sa.Table], Any]]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


class Store:
    """The database of one service; `open` creates or migrates its tables."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: Engine | None = None
        self._shared: Connection | None = None  # while several methods share a transaction
        self._lease: Connection | None = None

    def open(self) -> None:
        self._engine = new_engine(self._url)
        try:
            self._bring_up_to_date()
            with self._transaction():  # nobody else writes to the log meanwhile
                extend_log(make_url(self._url))
        except BaseException:
            self.close()
            raise

    def _bring_up_to_date(self) -> None:
        """Create or migrate the tables, in one transaction: a crash leaves the old schema or the new one."""
        with self._transaction() as connection:
            tables.metadata.create_all(connection)
            found = connection.scalar(sa.select(tables.version.c.version))
            if found is None:
                connection.execute(tables.version.insert().values(version=SCHEMA_VERSION))
                return
            if found > SCHEMA_VERSION:
                raise RuntimeError(
                    f"the database has version {found}, but this release supports up to {SCHEMA_VERSION}; "
                    "use a newer release"
                )
            for statements in MIGRATIONS[found - 1 :]:
                for statement in statements:
                    connection.execute(sa.text(statement))
            connection.execute(tables.version.update().values(version=SCHEMA_VERSION))

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
            found: str | None = connection.scalar(sa.select(tables.identity.c.identity))
            return found

    def set_identity(self, identity: str) -> None:
        with self._transaction() as connection:
            connection.execute(tables.identity.delete())
            connection.execute(tables.identity.insert().values(identity=identity))

    # -- sessions ----------------------------------------------------------------------------

    def add_session(self, session: SessionRow) -> SessionRow:
        """Add a session; if one has the same idempotency key, return that instead."""
        with self._transaction() as connection:
            if session.idempotency_key is not None:
                known = _first(
                    connection, SessionRow, tables.sessions, _keyed(session.idempotency_key)
                )
                if known is not None:
                    return known
            _add(connection, tables.sessions, session)
        return session

    def session_of_key(self, idempotency_key: str) -> SessionRow | None:
        with self._transaction() as connection:
            return _first(connection, SessionRow, tables.sessions, _keyed(idempotency_key))

    def session(self, session_id: str) -> SessionRow | None:
        with self._transaction() as connection:
            return _first(
                connection, SessionRow, tables.sessions, tables.sessions.c.session_id == session_id
            )

    def sessions(self, owner: str | None, *, limit: int, offset: int) -> list[SessionRow]:
        """Sessions, newest first; `owner=None` means those of all owners."""
        with self._transaction() as connection:
            return _page(
                connection,
                SessionRow,
                tables.sessions,
                owner,
                tables.sessions.c.created_at,
                limit,
                offset,
            )

    def active_sessions(self) -> list[SessionRow]:
        """The active sessions of all owners."""
        with self._transaction() as connection:
            active = tables.sessions.c.status["type"].as_string() == "active"
            return _all(
                connection, SessionRow, tables.sessions, active, tables.sessions.c.created_at
            )

    def sessions_by_id(self, session_ids: Collection[str]) -> dict[str, SessionRow]:
        with self._transaction() as connection:
            named = tables.sessions.c.session_id.in_(session_ids)
            rows = _all(
                connection, SessionRow, tables.sessions, named, tables.sessions.c.created_at
            )
            return {row.session_id: row for row in rows}

    def update_session(self, session_id: str, **changes: Any) -> bool:
        return self._update(tables.sessions, tables.sessions.c.session_id == session_id, changes)

    def search_sessions(
        self,
        *,
        owners: Sequence[str] | None = None,
        project_ids: Sequence[str] | None = None,
        before: tuple[datetime, str] | None = None,
        limit: int,
    ) -> list[SessionRow]:
        """The newest matching sessions that are older than `before`."""
        statement = sa.select(tables.sessions)
        if owners is not None:
            statement = statement.where(tables.sessions.c.owner.in_(owners))
        if project_ids is not None:
            statement = statement.where(tables.sessions.c.project_id.in_(project_ids))
        if before is not None:
            at, session_id = before
            older = tables.sessions.c.created_at < at
            tied = sa.and_(
                tables.sessions.c.created_at == at, tables.sessions.c.session_id < session_id
            )
            statement = statement.where(sa.or_(older, tied))
        order = tables.sessions.c.created_at.desc(), tables.sessions.c.session_id.desc()
        with self._transaction() as connection:
            rows = connection.execute(statement.order_by(*order).limit(limit))
            return [_made(SessionRow, row) for row in rows]

    # -- runs --------------------------------------------------------------------------------

    def add_run(self, run: RunRow) -> None:
        """Add a run; an existing one is not changed."""
        with self._transaction() as connection:
            if _first(connection, RunRow, tables.runs, tables.runs.c.run_id == run.run_id) is None:
                _add(connection, tables.runs, run)

    def run(self, run_id: str) -> RunRow | None:
        with self._transaction() as connection:
            return _first(connection, RunRow, tables.runs, tables.runs.c.run_id == run_id)

    def runs(
        self, owner: str | None, *, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[list[RunRow], int]:
        """A page of runs, most recently used first, and the total number."""
        where = None
        if project_id is not None:
            of_project = sa.select(tables.sessions.c.session_id).where(
                tables.sessions.c.project_id == project_id
            )
            where = tables.runs.c.session_id.in_(of_project)
        with self._transaction() as connection:
            order = tables.runs.c.last_request_at
            page = _page(connection, RunRow, tables.runs, owner, order, limit, offset, where)
            return page, _count(connection, tables.runs, owner, where)

    def runs_by_id(self, owner: str, run_ids: Collection[str]) -> list[RunRow]:
        """Those of these runs that belong to the owner."""
        with self._transaction() as connection:
            named = sa.and_(tables.runs.c.run_id.in_(run_ids), tables.runs.c.owner == owner)
            return _all(connection, RunRow, tables.runs, named, tables.runs.c.created_at)

    def delete_run(self, run_id: str) -> None:
        """Delete a run that has no checkpoints."""
        with self._transaction() as connection:
            connection.execute(tables.runs.delete().where(tables.runs.c.run_id == run_id))

    def runs_of_session(self, session_id: str) -> list[RunRow]:
        with self._transaction() as connection:
            return _all(
                connection,
                RunRow,
                tables.runs,
                tables.runs.c.session_id == session_id,
                tables.runs.c.created_at,
            )

    def corrupted_runs(self) -> list[RunRow]:
        with self._transaction() as connection:
            return _all(
                connection, RunRow, tables.runs, tables.runs.c.corrupted, tables.runs.c.created_at
            )

    def update_run(self, run_id: str, **changes: Any) -> bool:
        return self._update(tables.runs, tables.runs.c.run_id == run_id, changes)

    def touch_runs(self, times: Mapping[str, datetime]) -> None:
        """Record the time of the last request of each run."""
        if not times:
            return
        touched = tables.runs.update().where(tables.runs.c.run_id == sa.bindparam("run"))
        rows = [{"run": run_id, "at": at} for run_id, at in times.items()]
        with self._transaction(durable=False) as connection:
            connection.execute(touched.values(last_request_at=sa.bindparam("at")), rows)

    # -- checkpoints -------------------------------------------------------------------------

    def put_checkpoint(self, checkpoint: CheckpointRow) -> None:
        """Add a checkpoint; one with the same name is replaced."""
        with self._transaction() as connection:
            connection.execute(tables.checkpoints.delete().where(_is(checkpoint)))
            _add(connection, tables.checkpoints, checkpoint)

    def checkpoint(self, run_id: str, kind: CheckpointType, name: str) -> CheckpointRow | None:
        with self._transaction() as connection:
            return _first(connection, CheckpointRow, tables.checkpoints, _named(run_id, kind, name))

    def checkpoints_of_run(self, run_id: str) -> list[CheckpointRow]:
        with self._transaction() as connection:
            of_run = tables.checkpoints.c.run_id == run_id
            return _all(
                connection,
                CheckpointRow,
                tables.checkpoints,
                of_run,
                tables.checkpoints.c.created_at,
            )

    def checkpoint_totals(self, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """The number and bytes of the checkpoints of each run that has some."""
        run_id, size = tables.checkpoints.c.run_id, sa.func.sum(tables.checkpoints.c.size_bytes)
        statement = sa.select(run_id, sa.func.count(), size).where(run_id.in_(run_ids))
        with self._transaction() as connection:
            rows = connection.execute(statement.group_by(run_id))
            return {name: (count, int(total)) for name, count, total in rows}

    def newest_checkpoints(
        self, run_ids: Sequence[str], viewer: str
    ) -> dict[tuple[str, CheckpointType], CheckpointRow]:
        """The newest checkpoint that the viewer may see, by run and kind."""
        columns = [tables.checkpoints.c[field.name] for field in fields(CheckpointRow)]
        place = sa.func.row_number().over(
            partition_by=(tables.checkpoints.c.run_id, tables.checkpoints.c.kind),
            order_by=tables.checkpoints.c.created_at.desc(),
        )
        seen = sa.or_(tables.checkpoints.c.owner == viewer, tables.checkpoints.c.public)
        ranked = sa.select(*columns, place.label("place")).where(
            tables.checkpoints.c.run_id.in_(run_ids), seen
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
        where = None if external else tables.checkpoints.c.kind != "external"
        with self._transaction() as connection:
            order = tables.checkpoints.c.created_at
            page = _page(
                connection, CheckpointRow, tables.checkpoints, owner, order, limit, offset, where
            )
            return page, _count(connection, tables.checkpoints, owner, where)

    def update_checkpoint(
        self, run_id: str, kind: CheckpointType, name: str, **changes: Any
    ) -> bool:
        return self._update(tables.checkpoints, _named(run_id, kind, name), changes)

    def delete_checkpoint(self, run_id: str, kind: CheckpointType, name: str) -> bool:
        with self._transaction() as connection:
            done = connection.execute(tables.checkpoints.delete().where(_named(run_id, kind, name)))
            return done.rowcount > 0

    def storage(self, owner: str, project_id: str | None) -> list[tuple[str | None, int, int]]:
        """The projects of an owner, with the number and bytes of their checkpoints."""
        project = tables.sessions.c.project_id
        size = sa.func.coalesce(sa.func.sum(tables.checkpoints.c.size_bytes), 0)
        statement = (
            sa.select(project, sa.func.count(), size)
            .select_from(tables.checkpoints.join(tables.runs).join(tables.sessions))
            .where(tables.checkpoints.c.owner == owner)
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
            due = tables.checkpoints.c.expires_at <= now
            return _all(
                connection, CheckpointRow, tables.checkpoints, due, tables.checkpoints.c.expires_at
            )

    # -- aliases -----------------------------------------------------------------------------

    def alias(self, owner: str, name: str) -> AliasRow | None:
        with self._transaction() as connection:
            return _first(connection, AliasRow, tables.aliases, _is_alias(owner, name))

    def aliases(self, owner: str) -> list[AliasRow]:
        with self._transaction() as connection:
            return _all(
                connection,
                AliasRow,
                tables.aliases,
                tables.aliases.c.owner == owner,
                tables.aliases.c.name,
            )

    def put_alias(self, alias: AliasRow) -> None:
        """Add an alias, or replace the one with its name."""
        with self._transaction() as connection:
            connection.execute(tables.aliases.delete().where(_is_alias(alias.owner, alias.name)))
            connection.execute(tables.aliases.insert().values(_values(alias)))

    def delete_alias(self, owner: str, name: str) -> bool:
        with self._transaction() as connection:
            return bool(
                connection.execute(tables.aliases.delete().where(_is_alias(owner, name))).rowcount
            )

    # -- samplers ----------------------------------------------------------------------------

    def add_sampler(self, sampler: SamplerRow) -> SamplerRow:
        """Add a sampler; if one has the same id, return that instead."""
        with self._transaction() as connection:
            same = tables.samplers.c.sampler_id == sampler.sampler_id
            known = _first(connection, SamplerRow, tables.samplers, same)
            if known is None:
                _add(connection, tables.samplers, sampler)
        return known or sampler

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        with self._transaction() as connection:
            return _first(
                connection, SamplerRow, tables.samplers, tables.samplers.c.sampler_id == sampler_id
            )

    def active_samplers(self) -> list[tuple[str, str]]:
        """The session and owner of each sampler of an active session."""
        active = tables.sessions.c.status["type"].as_string() == "active"
        statement = (
            sa.select(tables.samplers.c.session_id, tables.samplers.c.owner)
            .join(tables.sessions)
            .where(active)
        )
        with self._transaction() as connection:
            return [(session_id, owner) for session_id, owner in connection.execute(statement)]

    def samplers_of_session(self, session_id: str) -> list[SamplerRow]:
        with self._transaction() as connection:
            of_session = tables.samplers.c.session_id == session_id
            return _all(
                connection, SamplerRow, tables.samplers, of_session, tables.samplers.c.created_at
            )

    def expired_samplers(self, now: datetime) -> list[SamplerRow]:
        with self._transaction() as connection:
            due = tables.samplers.c.expires_at <= now
            return _all(connection, SamplerRow, tables.samplers, due, tables.samplers.c.expires_at)

    def delete_sampler(self, sampler_id: str) -> None:
        with self._transaction() as connection:
            connection.execute(
                tables.samplers.delete().where(tables.samplers.c.sampler_id == sampler_id)
            )

    def next_clone(self, sampler_id: str) -> int | None:
        """The number for one more client of a sampler, from 1; None if there is no such sampler."""
        with self._transaction() as connection:
            statement = (
                tables.samplers.update()
                .where(tables.samplers.c.sampler_id == sampler_id)
                .values(clones=tables.samplers.c.clones + 1)
                .returning(tables.samplers.c.clones)
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
                same = sa.and_(*(tables.usage.c[name] == value for name, value in values.items()))
                more = tables.usage.update().where(same).values(count=tables.usage.c.count + count)
                if not connection.execute(more).rowcount:
                    _add(connection, tables.usage, row)

    def usage(self, owner: str | None, start: datetime, end: datetime) -> list[UsageRow]:
        within = sa.and_(tables.usage.c.bucket_start >= start, tables.usage.c.bucket_start < end)
        if owner is not None:
            within = sa.and_(within, tables.usage.c.owner == owner)
        with self._transaction() as connection:
            return _all(connection, UsageRow, tables.usage, within, tables.usage.c.bucket_start)

    def add_audit(self, row: AuditRow) -> None:
        self._insert(tables.audit, row)

    def audit(
        self, owner: str, *, topic: str | None, start: datetime, end: datetime, limit: int = 10_000
    ) -> list[AuditRow]:
        where = sa.and_(
            tables.audit.c.owner == owner, tables.audit.c.at >= start, tables.audit.c.at < end
        )
        if topic is not None:
            where = sa.and_(where, tables.audit.c.topic == topic)
        columns = [tables.audit.c[field.name] for field in fields(AuditRow)]
        statement = sa.select(*columns).where(where).order_by(tables.audit.c.id).limit(limit)
        with self._transaction() as connection:
            return [_made(AuditRow, row) for row in connection.execute(statement)]

    def add_telemetry(self, rows: Sequence[TelemetryRow]) -> None:
        """Store events; idempotent, because a client that received no response sends them again."""
        with self._transaction(durable=False) as connection:
            insert = _INSERTS[connection.dialect.name](tables.telemetry)
            connection.execute(insert.on_conflict_do_nothing(), [_values(row) for row in rows])

    def telemetry(
        self, owner: str, session_id: str | None, *, limit: int, offset: int
    ) -> tuple[list[TelemetryRow], int]:
        """A page of telemetry events in order of arrival, and the total number."""
        where = None if session_id is None else tables.telemetry.c.session_id == session_id
        columns = [tables.telemetry.c[field.name] for field in fields(TelemetryRow)]
        statement = sa.select(*columns).where(tables.telemetry.c.owner == owner)
        if where is not None:
            statement = statement.where(where)
        page = statement.order_by(tables.telemetry.c.id).limit(limit).offset(offset)
        with self._transaction() as connection:
            rows = [_made(TelemetryRow, row) for row in connection.execute(page)]
            return rows, _count(connection, tables.telemetry, owner, where)

    def forget_telemetry(self, before: datetime) -> None:
        with self._transaction(durable=False) as connection:
            connection.execute(
                tables.telemetry.delete().where(tables.telemetry.c.received_at < before)
            )

    def trim_telemetry(self, owner: str, size: int) -> None:
        """Delete the oldest events of an owner until at least this many bytes are freed."""
        before = sa.func.sum(_EVENT_BYTES).over(order_by=tables.telemetry.c.id) - _EVENT_BYTES
        events = (
            sa.select(tables.telemetry.c.id, before.label("before"))
            .where(tables.telemetry.c.owner == owner)
            .subquery()
        )
        last = sa.select(sa.func.max(events.c.id)).where(events.c.before < size)
        old = sa.and_(
            tables.telemetry.c.owner == owner, tables.telemetry.c.id <= last.scalar_subquery()
        )
        with self._transaction() as connection:
            connection.execute(tables.telemetry.delete().where(old))

    def telemetry_bytes(self, owner: str | None = None) -> dict[str, int]:
        """The stored bytes of events, by owner."""
        size = sa.func.sum(_EVENT_BYTES)
        statement = sa.select(tables.telemetry.c.owner, size).group_by(tables.telemetry.c.owner)
        if owner is not None:
            statement = statement.where(tables.telemetry.c.owner == owner)
        with self._transaction() as connection:
            return {name: int(total) for name, total in connection.execute(statement)}

    def checkpoint_bytes(self) -> dict[str, int]:
        """The bytes of checkpoints, by owner."""
        size = sa.func.sum(tables.checkpoints.c.size_bytes)
        statement = sa.select(tables.checkpoints.c.owner, size).group_by(tables.checkpoints.c.owner)
        with self._transaction() as connection:
            return {name: int(total) for name, total in connection.execute(statement)}

    def counts(self) -> tuple[int, int, int]:
        """The numbers of sessions, runs and checkpoints."""
        with self._transaction() as connection:
            counted = tables.sessions, tables.runs, tables.checkpoints
            sessions, runs, checkpoints = (_count(connection, table, None) for table in counted)
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
                    connection.execution_options(**{DURABLE: False})
                with connection.begin():
                    yield connection
        except sa.exc.OperationalError as error:
            of_disk = disk_error(error)  # the transaction is rolled back
            if of_disk is not None:
                raise of_disk from error
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


def _add(connection: Connection, table: sa.Table, row: Any) -> None:
    # The values are parameters, not part of the statement: SQLAlchemy then compiles the statement once.
    connection.execute(table.insert(), _values(row))


def _values(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}


def _made(kind: type[R], row: Any) -> R:
    return kind(**row._mapping)


def _is_alias(owner: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.aliases.c.owner == owner, tables.aliases.c.name == name)


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
    return tables.sessions.c.idempotency_key == idempotency_key


def _named(run_id: str, kind: str, name: str) -> Any:
    return sa.and_(
        tables.checkpoints.c.run_id == run_id,
        tables.checkpoints.c.kind == kind,
        tables.checkpoints.c.name == name,
    )


def _is(checkpoint: CheckpointRow) -> Any:
    return _named(checkpoint.run_id, checkpoint.kind, checkpoint.name)
