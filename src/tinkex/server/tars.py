"""Checkpoint files as a tar stream that can start at any byte.

The files are opened before the first byte is sent, so a stream that has begun ends whole even if its checkpoint is
deleted or replaced.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tinkex.errors import InternalServerError, InvalidInputError, NotFoundError

__all__ = ["Tar", "stat_regular"]

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of one file in the tar: exactly as many bytes as the header announces."""

    name: str
    file: io.FileIO
    facts: os.stat_result

    def __len__(self) -> int:
        return self.facts.st_size

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        # Files of a checkpoint never change: never mix bytes of two versions if one does.
        if _identity(os.fstat(self.file.fileno())) != _identity(self.facts):
            raise _changed(self.name)
        self.file.seek(start)
        while start < stop and (chunk := self.file.read(min(stop - start, _CHUNK))):
            start += len(chunk)
            yield chunk
        if start < stop:
            raise _changed(self.name)


def _changed(name: str) -> InternalServerError:
    return InternalServerError(f"{name} changed while it was being sent.")


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    # The inode number alone is not enough: file systems reuse the numbers of deleted files.
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


#: Two empty blocks end a tar. The padding to a full tape record is optional and left out.
_END_OF_TAR: Final = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Tar:
    """A tar of files in one directory, readable from any offset; unchanged files give the same bytes.

    It holds the files open until it is closed.
    """

    _parts: Sequence[bytes | _Content]
    #: The entity tag: it changes whenever the bytes may have changed.
    tag: str
    _files: ExitStack

    @classmethod
    def of(cls, directory: Path, names: Sequence[str]) -> Tar:
        """A tar of the named files. Raises for a missing or unsuitable file, before a response starts."""
        with ExitStack() as opened:
            parts = [part for name in names for part in _entry(directory, name, opened)]
            files = opened.pop_all()
        digest = hashlib.sha256()
        for part in parts:
            # The header rounds the modification time to seconds; the tag uses nanoseconds.
            digest.update(part if isinstance(part, bytes) else b"%d" % part.facts.st_mtime_ns)
        return cls((*parts, _END_OF_TAR), digest.hexdigest()[:32], files)

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return sum(map(len, self._parts))

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`, in pieces of at most 1 MiB."""
        stop = self.size if stop is None else stop
        for part in self._parts:
            first, last = max(start, 0), min(stop, len(part))
            start, stop = start - len(part), stop - len(part)
            if first >= last:
                continue
            if isinstance(part, bytes):
                yield part[first:last]
            else:
                yield from part.read(first, last)


def _entry(directory: Path, name: str, opened: ExitStack) -> tuple[bytes, _Content, bytes]:
    """The header, content and padding of one file, which is opened."""
    if name in {"", ".", ".."} or any(character in name for character in "/\\\0"):
        raise InvalidInputError(f"{name!r:.200} is not a plain file name", field="names")
    facts = stat_regular(directory, name)
    try:
        file = opened.enter_context(io.FileIO(directory / name))
    except FileNotFoundError:
        raise _missing(name) from None
    if _identity(os.fstat(file.fileno())) != _identity(facts):  # replaced since
        raise _changed(name)
    info = tarfile.TarInfo(name)  # a regular file of user and group 0
    info.mode = 0o644
    info.size = facts.st_size
    info.mtime = int(facts.st_mtime)
    # PAX supports long names and files over 8 GiB. A fixed encoding keeps the bytes independent of the
    # machine's locale.
    header = info.tobuf(tarfile.PAX_FORMAT, encoding="utf-8")
    padding = bytes(-facts.st_size % tarfile.BLOCKSIZE)
    return header, _Content(name, file, facts), padding


def _missing(name: str) -> NotFoundError:
    return NotFoundError(f"The checkpoint has no file {name!r:.200}.")


def stat_regular(directory: Path, name: str) -> os.stat_result:
    """The `stat` of a regular file; a symbolic link is refused because it may point outside the directory."""
    try:
        facts = (directory / name).lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(name) from None
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidInputError(f"{name!r:.200} is not a regular file", field="names")
    return facts
