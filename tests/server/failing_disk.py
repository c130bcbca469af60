"""A disk that fails at chosen writes: counts every Python call that changes the disk, and makes some of them fail.

Writes inside SQLite and safetensors cannot be seen from Python. Instead, SQLite's commits are counted, and the flushes
that follow each safetensors file.
"""

from __future__ import annotations

import errno
import io
import os
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

__all__ = ["FailingDisk"]


class FailingDisk:
    """A write fails with the error `number` if `broken` is true for the write's index."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
        self.count = 0
        self.number = number
        self.broken: Callable[[int], bool] = lambda count: False
        for name in ("pwrite", "fsync", "mkdir", "rename", "replace", "link", "ftruncate"):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name)))
        opened, plain_open = os.open, io.open

        def open_descriptor(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & (os.O_CREAT | os.O_WRONLY):
                self._write()
            return opened(path, flags, *args, **options)

        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if set(mode) & set("wax+") and not isinstance(file, int):
                self._write()
            return plain_open(file, mode, *args, **options)

        monkeypatch.setattr(os, "open", open_descriptor)
        monkeypatch.setattr(io, "open", open_file)

    def watch(self, engine: sa.Engine) -> None:
        """Also count the commits of a database."""

        @sa.event.listens_for(engine, "commit")
        def commit(_: object) -> None:
            try:
                self._write()
            except OSError as failure:
                error = sqlite3.OperationalError("the disk is full or broken")
                full = self.number == errno.ENOSPC
                error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_READONLY
                raise sa.exc.OperationalError("COMMIT", {}, error) from failure

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            self._write()
            return call(*args, **options)

        return guarded

    def _write(self) -> None:
        self.count += 1
        if self.broken(self.count):
            raise OSError(self.number, os.strerror(self.number))
