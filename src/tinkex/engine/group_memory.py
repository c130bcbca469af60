"""Removes the shared memory of a group of processes that was killed: killed processes leave its files behind.

vLLM exchanges values through Python's `multiprocessing.shared_memory`. The process that ends a group removes its files:
the engine that leads the group, or the service. Only files that a process of the group has mapped are removed, so files
of other programs are never touched.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["GroupMemory", "shared_files"]

_PROC: Final = Path("/proc")
#: Names that Python gives to shared memory and to semaphores.
_MAPPED: Final = re.compile(r" (/dev/shm/(?:psm_|sem\.mp-)\S+)$", re.MULTILINE)


class GroupMemory:
    """The shared memory of one group of processes, as far as it was seen."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._seen: dict[Path, int] = {}

    def look(self) -> None:
        """Note what the group has mapped now; it must be done while its processes live."""
        self._seen |= shared_files(self._group)

    def remove(self) -> None:
        """Remove the files that were seen, unless another file has taken the name."""
        for file, inode in self._seen.items():
            with suppress(OSError):
                if file.stat().st_ino == inode:
                    file.unlink()


def shared_files(group: int) -> dict[Path, int]:
    """The files that processes of a group have mapped, with their inodes; none on systems without /proc."""
    found = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # the process may end meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[2]) != group:
                continue
            for name in _MAPPED.findall((stat.parent / "maps").read_text()):
                found[Path(name)] = Path(name).stat().st_ino
    return found
