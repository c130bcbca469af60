"""Looks at processes in /proc, which may end at any moment."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children(parent: int | None = None) -> set[int]:
    """The process ids of the children of a process, this one by default, whichever thread started them."""
    found: set[int] = set()
    for task in Path(f"/proc/{parent or os.getpid()}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found.update(map(int, task.read_text().split()))
    return found


def command(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
