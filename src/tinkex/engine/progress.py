"""The engine's current work, in memory that it shares with the service.

A stuck engine cannot report that it is stuck: its interpreter may hold its lock for ever. So the engine records each
piece of work before it begins, and the service checks whether the record changes.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import IO, Final, Self

__all__ = ["IDLE", "SAMPLING", "UNTIMED", "EngineProgress"]

#: Recorded instead of a call id: no work; a sampling step; work without a time limit.
IDLE: Final = 0
SAMPLING: Final = -1
UNTIMED: Final = -2

#: Changes, current work, and the memory of an engine on another machine.
_RECORD: Final = struct.Struct("<qqq")


class EngineProgress:
    """A counter of changes and the current work: a call id or one of the constants."""

    def __init__(self, memory: mmap.mmap | bytearray, file: IO[bytes] | None = None) -> None:
        self._memory = memory
        self._file = file
        self._changes = 0

    @classmethod
    def alone(cls) -> Self:
        """Private memory, for an engine that no service watches."""
        return cls(bytearray(_RECORD.size))

    @classmethod
    def shared(cls) -> Self:
        """New shared memory; a process that inherits its descriptor can open it."""
        if hasattr(os, "memfd_create"):  # needs no disk: an engine starts even if the disk is full
            file: IO[bytes] = os.fdopen(os.memfd_create("tinkex-progress"), "r+b")
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        file.truncate(_RECORD.size)
        return cls(mmap.mmap(file.fileno(), _RECORD.size), file)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Self:
        return cls(mmap.mmap(descriptor, _RECORD.size))

    def fileno(self) -> int:
        assert self._file is not None
        return self._file.fileno()

    def begin(self, work: int) -> None:
        self._changes += 1
        _RECORD.pack_into(self._memory, 0, self._changes, work, 0)

    def end(self) -> None:
        self.begin(IDLE)

    def read(self) -> tuple[int, int]:
        changes, work, _ = _RECORD.unpack_from(self._memory)
        return changes, work

    def repeat(self, read: tuple[int, int], memory: int) -> None:
        """Record what an engine on another machine has recorded, and the bytes of memory it uses."""
        _RECORD.pack_into(self._memory, 0, *read, memory)

    @property
    def memory(self) -> int:
        """Bytes of memory of an engine on another machine; 0 if not known."""
        return int(_RECORD.unpack_from(self._memory)[2])

    def close(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
            self._memory = bytearray(_RECORD.size)  # so that a late `read` does not fail
        if self._file is not None:
            self._file.close()
