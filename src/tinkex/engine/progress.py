"""What the engine is working on, in memory that it shares with the service.

A stuck engine cannot say so: its interpreter may hold its lock for ever. So it writes down beforehand what it begins,
and the service looks whether that changes.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import IO, Final, Self

__all__ = ["IDLE", "SAMPLING", "UNTIMED", "Progress"]

#: In place of the number of a call: nothing; a step for all samples; something that may take any time.
IDLE: Final = 0
SAMPLING: Final = -1
UNTIMED: Final = -2

_RECORD: Final = struct.Struct("<qq")


class Progress:
    """How often the work has changed, and what it is: the number of a call, or one of the constants."""

    def __init__(self, memory: mmap.mmap | bytearray, file: IO[bytes] | None = None) -> None:
        self._memory = memory
        self._file = file
        self._changes = 0

    @classmethod
    def alone(cls) -> Self:
        """Shared with nobody."""
        return cls(bytearray(_RECORD.size))

    @classmethod
    def shared(cls) -> Self:
        """New memory, for whoever gets its descriptor."""
        if hasattr(os, "memfd_create"):  # a full disk must not keep an engine from starting
            file: IO[bytes] = os.fdopen(os.memfd_create("tinkex-progress"), "r+b")
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - kept as long as this object
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
        _RECORD.pack_into(self._memory, 0, self._changes, work)

    def end(self) -> None:
        self.begin(IDLE)

    def read(self) -> tuple[int, int]:
        changes, work = _RECORD.unpack_from(self._memory)
        return changes, work

    def close(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
            self._memory = bytearray(_RECORD.size)  # for whoever still reads
        if self._file is not None:
            self._file.close()
