"""Memory of a process."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path

__all__ = ["resident_bytes", "return_memory"]


def resident_bytes(process: str) -> int:
    """Memory of one process, by its id; 0 if it is not known."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    except OSError:  # no /proc on this system, or the process has just ended
        return 0
    return int(pages) * resource.getpagesize()


def return_memory() -> None:
    """Return the freed memory of this process to the system, which glibc keeps for later."""
    with suppress(OSError, AttributeError, TypeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)
