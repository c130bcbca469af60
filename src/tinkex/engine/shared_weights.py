"""One copy of a base model's weights for all engines of a machine.

The first engine that loads a model writes its weights to a file in shared memory, and the others map this file. So several
engines need the memory of one, and those that sample at the same time find in the processor's cache what another has just
read. Nobody writes to the weights once the file has its name; if there is no room for the file, each engine has a copy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

__all__ = ["Join", "SharedWeights"]

#: Puts tensors one after another into one tensor, along the first dimension.
Join = Callable[[list[Tensor]], Tensor]
logger = logging.getLogger("tinkex.engine")

#: Bytes of a cache line: kernels read weights in whole lines.
_LINE: Final = 64
#: Free space that is needed, in sizes of the weights: the engines also exchange adapters and gradients in this memory.
_ROOM: Final = 1.25


class SharedWeights:
    """Weights in the files of a directory, which somebody else makes and removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def joining(self, files: Iterable[Path], weights: Sequence[Tensor]) -> Iterator[Join]:
        """What joins the weights of a model that was read from `files`; every engine joins them in the same order."""
        path = self._directory / f"weights-{_version(files, weights[0].dtype)}"
        with self._locked():
            if path.exists():
                yield _Region(path, mmap.MAP_PRIVATE, filled=True).join
                return
            unfinished = path.with_name(f".{path.name}")
            if not _has_room(unfinished, sum(_lines(weight.nbytes) for weight in weights)):
                yield torch.cat
                return
            try:
                yield _Region(unfinished, mmap.MAP_SHARED, filled=False).join
                unfinished.rename(path)
            finally:
                unfinished.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One engine at a time. The kernel unlocks for an engine that dies, and the next one starts the file anew."""
        descriptor = os.open(self._directory / "weights.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _has_room(path: Path, size: int) -> bool:
    """Make a file whose memory is there, so that writing to it cannot fail later, and some room is left beside it."""
    path.unlink(missing_ok=True)  # an engine that died may have left it
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        place = os.fstatvfs(descriptor)
        if place.f_bavail * place.f_frsize < size * _ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:  # containers often have 64 MB of shared memory
        path.unlink()
        logger.warning(
            "Each engine keeps its own copy of the base model: %s has no room for %.0f MB (%s).",
            path.parent,
            size / 1e6,
            error.strerror,
        )
        return False
    finally:
        os.close(descriptor)
    return True


class _Region:
    """Tensors one after another in a mapped file."""

    def __init__(self, path: Path, kind: int, *, filled: bool) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0, flags=kind)
        self._filled, self._end = filled, 0

    def join(self, parts: list[Tensor]) -> Tensor:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        count = sum(part.numel() for part in parts)
        joined = torch.frombuffer(
            self._memory, dtype=parts[0].dtype, count=count, offset=self._end
        ).view(shape)
        self._end += _lines(joined.nbytes)
        if not self._filled:
            torch.cat(parts, out=joined)
        return joined


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _version(files: Iterable[Path], dtype: torch.dtype) -> str:
    """A name that changes with the files and the type."""
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((found, str(dtype))).encode()).hexdigest()[:16]
