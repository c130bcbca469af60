"""One copy of a base model's weights for all engines of a machine.

The first engine that loads a model writes its weights to a file in shared memory, and the others map this file. So several
engines need the memory of one, and those that sample at the same time find in the processor's cache what another has just
read. Nobody writes to the weights once the file has its name. If the file cannot be made, each engine has a copy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
        size = sum(_lines(weight.nbytes) for weight in weights)
        with ExitStack() as sharing:
            try:
                join = sharing.enter_context(self._sharing(_version(files, weights), size))
            except OSError as error:  # containers often have 64 MB of shared memory
                self._tell(size, error)
                join = torch.cat
            yield join

    @contextmanager
    def _sharing(self, version: str, size: int) -> Iterator[Join]:
        path = self._directory / f"weights-{version}"
        with self._locked():
            if path.exists():
                yield _Region(path, mmap.MAP_PRIVATE, filled=True).join
                return
            unfinished = path.with_name(f".{path.name}")
            try:
                _reserve(unfinished, size)
                yield _Region(unfinished, mmap.MAP_SHARED, filled=False).join
                with suppress(OSError):  # the directory is gone; this engine has the weights
                    unfinished.rename(path)
            finally:
                with suppress(OSError):
                    unfinished.unlink()

    def _tell(self, size: int, error: OSError) -> None:
        """Log once for all engines, also those that are started again, that they do not share weights."""
        needed = size * _ROOM
        try:
            (self._directory / f"told-{size}").touch(0o600, exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # the directory is the trouble
            pass
        logger.warning(
            "Each engine keeps its own copy of the base model: to share one, %s needs %.1f MB free (%s).",
            self._directory,
            max(needed / 1e6, 0.1),
            error.strerror,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One engine at a time. The kernel unlocks for an engine that dies, and the next one starts the file anew."""
        descriptor = os.open(self._directory / "weights.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _reserve(path: Path, size: int) -> None:
    """Make a file whose memory is there, so that writing to it cannot fail later, and some room is left beside it."""
    path.unlink(missing_ok=True)  # an engine that died may have left it
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        place = os.fstatvfs(descriptor)
        if place.f_bavail * place.f_frsize < size * _ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


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


def _version(files: Iterable[Path], weights: Iterable[Tensor]) -> str:
    """A name that changes with the files and the types of the weights."""
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(
        repr((found, [str(weight.dtype) for weight in weights])).encode()
    ).hexdigest()[:16]
