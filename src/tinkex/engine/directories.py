"""Checkpoint directories: each is complete or absent, and holds a checksum of every file.

This module handles names, JSON and checksums; the engine that writes a checkpoint handles the tensors.
`adapter_config.json` has PEFT's format; `tinkex.json` holds the facts that PEFT's format has no field for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tinkex.errors import InvalidInputError, TinkerError

from .files import (
    check_regular,
    exchange,
    flush,
    is_plain_name,
    make_directory,
    read_regular,
)
from .values import MAX_RANK, LoraSpec

__all__ = [
    "CONFIG",
    "GRADIENTS",
    "OPTIMIZER",
    "WEIGHTS",
    "Manifest",
    "SourceGoneError",
    "checked_manifest",
    "checked_spec",
    "content_name",
    "copy",
    "link",
    "placed",
    "put",
    "read_json",
    "reading",
    "whole",
    "write",
]

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
OPTIMIZER: Final = "optimizer.safetensors"
#: In snapshots only: the gradients accumulated for the next step.
GRADIENTS: Final = "gradients.safetensors"
_MANIFEST: Final = "tinkex.json"
#: Limit in bytes for each JSON file of a checkpoint; an adapter's configuration has a few kilobytes.
JSON_LIMIT: Final = 4 << 20


def write(
    directory: Path,
    fill: Callable[[Path], None],
    *,
    base_model: str,
    spec: LoraSpec,
    target_modules: Iterable[str],
    steps: int,
    dtype: str | None = None,
    kernels: str | None = None,
) -> int:
    """Write a checkpoint and return its size in bytes; `fill` writes the tensors.

    Replaces an older checkpoint at `directory`.
    """
    with whole(directory) as scratch:
        with _no_room(scratch):
            fill(scratch)
        config = _peft_config(spec, base_model, target_modules)
        (scratch / CONFIG).write_text(json.dumps(config, indent=2))
        manifest = {
            "format": 1,
            "base_model": base_model,
            "lora": asdict(spec),
            "steps": steps,
            **({} if dtype is None else {"dtype": dtype}),
            **({} if kernels is None else {"kernels": kernels}),
            "sha256": {file.name: _digest(file) for file in sorted(scratch.iterdir())},
        }
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        return stored_bytes(scratch)


def stored_bytes(directory: Path) -> int:
    """The size of a checkpoint's files."""
    return sum(file.stat().st_size for file in directory.iterdir())


class SourceGoneError(Exception):
    """The checkpoint that is being copied was deleted or replaced meanwhile."""


def copy(source: Path, target: Path) -> None:
    """Copy a checkpoint. Checksums are not verified here: damage is found when the copy is read."""
    _copy_files(source, target, shutil.copy2)


def link(source: Path, target: Path) -> None:
    """Copy a checkpoint with hard links where possible: files of a checkpoint never change."""
    _copy_files(source, target, _link_or_copy)


def _copy_files(source: Path, target: Path, put_file: Callable[[Path, Path], object]) -> None:
    """Copy a checkpoint, which has no directories inside; raises `SourceGoneError` unless all files are of one version."""
    with whole(target) as scratch:
        try:
            version = _version(source)
            for file in source.iterdir():
                put_file(file, scratch / file.name)
            if _version(source) == version:
                return
        except FileNotFoundError as error:
            if Path(str(error.filename)).is_relative_to(scratch):
                raise
        raise SourceGoneError


