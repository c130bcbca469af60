"""File permissions: only the owner may read a data directory, with its weights, requests and signing secret."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["UMASK", "close_to_others"]

logger = logging.getLogger("tinkex.server")

#: Umask of a process that only serves: its new files are readable by their owner only.
UMASK: Final = 0o077
#: The entries that a service creates in its data directory.
_OURS: Final = frozenset(
    {
        "checkpoints",
        "identity",
        "identity.coming",
        "journal",
        "lock",
        "losses",
        "metrics",
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
    """Remove the access of group and others to a data directory and the service's files in it, if this user owns them.

    A directory that contains other files too, such as a home directory, keeps its own mode. Links are not changed.
    """
    entries = list(data_dir.iterdir())
    was_open = _is_open(data_dir)
    closed = [entry for entry in entries if entry.name in _OURS and _close(entry)]
    if was_open and all(map(_is_ours, entries)) and _close(data_dir):
        closed.append(data_dir)
    if was_open and closed:  # in a private directory no other user could reach them
        logger.warning(
            "Other users of this machine could read %s; its permissions now allow only the owner.",
            data_dir,
        )
    if _is_open(data_dir):
        logger.warning(
            "Other users of this machine can access %s. Its mode is unchanged, because it contains other files or "
            "belongs to another user; choose a separate directory with --data-dir.",
            data_dir,
        )


def _is_ours(entry: Path) -> bool:
    return entry.name in _OURS or (entry.name.startswith(".") and entry.name.endswith(".tmp"))


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _close(path: Path) -> bool:
    """Make a file or directory private; False if it already is, is a link, or belongs to another user."""
    facts = path.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    kind = stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)
    # A sticky directory, such as /tmp, is shared on purpose.
    if not kind or facts.st_uid != os.geteuid() or not mode & 0o077 or mode & stat.S_ISVTX:
        return False
    path.chmod(mode & 0o700)
    return True
