"""A control group that limits the memory of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group (version 1 or 2) inside this process's own group."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._first_version = (directory / "memory.limit_in_bytes").exists()

    @property
    def used(self) -> int:
        name = "memory.usage_in_bytes" if self._first_version else "memory.current"
        return int((self.directory / name).read_text())

    def limit(self, size: int) -> None:
        name = "memory.limit_in_bytes" if self._first_version else "memory.max"
        (self.directory / name).write_text(str(size))

    @property
    def kills(self) -> int:
        """Number of processes in the group that the OOM killer has killed."""
        name = "memory.oom_control" if self._first_version else "memory.events"
        lines = (self.directory / name).read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.split()[0] == "oom_kill"))

    def entering(self, command: list[str]) -> list[str]:
        """Wrap a command so that it and its child processes run in the group."""
        return ["sh", "-c", f'echo $$ > {self.directory}/cgroup.procs && exec "$@"', "sh", *command]


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Create a group; skips the test if the kernel or missing permissions prevent it."""
    parent = _own_group()
    if parent is None:
        pytest.skip("this process is in no control group that can limit memory")
    directory = parent / f"tinkex-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield MemoryGroup(directory)
    finally:
        directory.rmdir()


def _own_group() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    if "memory" in groups:
        found = ROOT / "memory" / groups["memory"].lstrip("/")
        return found if found.is_dir() else None
    found = ROOT / groups.get("", "").lstrip("/")
    shared = found / "cgroup.subtree_control"
    return found if shared.is_file() and "memory" in shared.read_text().split() else None
