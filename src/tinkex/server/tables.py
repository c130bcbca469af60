"""The tables of the database, the migrations between their versions, and a row of each as a value.

Rows are frozen dataclasses, times are aware UTC datetimes, JSON columns hold users' metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from tinkex.types import CheckpointType

__all__ = [
    "MIGRATIONS",
    "SCHEMA_VERSION",
    "AliasRow",
    "AuditRow",
    "CheckpointRow",
    "RunRow",
    "SamplerRow",
    "SessionRow",
    "TelemetryRow",
    "UsageRow",
]

metadata = sa.MetaData()


class UTCDateTime(sa.TypeDecorator[datetime]):
    """Times in UTC; SQLite does not store the zone, so it is added on reading."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("created_at", UTCDateTime, nullable=False, index=True),
    sa.Column("last_heartbeat", UTCDateTime, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("sdk_version", sa.String, nullable=False),
    sa.Column("project_id", sa.String),
    sa.Column("display_name", sa.String),
    sa.Column("status", sa.JSON, nullable=False),
    sa.Column("idempotency_key", sa.String, unique=True),
)
runs = sa.Table(
    "runs",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column(
        "session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False, index=True
    ),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("lora", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("created_at", UTCDateTime, nullable=False),
    sa.Column("last_request_at", UTCDateTime, nullable=False, index=True),
    sa.Column("corrupted", sa.Boolean, nullable=False, default=False),
)
checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("run_id", sa.String, sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("created_at", UTCDateTime, nullable=False, index=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False, default=False),
    sa.Column("expires_at", UTCDateTime, index=True),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("request_id", sa.String),
)
samplers = sa.Table(
    "samplers",
    metadata,
    sa.Column("sampler_id", sa.String, primary_key=True),
    sa.Column(
        "session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False, index=True
    ),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("model_path", sa.String),
    sa.Column("clones", sa.Integer, nullable=False, default=0),
    sa.Column("created_at", UTCDateTime, nullable=False),
    sa.Column("unnamed", sa.Boolean, nullable=False, default=False),
    sa.Column("expires_at", UTCDateTime, index=True),
)
usage = sa.Table(
    "usage",
    metadata,
    sa.Column("bucket_start", UTCDateTime, primary_key=True),
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("base_model", sa.String, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
)
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", UTCDateTime, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("topic", sa.String, nullable=False),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("run_id", sa.String),
    sa.Column("tinker_path", sa.String),
)
telemetry = sa.Table(
    "telemetry",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("received_at", UTCDateTime, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("event", sa.JSON, nullable=False),
    sa.Column("event_id", sa.String),
    sa.Index("telemetry_once", "owner", "session_id", "event_id", unique=True),
)
aliases = sa.Table(
    "aliases",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("path", sa.String, nullable=False),
    sa.Column("created_at", UTCDateTime, nullable=False),
)
version = sa.Table("schema_version", metadata, sa.Column("version", sa.Integer, primary_key=True))
#: A table of one row: the identity that this database shares with its data directory.
identity = sa.Table("identity", metadata, sa.Column("identity", sa.String, primary_key=True))

#: Statements that migrate a database from each version to the next; a new database starts at the newest. New tables
#: need no statement: missing tables are created first.
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
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
SCHEMA_VERSION: Final = 1 + len(MIGRATIONS)


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
