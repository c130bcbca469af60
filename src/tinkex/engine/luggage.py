"""Sends the directories of calls as bytes: an engine on another machine does not see the service's disk.

The service's side reads the directory of a call before it sends it, and writes the directory that comes with a reply. The
engine's side gives the call a temporary directory instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from . import directories
from .calls import (
    CallFrame,
    EngineCall,
    OpenSampler,
    Reply,
    RestoreModel,
    RestoreSnapshot,
    SaveState,
    TakeSnapshot,
    Token,
)
from .files import check_regular
from .values import Array

__all__ = [
    "Files",
    "PackedFrame",
    "PackedMessage",
    "Unpacking",
    "is_shared",
    "pack",
    "write_whole_directory",
    "writes",
]

#: The files of a directory by name; arrays of bytes, which Ray moves without copies.
Files: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class PackedFrame:
    """A call, and the files of the directory that it reads; None if it reads none, or reads it from a shared disk."""

    frame: CallFrame
    files: Files | None = None


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """A message of the engine, and the files of the directory that its call has written."""

    message: Reply | Token
    files: Files | None = None


def reads(call: EngineCall[object]) -> Path | None:
    """The directory that a call reads."""
    match call:
        case RestoreModel() | RestoreSnapshot():
            return call.directory
        case OpenSampler() if call.model_id is None:  # otherwise the engine has the weights
            return call.directory
        case _:
            return None


def writes(call: EngineCall[object]) -> Path | None:
    """The directory that a call writes."""
    return call.directory if isinstance(call, SaveState | TakeSnapshot) else None


def pack(frame: CallFrame, shared: Path | None = None) -> PackedFrame:
    """A call with the files it reads, unless they are in a directory that all machines share."""
    directory = reads(frame.call)
    if directory is None or is_shared(directory, shared) or not directory.is_dir():
        return PackedFrame(frame)
    return PackedFrame(frame, read_files(directory))


def is_shared(directory: Path, shared: Path | None) -> bool:
    return shared is not None and directory.is_relative_to(shared)


def read_files(directory: Path) -> Files:
    files = {}
    for file in directory.iterdir():
        check_regular(file)
        files[file.name] = np.fromfile(file, np.uint8)
    return files


def write_files(files: Files, directory: Path) -> None:
    for name, content in files.items():
        content.tofile(directory / name)


def write_whole_directory(files: Files, directory: Path) -> None:
    """Write a directory that came with a reply; it is complete or absent, and on disk when this returns."""
    with directories.whole(directory) as scratch:
        write_files(files, scratch)


class Unpacking:
    """The engine's side: gives calls temporary directories below `root`, and takes what they write from there."""

    def __init__(self, root: Path, shared: Path | None = None) -> None:
        self._root, self._shared = root, shared
        self._writing: dict[int, Path] = {}
        self._reading: dict[int, Path] = {}

    def unpack(self, packed: PackedFrame) -> CallFrame:
        frame, call = packed.frame, packed.frame.call
        own = self._root / str(frame.call_id)
        if packed.files is not None:
            try:
                own.mkdir()
                write_files(packed.files, own)
            except OSError:
                shutil.rmtree(own, ignore_errors=True)
                raise
            self._reading[frame.call_id] = own
            return CallFrame(frame.call_id, _moved(call, own))
        written = writes(call)
        if written is not None and not is_shared(written, self._shared):
            self._writing[frame.call_id] = own
            return CallFrame(frame.call_id, _moved(call, own))
        return frame

    def pack(self, message: Reply | Token) -> PackedMessage:
        if isinstance(message, Token):
            return PackedMessage(message)
        written = self._writing.pop(message.call_id, None)
        read = self._reading.pop(message.call_id, None)
        files = None
        if written is not None and message.error is None:
            files = read_files(written)
        for directory in (written, read):
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
        return PackedMessage(message, files)


def _moved(call: EngineCall[object], directory: Path) -> EngineCall[object]:
    moved: EngineCall[object] = replace(call, directory=directory)  # type: ignore[type-var]
    return moved
