"""Directories of checkpoints: each appears whole or not at all, and holds a checksum of every file in it.

Names, JSON and checksums only: what is in the tensors is for the engine that wrote them. `adapter_config.json` is
PEFT's; `tinkex.json` holds what PEFT has no place for.
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
    "checked_manifest",
    "checked_spec",
    "copy",
    "link",
    "placed",
    "put",
    "read_json",
    "reading",
    "write",
]

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
OPTIMIZER: Final = "optimizer.safetensors"
#: In snapshots only: what has accumulated for the next step.
GRADIENTS: Final = "gradients.safetensors"
_MANIFEST: Final = "tinkex.json"
#: Limit of the JSON files of a checkpoint; an adapter's configuration takes a few kilobytes.
JSON_LIMIT: Final = 4 << 20


def write(
    directory: Path,
    fill: Callable[[Path], None],
    *,
    base_model: str,
    spec: LoraSpec,
    target_modules: Iterable[str],
    steps: int,
) -> int:
    """Let `fill` write the tensors of a checkpoint and add the rest; how many bytes it takes.

    What was at `directory` before is replaced.
    """
    with _whole(directory) as scratch:
        with _no_room(scratch):
            fill(scratch)
        config = _peft_config(spec, base_model, target_modules)
        (scratch / CONFIG).write_text(json.dumps(config, indent=2))
        manifest = {
            "format": 1,
            "base_model": base_model,
            "lora": asdict(spec),
            "steps": steps,
            "sha256": {file.name: _digest(file) for file in sorted(scratch.iterdir())},
        }
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        return sum(file.stat().st_size for file in scratch.iterdir())


def copy(source: Path, target: Path) -> None:
    """The same checkpoint once more; damaged files stay what they are, and are found when they are read."""
    with _whole(target) as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True)


def link(source: Path, target: Path) -> None:
    """A second name for the files of a checkpoint, which are never written to again; a copy where that cannot be."""
    with _whole(target) as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A directory to fill, which then takes its place; on the disk with everything in it, or not there at all."""
    make_directory(directory.parent)
    # Without the directory's name, which may be as long as names get.
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
    """What a writer of tensors says of a disk in words of its own, as the operating system says it."""
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
    """What `tinkex.json` says; nothing if there is none."""

    spec: LoraSpec | None = None
    steps: int = 0


def checked_manifest(directory: Path) -> Manifest:
    """The manifest, once every file is as it was written.

    The manifest of an imported checkpoint was written by somebody else: its names and values are checked before use.
    """
    if not directory.is_dir():
        raise InvalidInputError("there is no such checkpoint", field="path")
    if not (directory / _MANIFEST).exists():
        return Manifest()
    with reading(_MANIFEST):
        content = read_json(directory / _MANIFEST)
        manifest = Manifest(checked_spec(LoraSpec(**content["lora"])), _count(content["steps"]))
        digests = dict(content["sha256"])
    for name, expected in digests.items():
        if not is_plain_name(name):
            raise InvalidInputError(
                f"{_MANIFEST} names {name!r:.100}, which is no file of the checkpoint", field="path"
            )
        file = directory / name
        if not file.is_file() or _digest(file) != expected:
            raise InvalidInputError(f"the file {name} is damaged", field="path")
    return manifest


def read_json(file: Path) -> Any:
    """The content of a JSON file of a checkpoint."""
    return json.loads(read_regular(file, JSON_LIMIT))


def checked_spec(spec: LoraSpec) -> LoraSpec:
    """The facts of an adapter, if they are of the right types and within bounds."""
    flags = (spec.train_attn, spec.train_mlp, spec.train_unembed)
    if not (
        type(spec.rank) is int
        and spec.rank > 0
        and (spec.seed is None or type(spec.seed) is int)
        and all(type(flag) is bool for flag in flags)
        and isinstance(spec.alpha, int | float)
        and math.isfinite(spec.alpha)
    ):
        raise ValueError("not the facts of an adapter")
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
    """Whatever shows that a file is not what it should be: said with its name, without where it lies."""
    from safetensors import SafetensorError

    try:
        yield
    except TinkerError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
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
    """Put a finished directory in its place, instead of an older one if there is one."""
    with placed(scratch, directory):
        pass


@contextmanager
def placed(scratch: Path, directory: Path) -> Iterator[None]:
    """Have a finished directory in its place; if what is done then fails, the older one comes back, or none."""
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
        flush(directory.parent)  # before the older one goes, so that one of the two is on the disk
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
