"""A data directory is for its owner alone: it holds weights, requests and the secret that signs links."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["UMASK", "close_to_others"]

logger = logging.getLogger("tinkex.server")

#: For a process that does nothing but serve: what it makes is for its owner alone.
UMASK: Final = 0o077
#: What a service makes in its data directory.
_OURS: Final = frozenset(
    {
        "checkpoints",
        "identity",
        "identity.coming",
        "journal",
        "lock",
        "losses",
        "samplers",
        "secret",
        "service.json",
        "set-aside",
        "snapshots",
        "tinkex.db",
        "tinkex.db-shm",
        "tinkex.db-wal",
    }
)


def close_to_others(data_dir: Path) -> None:
    """Take a data directory and what a service made in it away from group and others, where this user owns it.

    A directory that holds other files too, such as somebody's home, keeps its own mode. Links are left alone.
    """
    entries = list(data_dir.iterdir())
    was_open = _is_open(data_dir)
    closed = [entry for entry in entries if entry.name in _OURS and _close(entry)]
    if was_open and all(map(_is_ours, entries)) and _close(data_dir):
        closed.append(data_dir)
    if was_open and closed:  # in a directory that was closed nobody could reach them
        logger.warning(
            "%s could be read by other users of this machine; it is closed to them now.", data_dir
        )
    if _is_open(data_dir):
        logger.warning(
            "%s is open to other users of this machine, and holds other files too or belongs to another user, so "
            "its mode is left as it is; choose a directory of its own with --data-dir.",
            data_dir,
        )


def _is_ours(entry: Path) -> bool:
    return entry.name in _OURS or (entry.name.startswith(".") and entry.name.endswith(".tmp"))


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _close(path: Path) -> bool:
    """Close a file or directory; False if it was closed before, is a link, or is not ours to close."""
    facts = path.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    kind = stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)
    # A sticky directory is one that is meant for everybody, as /tmp is.
    if not kind or facts.st_uid != os.geteuid() or not mode & 0o077 or mode & stat.S_ISVTX:
        return False
    path.chmod(mode & 0o700)
    return True
