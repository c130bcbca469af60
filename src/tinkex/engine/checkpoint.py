"""Checkpoints on disk: an adapter in PEFT's own format, and beside it the optimizer where it is wanted.

A checkpoint is a directory that appears whole or not at all. `tinkex.json` holds what PEFT has no place for and a
checksum of every file; a file that does not match is named and never loaded.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkex.errors import InvalidInputError

from .files import flush
from .lora import Adapter
from .optim import AdamW
from .values import LoraSpec

__all__ = ["Saved", "load", "save"]

_PREFIX: Final = "base_model.model."
_WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"
_OPTIMIZER: Final = "optimizer.safetensors"
_MANIFEST: Final = "tinkex.json"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    spec: LoraSpec
    base_model: str | None
    tensors: dict[str, tuple[Tensor, Tensor]]
    steps: int = 0
    moments: dict[str, Tensor] | None = None

    def restore(self, optimizer: AdamW, names: list[str]) -> None:
        """Put the saved moments into an optimizer whose parameters belong to layers `names`."""
        if self.moments is None:
            raise InvalidInputError("the checkpoint holds no optimizer state", field="optimizer")
        optimizer.steps = self.steps
        for index, key in enumerate(_parameter_keys(names)):
            for moments, kind in ((optimizer.first, "first"), (optimizer.second, "second")):
                moments[index].copy_(self.moments[f"{kind}.{key}"])


def save(directory: Path, adapter: Adapter, base_model: str, optimizer: AdamW | None = None) -> int:
    """Write a checkpoint; how many bytes it takes. What was at `directory` before is replaced."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        _write(scratch, adapter, base_model, optimizer)
        size = sum(file.stat().st_size for file in scratch.iterdir())
        _replace(scratch, directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return size


def _write(target: Path, adapter: Adapter, base_model: str, optimizer: AdamW | None) -> None:
    tensors = {}
    for name, (a, b) in adapter.named_tensors().items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, target / _WEIGHTS, metadata={"format": "pt"})
    (target / _CONFIG).write_text(json.dumps(_peft_config(adapter, base_model), indent=2))
    if optimizer is not None:
        keys = _parameter_keys(list(adapter.pairs))
        moments = {
            f"first.{key}": tensor for key, tensor in zip(keys, optimizer.first, strict=True)
        }
        moments |= {
            f"second.{key}": tensor for key, tensor in zip(keys, optimizer.second, strict=True)
        }
        save_file(moments, target / _OPTIMIZER)
    manifest = {
        "format": 1,
        "base_model": base_model,
        "lora": asdict(adapter.spec),
        "steps": 0 if optimizer is None else optimizer.steps,
        "sha256": {file.name: _digest(file) for file in sorted(target.iterdir())},
    }
    (target / _MANIFEST).write_text(json.dumps(manifest, indent=2))
    for file in target.iterdir():
        flush(file)
    flush(target)


def _peft_config(adapter: Adapter, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": adapter.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.pairs}),
        "inference_mode": True,
    }


def _parameter_keys(names: list[str]) -> list[str]:
    """Names of an adapter's parameters in the order in which the optimizer holds them."""
    return [f"{name}.{factor}" for name in names for factor in ("a", "b")]


def _replace(scratch: Path, directory: Path) -> None:
    """Put a finished directory in its place; an older one leaves first, and comes back if that fails."""
    if not directory.exists():
        scratch.replace(directory)
        return
    older = directory.with_name(f".{directory.name}.old.{secrets.token_hex(4)}")
    directory.replace(older)
    try:
        scratch.replace(directory)
    except BaseException:
        older.replace(directory)
        raise
    shutil.rmtree(older, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def load(directory: Path, *, optimizer: bool = False) -> Saved:
    """Read a checkpoint, ours or a PEFT adapter; what is torn or foreign is refused by name."""
    if not directory.is_dir():
        raise InvalidInputError("there is no such checkpoint", field="path")
    manifest = _manifest(directory)
    for name, expected in manifest.get("sha256", {}).items():
        file = directory / name
        if not file.is_file() or _digest(file) != expected:
            raise InvalidInputError(f"the file {name} is damaged", field="path")
    try:
        config = json.loads((directory / _CONFIG).read_text())
        tensors = load_file(directory / _WEIGHTS)
        spec = LoraSpec(**manifest["lora"]) if "lora" in manifest else _spec_of(config, tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"is not an adapter: {error}", field="path") from error
    moments = None
    if optimizer and (directory / _OPTIMIZER).exists():
        moments = load_file(directory / _OPTIMIZER)
    return Saved(
        spec,
        manifest.get("base_model") or config.get("base_model_name_or_path"),
        _pairs(tensors),
        manifest.get("steps", 0),
        moments,
    )


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((directory / _MANIFEST).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidInputError(f"the file {_MANIFEST} is damaged", field="path") from error
    return manifest


def _spec_of(config: dict[str, Any], tensors: dict[str, Tensor]) -> LoraSpec:
    leaves = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}
    return LoraSpec(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        train_unembed=any(name.endswith("lm_head") for name in leaves),
        train_mlp=any(".mlp." in name for name in leaves),
        train_attn=any("attn" in name for name in leaves),
    )


def _pairs(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = {}
    for name, tensor in tensors.items():
        layer, found, factor = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not found or factor not in {"A.weight", "B.weight"}:
            raise InvalidInputError(
                f"holds a tensor that is not a LoRA factor: {name}", field="path"
            )
        if factor == "A.weight":
            other = tensors.get(name.replace(".lora_A.", ".lora_B."))
            if other is None or other.shape[1] != tensor.shape[0]:
                raise InvalidInputError(f"{name} has no matching B", field="path")
            pairs[layer] = (tensor.to(torch.float32), other.to(torch.float32))
    return pairs
