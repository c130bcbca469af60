"""Files: written so that they stay written, and read only if they are regular and of a bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tinkex.errors import InvalidInputError

__all__ = ["check_regular", "flush", "is_plain_name", "read_regular"]


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain_name(name: object) -> bool:
    """Whether a name from outside stays in the directory it is joined to."""
    return (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and not any(character in name for character in "/\\\0")
    )


def check_regular(path: Path, limit: int | None = None) -> int:
    """The size of a regular file; anything else, or more than `limit` bytes, is refused unopened.

    Devices, pipes and links are refused because opening one can block, have effects or lead elsewhere.
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
    """The content of a regular file of at most `limit` bytes."""
    size = check_regular(path, limit)
    with path.open("rb") as file:
        return file.read(size)
