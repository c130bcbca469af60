"""What the service sees of an engine's process from outside: whether it works, its memory, and how it ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tinkex.engine.resident import resident_bytes

__all__ = ["activity", "how_it_ended", "resident_with_children"]

_PROC: Final = Path("/proc")
#: Fields of /proc/PID/stat behind the name: page faults that read the disk, and processor time of the process, twice.
_WORK: Final = (9, 11, 12)


def activity(pid: int) -> int | None:
    """A number that grows while a process or one that it has started computes, reads or writes.

    None if it cannot be known, as on systems without /proc.
    """
    if not (_PROC / str(pid)).exists():
        return None
    return sum(map(_activity, _with_children(pid)))


def _activity(pid: int) -> int:
    done, place = 0, _PROC / str(pid)
    with suppress(OSError, IndexError, ValueError):  # it may end meanwhile
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        done += sum(int(fields[number]) for number in _WORK)
        counts = (place / "io").read_text().splitlines()[:2]  # what it has read and written
        done += sum(int(line.rpartition(":")[2]) for line in counts)
    return done


def resident_with_children(pid: int) -> int:
    """Memory of a process and of those that it has started; what they share counts for each."""
    return sum(resident_bytes(str(each)) for each in _with_children(pid))


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for children in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # the thread may end meanwhile
            for child in children.read_text().split():
                yield from _with_children(int(child))


def how_it_ended(code: int | None) -> str:
    """The end of a process, by its exit code; None if that is not known."""
    if code is None:
        return "has died"
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"
