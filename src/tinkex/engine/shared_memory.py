"""A directory in shared memory that only one process uses: the exchange of a pool on one machine, and the files of an actor.

The kernel frees shared memory only when its files are removed. A process that was killed leaves its directory; the next
one that starts removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from .parcels import FileDepot

__all__ = ["SharedMemory"]

_SHM: Final = Path("/dev/shm")  # noqa: S108 - private directories are made in it
_LOCK: Final = ".lock"


class SharedMemory(FileDepot):
    """A private directory, in memory where the system has such a place."""

    def __init__(self, parent: Path | None = None) -> None:
        usable = _SHM if os.access(_SHM, os.W_OK) else Path(tempfile.gettempdir())
        self._parent = parent or usable
        self._prefix = f"tinkex-{os.getuid()}-"
        self.directory = self._parent / f"{self._prefix}{secrets.token_hex(8)}"
        self._lock: int | None = None
        super().__init__(self.directory)

    def open(self) -> None:
        self._remove_abandoned()
        # Locked before it has its name: another process that starts now would take it for abandoned.
        hidden = self.directory.with_name(f".{self.directory.name}")
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hidden.rename(self.directory)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def new_directory(self) -> Iterator[Path]:
        """The name of a directory that may be made; it is removed afterwards."""
        directory = self.directory / secrets.token_hex(8)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _remove_abandoned(self) -> None:
        """Remove the directories of processes that have ended: nobody holds their lock."""
        for directory in self._parent.glob(f"{self._prefix}*"):
            with suppress(OSError):
                descriptor = os.open(directory / _LOCK, os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
                finally:
                    os.close(descriptor)
