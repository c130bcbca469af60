"""Simulates a power cut: only flushed data has reached the disk.

While `SyncedState` is entered, every `os.fsync` of this process is recorded: the content of a file, the names in a
directory. `after_power_cut` builds a directory from these records: a name that was not flushed is missing, a file that
was not flushed is empty. SQLite's own flushes cannot be seen from Python, so its files are copied as they are.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Self

import pytest

__all__ = ["SyncedState"]


class SyncedState:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._fsync = os.fsync
        self._files: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._open: dict[int, int] = {}  # keeps the inodes of deleted files from being reused
        monkeypatch.setattr(os, "fsync", self._record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def _record(self, descriptor: int) -> None:
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        if found.st_ino not in self._open:
            self._open[found.st_ino] = os.dup(descriptor)
        opened = Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(found.st_mode):
            entries = opened.readlink().iterdir()
            self._names[found.st_ino] = {
                entry.name: (entry.lstat().st_ino, entry.is_dir()) for entry in entries
            }
        else:
            self._files[found.st_ino] = opened.read_bytes()

    def after_power_cut(self, target: Path) -> Path:
        """Build the directory that the next start finds."""
        target.mkdir()
        self._rebuild(self._root.stat().st_ino, target)
        for file in self._root.glob("tinkex.db*"):
            shutil.copyfile(file, target / file.name)
        return target

    def _rebuild(self, inode: int, target: Path) -> None:
        for name, (number, is_directory) in self._names.get(inode, {}).items():
            place = target / name
            if is_directory:
                place.mkdir()
                self._rebuild(number, place)
            else:
                place.write_bytes(self._files.get(number, b""))
