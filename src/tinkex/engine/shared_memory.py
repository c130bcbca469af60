"""A directory in shared memory that one process owns: the exchange of a pool, what one engine puts into it, the files of an actor.

The kernel frees shared memory only when its files are removed. A process that was killed leaves its directory; the next
one that opens a directory at the same place removes it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from .parcels import FileDepot, Parcel

__all__ = ["SharedMemory"]

_SHM: Final = Path("/dev/shm")  # noqa: S108 - private directories are made in it
_LOCK: Final = ".lock"
#: Seconds after which a directory without a lock is abandoned: it gets one at once, or its process has died.
_YOUNG: Final = 60.0
logger = logging.getLogger("tinkex.engine")


class SharedMemory(FileDepot):
    """A private directory, in memory where the system has such a place."""

    def __init__(self, parent: Path | None = None) -> None:
        usable = _SHM if os.access(_SHM, os.W_OK) else Path(tempfile.gettempdir())
        self._parent = parent or usable
        self._prefix = f"tinkex-{os.getuid()}-"
        self.directory = self._parent / f"{self._prefix}{secrets.token_hex(8)}"
        self._lock: int | None = None
        self._keeping = threading.Lock()
        super().__init__(self.directory)

    def open(self) -> None:
        """Make the directory, and remove those that dead processes have left beside it."""
        self.remove_abandoned()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owners = self._parent.lstat().st_uid, self.directory.lstat().st_uid
        if owners[0] not in {0, os.getuid()} or owners[1] != os.getuid():
            # Another user has made it while ours was gone.
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(self.directory))
        self._lock = _new_lock(self.directory)

    def keep(self) -> None:
        """Make the directory again if it is gone: systemd removes what a user has in shared memory when they log out."""
        with self._keeping:  # several engines may start at once
            if (self.directory / _LOCK).exists():
                return
            self._unlock()
            try:
                self.open()
            except OSError as error:
                logger.warning("%s cannot be made: %s", self.directory, error.strerror)

    def put(self, name: str, data: bytes) -> Parcel:
        self.keep()
        return super().put(name, data)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def new_directory(self) -> Iterator[Path]:
        """The name of a directory that may be made; it is removed afterwards."""
        self.keep()
        directory = self.directory / secrets.token_hex(8)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def remove_abandoned(self) -> None:
        """Remove the directories of processes that have ended."""
        for directory in self._parent.glob(f"{self._prefix}*"):
            with suppress(OSError):
                if _is_abandoned(directory):
                    shutil.rmtree(directory, ignore_errors=True)


def _new_lock(directory: Path) -> int:
    """A lock that this process holds until it ends. It is locked before it has its name: nobody finds it unlocked."""
    coming = directory / f"{_LOCK}-{secrets.token_hex(4)}"
    lock = os.open(coming, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        coming.rename(directory / _LOCK)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_abandoned(directory: Path) -> bool:
    """Whether nobody holds the directory's lock or, if it has none yet, one inside it."""
    own = directory / _LOCK
    locks = [own] if own.exists() else list(directory.glob(f"*/{_LOCK}"))
    if locks:
        return not any(map(_is_held, locks))
    return directory.stat().st_mtime < time.time() - _YOUNG


def _is_held(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
