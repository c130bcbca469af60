"""Write files so that they survive a power cut; read only regular files of bounded size."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import Final

from tinkex.errors import InvalidInputError

__all__ = [
    "check_regular",
    "exchange",
    "flush",
    "is_plain_name",
    "make_directory",
    "read_regular",
    "sync",
    "write_whole",
]

#: Linux flag of renameat2: swap two names atomically.
_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


def sync(descriptor: int) -> None:
    """Wait until the content of an open file is on disk."""
    os.fsync(descriptor)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents, and flush the new names to disk."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        each.mkdir(mode, exist_ok=True)
        flush(each.parent)


def write_whole(path: Path, content: str) -> None:
    """Write or replace a file; after a crash it has the old content or the new, never a part."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        scratch.write_text(content)
        flush(scratch)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    flush(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False if the system or the filesystem cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(number, os.strerror(number), str(other))


def is_plain_name(name: object) -> bool:
    """Whether an untrusted name, joined to a directory, stays inside that directory."""
    return (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and not any(character in name for character in "/\\\0")
    )


def check_regular(path: Path, limit: int | None = None) -> int:
    """Return the size of a regular file; refuse other kinds, and more than `limit` bytes, without opening.

    Opening a device or a pipe can block or have side effects, and a link can point outside the directory.
    """
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidInputError(f"{path.name} is not a regular file", field="path")
    if limit is not None and facts.st_size > limit:
        raise InvalidInputError(
            f"the file {path.name} is larger than {limit} bytes: it has {facts.st_size}",
            field="path",
        )
    return facts.st_size


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    size = check_regular(path, limit)
    with path.open("rb") as file:
        return file.read(size)
