"""Backup: a consistent copy of a data directory, taken while its service runs.

The order of copying makes the copy consistent. The database comes first: the files it lists are on disk by then. The
journal comes before the snapshots: a snapshot may be newer than the journal, but never older than its oldest
record. Then come the files that rows and requests refer to. A file that is replaced during its copy is copied again.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from tinkex.engine.files import flush, make_directory
from tinkex.errors import ConfigError

__all__ = ["back_up"]

_DATABASE: Final = "tinkex.db"
#: Attempts to copy a file or directory that changes during the copy.
_TRIES: Final = 50
#: Files that are about to replace others; they may be gone before they are copied.
_UNFINISHED: Final = shutil.ignore_patterns("*.new")


def back_up(data_dir: Path, target: Path) -> None:
    """Copy a data directory to an empty or new directory; its service may be running."""
    if not (data_dir / "identity").is_file():
        raise ConfigError(f"{data_dir} is not the data directory of a service", field="data_dir")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty", field="target")
    make_directory(target, 0o700)
    for name in ("identity", "secret"):
        if (data_dir / name).is_file():
            shutil.copy2(data_dir / name, target / name)
    if (data_dir / _DATABASE).is_file():
        _copy_database(data_dir / _DATABASE, target / _DATABASE)
    _copy_journal(data_dir / "journal", target / "journal")
    for kept in _entries(data_dir / "snapshots"):
        _copy_steady(kept, target / "snapshots" / kept.name, _current)
    for place in ("checkpoints/*/*/*", "samplers/*", "losses/*"):
        for kept in sorted(data_dir.glob(place)):
            if not kept.name.startswith("."):
                _copy_steady(kept, target / kept.relative_to(data_dir), _inode)
    # Files that only grow: a record that is cut off is dropped when they are opened.
    if (data_dir / "metrics").is_dir():
        shutil.copytree(data_dir / "metrics", target / "metrics", ignore=_UNFINISHED)
    for path in sorted(target.rglob("*"), reverse=True):
        flush(path)
    flush(target)


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
    target.chmod(0o600)


def _copy_journal(source: Path, target: Path) -> None:
    """Copy all segments. Repeat until no new one appears: compaction moves records to newer segments."""
    target.mkdir(0o700)
    copied: list[Path] = []
    for _ in range(_TRIES):
        segments = sorted(source.glob("*.log"))
        if segments == copied:
            return
        # The last copied segment may have grown since.
        for segment in segments:
            if segment not in copied or segment == copied[-1]:
                try:
                    shutil.copy2(segment, target / segment.name)
                except FileNotFoundError:  # compacted away: its records are in a later segment
                    (target / segment.name).unlink(missing_ok=True)
        copied = segments
    raise ConfigError("changes too fast to be copied; try again", field="data_dir")


def _inode(path: Path) -> object:
    return path.stat().st_ino


def _current(snapshots: Path) -> object:
    current = snapshots / "current.json"
    return current.read_text() if current.exists() else None


def _copy_steady(source: Path, target: Path, state: Callable[[Path], object]) -> None:
    """Copy a file or directory that is only ever replaced as a whole; skip it if it is deleted meanwhile."""
    make_directory(target.parent, 0o700)
    for _ in range(_TRIES):
        try:
            before = state(source)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
            else:
                shutil.copy2(source, target)
            if state(source) == before:
                return
        except (FileNotFoundError, shutil.Error):
            if not source.exists():
                break
        _remove(target)
    _remove(target)
    if source.exists():
        raise ConfigError(f"{source} changes too fast to be copied; try again", field="data_dir")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
