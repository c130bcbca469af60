"""Checkpoints on disk: an adapter in PEFT's format and, optionally, the optimizer state.

`directories` holds the parts that the checkpoints of both engines share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkex.errors import InvalidInputError

from . import directories
from .directories import CONFIG, GRADIENTS, OPTIMIZER, WEIGHTS
from .files import check_regular
from .lora import Adapter
from .optim import AdamW
from .values import LoraSpec

__all__ = ["LoadedCheckpoint", "load", "save"]

_PREFIX: Final = "base_model.model."
#: PEFT settings that can change what an adapter computes, with the values that do not. Unset values are fine too.
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (),
    "rank_pattern": (),
    "alpha_pattern": (),
    "use_dora": (),
    "use_qalora": (),
    "use_bdlora": (),
    "layer_replication": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    # The other initializations also change the base model's weights, which this service does not do.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint."""

    spec: LoraSpec
    tensors: dict[str, tuple[Tensor, Tensor]]
    steps: int = 0
    moments: dict[str, Tensor] | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    dtype: str | None = None  # of the matrix products in training, if known
    kernels: str | None = None  # which kernels computed between the products, if known

    def restore_gradients(self, optimizer: AdamW, names: list[str]) -> None:
        """Set the parameters' gradients to those of the snapshot, for the next optimizer step."""
        for key, parameter in zip(_parameter_keys(names), optimizer.parameters, strict=True):
            saved = self.gradients.get(key)
            if saved is not None:
                if saved.shape != parameter.shape:
                    raise InvalidInputError(
                        f"the file {GRADIENTS} does not fit the adapter: {key} is of another shape",
                        field="path",
                    )
                # Copied, because loaded tensors are views of the mapped file.
                parameter.grad = saved.to(parameter.device, copy=True)

    def restore(self, optimizer: AdamW, names: list[str]) -> None:
        """Copy the saved moments into an optimizer whose parameters belong to the layers `names`."""
        if self.moments is None:
            raise InvalidInputError("the checkpoint holds no optimizer state", field="optimizer")
        optimizer.steps = self.steps
        for kind, moments in (("first", optimizer.first), ("second", optimizer.second)):
            for key, moment in zip(_parameter_keys(names), moments, strict=True):
                saved = self.moments.get(f"{kind}.{key}")
                if saved is None or saved.shape != moment.shape:
                    raise InvalidInputError(
                        f"the file {OPTIMIZER} does not fit the adapter: {kind}.{key} is missing "
                        "or of another shape",
                        field="path",
                    )
                moment.copy_(saved)


def save(
    directory: Path,
    adapter: Adapter,
    base_model: str,
    optimizer: AdamW | None = None,
    gradients: Sequence[Tensor | None] = (),
    dtype: str | None = None,
    kernels: str | None = None,
) -> int:
    """Write a checkpoint and return its size in bytes; replaces an older one at `directory`."""
    return directories.write(
        directory,
        lambda target: _write(target, adapter, optimizer, gradients),
        base_model=base_model,
        spec=adapter.spec,
        target_modules=[name.rpartition(".")[2] for name in adapter.pairs],
        steps=0 if optimizer is None else optimizer.steps,
        dtype=dtype,
        kernels=kernels,
    )


def _write(
    target: Path,
    adapter: Adapter,
    optimizer: AdamW | None,
    gradients: Sequence[Tensor | None],
) -> None:
    tensors = {}
    for name, (a, b) in adapter.named_tensors().items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    if optimizer is not None:
        keys = _parameter_keys(list(adapter.pairs))
        moments = {
            f"first.{key}": tensor for key, tensor in zip(keys, optimizer.first, strict=True)
        }
        moments |= {
            f"second.{key}": tensor for key, tensor in zip(keys, optimizer.second, strict=True)
        }
        save_file(moments, target / OPTIMIZER)
    keys = _parameter_keys(list(adapter.pairs))
    accumulated = {
        key: tensor.contiguous()
        for key, tensor in zip(keys, gradients, strict=False)
        if tensor is not None
    }
    if accumulated:
        save_file(accumulated, target / GRADIENTS)


def _parameter_keys(names: list[str]) -> list[str]:
    """Names of an adapter's parameters, in the optimizer's order."""
    return [f"{name}.{factor}" for name in names for factor in ("a", "b")]


def load(
    directory: Path,
    *,
    optimizer: bool = False,
    gradients: bool = False,
    largest: Callable[[int], int] | None = None,
) -> LoadedCheckpoint:
    """Read a checkpoint of this service or a PEFT adapter; the error names a damaged or unknown file.

    `largest` returns the maximum size in bytes of an adapter with a given rank on the base model; a larger file is
    refused before it is read into memory.
    """
    manifest = directories.checked_manifest(directory)
    spec = manifest.spec
    if spec is None:
        with directories.reading(CONFIG):
            spec = _spec_of(directories.read_json(directory / CONFIG))
    limit = None if largest is None else largest(spec.rank)
    with directories.reading(WEIGHTS):
        check_regular(directory / WEIGHTS, limit)
        pairs = _pairs(load_file(directory / WEIGHTS))
    if manifest.spec is None:
        spec = replace(
            spec,
            train_unembed=any(name.endswith("lm_head") for name in pairs),
            train_mlp=any(".mlp." in name for name in pairs),
            train_attn=any("attn" in name for name in pairs),
        )
    for name, (a, _) in pairs.items():
        if not 0 < len(a) == spec.rank:
            raise InvalidInputError(f"{name} has rank {len(a)}, not {spec.rank}", field="path")
    moments = None
    if optimizer and (directory / OPTIMIZER).exists():
        with directories.reading(OPTIMIZER):
            # Two moments per parameter.
            check_regular(directory / OPTIMIZER, None if limit is None else 2 * limit)
            moments = load_file(directory / OPTIMIZER)
    accumulated = {}
    if gradients and (directory / GRADIENTS).exists():
        with directories.reading(GRADIENTS):
            check_regular(directory / GRADIENTS, limit)
            accumulated = load_file(directory / GRADIENTS)
    return LoadedCheckpoint(
        spec, pairs, manifest.steps, moments, accumulated, manifest.dtype, manifest.kernels
    )


def _spec_of(config: dict[str, Any]) -> LoraSpec:
    """Read rank and alpha from PEFT's configuration; refuse settings that change the meaning of the tensors."""
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    for name, plain in _PLAIN.items():
        value = config.get(name)
        if value and value not in plain:
            raise InvalidInputError(
                f"is an adapter with {name}={value!r:.100}, which this service does not support",
                field="path",
            )
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)  # rsLoRA scales by alpha / √rank, this service by alpha / rank
    return directories.checked_spec(LoraSpec(rank, alpha=alpha))


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
            if other is None or tensor.ndim != 2 or other.shape[1:] != tensor.shape[:1]:
                raise InvalidInputError(f"{name} has no matching B", field="path")
            pairs[layer] = (tensor.to(torch.float32), other.to(torch.float32))
    if not pairs:
        raise InvalidInputError("holds no LoRA factor", field="path")
    return pairs
