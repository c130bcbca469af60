"""Checks that a database and a data directory belong together: both carry the same identity.

With the database of another directory, runs would lose their snapshots and checkpoints their files.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tinkex.engine.files import write_whole
from tinkex.errors import ConfigError

from .store import Store

__all__ = ["FILE", "join"]

#: The file in the data directory that contains its identity.
FILE: Final = "identity"
#: A new identity that is not in effect yet: it counts once the database has it too.
_COMING: Final = "identity.coming"
#: Directories in which each entry belongs to a row of the database.
_KEPT: Final = ("checkpoints", "snapshots", "samplers", "losses")
#: A journal segment without records has fewer bytes than this.
_EMPTY_SEGMENT: Final = 64


@dataclass(frozen=True)
class _Found:
    """The state of a directory and a database before they are joined."""

    directory: str | None  # their identities
    database: str | None
    directory_is_used: bool  # a service has run with it
    directory_is_empty: bool  # nothing in it belongs to a row
    database_is_empty: bool

    @property
    def mismatch(self) -> str | None:
        """Why the two cannot be joined; None if they can."""
        if self.directory_is_empty and self.database_is_empty:
            return None  # both are empty: nothing can be lost
        if self.directory is not None and self.database is not None:
            return None if self.directory == self.database else "the database of another directory"
        if self.directory is not None:
            return "a database that was not used with this directory"
        if self.database is not None:
            return "the database of another directory"
        # Both are from a release without identities, or one of them is new.
        if self.database_is_empty:
            return "an empty database"
        if not self.directory_is_used:
            return "the database of another directory"
        return None


def join(data_dir: Path, store: Store) -> None:
    """Refuse a database that is not the one of a data directory; give both an identity if they have none."""
    directory = _read(data_dir / FILE)
    database = store.identity()
    coming = _read(data_dir / _COMING)
    if directory is None and coming is not None and coming == database:
        directory = coming  # a crash after the database was written, before the file was
    found = _Found(
        directory,
        database,
        (data_dir / "journal").is_dir(),
        _is_empty(data_dir),
        not any(store.counts()),
    )
    if found.mismatch is not None:
        raise ConfigError(
            f"{data_dir} belongs to one database, but the service was given {found.mismatch}. "
            "Nothing was changed. Start it with the database that belongs to this directory, or with "
            "another data directory (--data-dir).",
            field="database_url",
        )
    identity = database or directory or str(uuid.uuid4())
    if database != identity:
        write_whole(data_dir / _COMING, identity)
        store.set_identity(identity)
    if _read(data_dir / FILE) != identity:
        write_whole(data_dir / FILE, identity)
    (data_dir / _COMING).unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def _is_empty(data_dir: Path) -> bool:
    kept = (entry for name in _KEPT for entry in _entries(data_dir / name))
    segments = _entries(data_dir / "journal")
    return not any(kept) and all(file.stat().st_size < _EMPTY_SEGMENT for file in segments)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