def _version(directory: Path) -> tuple[int, int]:
    # The inode number alone is not enough: file systems reuse the numbers of deleted directories.
    facts = directory.stat()
    return facts.st_ino, facts.st_mtime_ns


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def whole(directory: Path) -> Iterator[Path]:
    """Yield a scratch directory; afterwards flush it and rename it to `directory`, or delete it on an error."""
    make_directory(directory.parent)
    # Does not contain the directory's name, which may already have the maximum length.
    scratch = directory.with_name(f".{secrets.token_hex(8)}")
    scratch.mkdir()
    try:
        yield scratch
        for file in scratch.iterdir():
            flush(file)
        flush(scratch)
        put(scratch, directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


@contextmanager
def _no_room(place: Path) -> Iterator[None]:
    """Turn safetensors' errors from the operating system, such as a full disk, into OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), place.name) from error
        raise


@dataclass(frozen=True)
class Manifest:
    """Content of `tinkex.json`; the defaults if there is no such file."""

    spec: LoraSpec | None = None
    steps: int = 0
    dtype: str | None = None
    kernels: str | None = None


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value.isalnum() and len(value) < 20 else None


def checked_manifest(directory: Path) -> Manifest:
    """Verify the checksum of every file and return the manifest.

    The manifest of an imported checkpoint is untrusted: its names and values are checked before use.
    """
    if not directory.is_dir():
        raise InvalidInputError("there is no such checkpoint", field="path")
    if not (directory / _MANIFEST).exists():
        return Manifest()
    with reading(_MANIFEST):
        content = read_json(directory / _MANIFEST)
        spec, steps = checked_spec(LoraSpec(**content["lora"])), _count(content["steps"])
        manifest = Manifest(spec, steps, _word(content.get("dtype")), _word(content.get("kernels")))
        digests = dict(content["sha256"])
    for name, expected in digests.items():
        if not is_plain_name(name):
            raise InvalidInputError(
                f"{_MANIFEST} names {name!r:.100}, which is not a file of the checkpoint",
                field="path",
            )
        file = directory / name
        if not file.is_file() or _digest(file) != expected:
            raise InvalidInputError(f"the file {name} is damaged", field="path")
    return manifest


def content_name(directory: Path) -> str:
    """A name made of an adapter's content: its weights, its configuration and its manifest."""
    names = [name for name in (WEIGHTS, CONFIG, _MANIFEST) if (directory / name).exists()]
    with reading(WEIGHTS):
        digests = {name: _digest(directory / name) for name in names}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def read_json(file: Path) -> Any:
    """Read a JSON file of a checkpoint."""
    return json.loads(read_regular(file, JSON_LIMIT))


def checked_spec(spec: LoraSpec) -> LoraSpec:
    """Return the spec if its values have the right types and are within bounds; raise otherwise."""
    flags = (spec.train_attn, spec.train_mlp, spec.train_unembed)
    if not (
        type(spec.rank) is int
        and spec.rank > 0
        and (spec.seed is None or type(spec.seed) is int)
        and all(type(flag) is bool for flag in flags)
        and isinstance(spec.alpha, int | float)
        and math.isfinite(spec.alpha)
    ):
        raise ValueError("not a valid adapter spec")
    if spec.rank > MAX_RANK:
        raise InvalidInputError(
            f"the adapter has rank {spec.rank}, the highest possible is {MAX_RANK}", field="path"
        )
    return spec


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError("not a number of steps")
    return value


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn every error from reading a bad file into one that gives its name, but not its path on the server."""
    from safetensors import SafetensorError

    try:
        yield
    except TinkerError:
        raise
    except (
        OSError,
        ValueError,  # also of JSON
        OverflowError,  # JSON has infinite numbers
        KeyError,
        TypeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise InvalidInputError(
            f"the file {name} is missing, damaged or of another kind", field="path"
        ) from error


def _peft_config(spec: LoraSpec, base_model: str, target_modules: Iterable[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(set(target_modules)),
        "inference_mode": True,
    }


def put(scratch: Path, directory: Path) -> None:
    """Move a finished directory to its final place; replaces an older one."""
    with placed(scratch, directory):
        pass


@contextmanager
def placed(scratch: Path, directory: Path) -> Iterator[None]:
    """Move a finished directory to its final place; undo that if the body of the `with` raises."""
    older = None
    if not directory.exists():
        scratch.replace(directory)
    elif exchange(scratch, directory):
        older = scratch
    else:
        older = directory.with_name(f".{secrets.token_hex(8)}")
        directory.replace(older)
        try:
            scratch.replace(directory)
        except BaseException:
            older.replace(directory)
            raise
    try:
        # Flushed before the older one is deleted, so that one of the two is on disk.
        flush(directory.parent)
        yield
    except BaseException:
        if older is None:
            directory.replace(scratch)
        elif not (older is scratch and exchange(scratch, directory)):
            directory.replace(scratch)
            older.replace(directory)
        raise
    if older is not None:
        shutil.rmtree(older, ignore_errors=True)


def _digest(file: Path) -> str:
    check_regular(file)
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
