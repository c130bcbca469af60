"""Values that engines send each other and that are too large for a pipe: adapters and gradients, as safetensors.

The service only passes the name on. On one machine a parcel is a file in shared memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .values import LoraSpec

__all__ = ["Depot", "FileDepot", "Parcel", "ParcelLostError", "PublishedAdapter"]


class ParcelLostError(Exception):
    """A parcel cannot be read any more: the engine that kept it has died."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value in a depot; every process of the pool finds it by `where`."""

    name: str
    size: int
    where: object


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """The weights of a model at one moment; the parcel's name is made of their content."""

    parcel: Parcel
    base_model: str
    spec: LoraSpec


class Depot(Protocol):
    """A place that all engines of a pool reach."""

    def put(self, name: str, data: bytes) -> Parcel:
        """Raises `OSError` if there is no room; then nothing of it stays."""

    def get(self, parcel: Parcel) -> bytes:
        """Raises `ParcelLostError` if it is gone."""

    def drop(self, parcel: Parcel) -> None:
        """Free a parcel that nobody reads any more. No error if it is gone."""


class FileDepot:
    """Files in a directory that somebody else makes and removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, data: bytes) -> Parcel:
        place = self._directory / name
        unfinished = place.with_name(f".{name}")
        try:
            unfinished.write_bytes(data)
            unfinished.rename(place)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return Parcel(name, len(data), place)

    def get(self, parcel: Parcel) -> bytes:
        assert isinstance(parcel.where, Path)
        try:
            return parcel.where.read_bytes()
        except OSError as error:
            raise ParcelLostError(f"{parcel.where} cannot be read: {error.strerror}") from None

    def drop(self, parcel: Parcel) -> None:
        assert isinstance(parcel.where, Path)
        with contextlib.suppress(OSError):
            parcel.where.unlink()
