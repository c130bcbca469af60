"""A copy of a data directory that a service can start with, taken while another one works in the original.

The order makes the copy whole. The database is first: what it lists is on the disk by then. The journal is before the
snapshots: a snapshot may be newer than the journal, but never older than what the journal still has. Then come
the files that rows and requests name. What is replaced while it is copied is copied again.
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
#: How often something is copied again that changes meanwhile.
_TRIES: Final = 50


def back_up(data_dir: Path, target: Path) -> None:
    """Copy a data directory to a new place; its service may be running."""
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
    """Copy all segments; records move to the end while it is compacted, so until no new segment comes."""
    target.mkdir(0o700)
    copied: list[Path] = []
    for _ in range(_TRIES):
        segments = sorted(source.glob("*.log"))
        if segments == copied:
            return
        # The last one that was copied may have grown since.
        for segment in segments:
            if segment not in copied or segment == copied[-1]:
                try:
                    shutil.copy2(segment, target / segment.name)
                except FileNotFoundError:  # its records are in a later one
                    (target / segment.name).unlink(missing_ok=True)
        copied = segments
    raise ConfigError("changes too fast to be copied; try again", field="data_dir")


def _inode(path: Path) -> object:
    return path.stat().st_ino


def _current(snapshots: Path) -> object:
    current = snapshots / "current.json"
    return current.read_text() if current.exists() else None


def _copy_steady(source: Path, target: Path, state: Callable[[Path], object]) -> None:
    """Copy a file or a directory that is replaced whole, if at all; what is gone meanwhile is left out."""
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
