"""Opening SQLite and PostgreSQL: how commits reach the disk, who may read the files, and what disk errors mean."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, make_url

__all__ = ["DURABLE", "disk_error", "extend_log", "new_engine"]

#: SQLite's error codes for a full disk and for a file that may not grow.
_NO_ROOM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
)
#: SQLite's other disk errors, by the last byte of their codes.
_ERRNO: Final = {sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_IOERR: errno.EIO}
#: Execution option of a connection: whether its commits wait until they are on disk.
DURABLE: Final = "tinkex_durable"
#: Note on a connection to SQLite: its current setting of `synchronous`.
_SYNCHRONOUS: Final = "tinkex_synchronous"
#: Size of SQLite's write-ahead log: 1,000 pages, after which it is written from the front again, and a large commit.
_LOG_BYTES: Final = 4_500_000


def new_engine(url: str) -> Engine:
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
        wanted = "FULL" if connection.get_execution_options().get(DURABLE, True) else "NORMAL"
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


def extend_log(url: sa.URL) -> None:
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


def disk_error(error: sa.exc.OperationalError) -> OSError | None:
    """The error of the disk behind an error of SQLite; None if it is another one."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    number = errno.ENOSPC if code in _NO_ROOM else _ERRNO.get((code or 0) & 0xFF)
    return None if number is None else OSError(number, os.strerror(number))
