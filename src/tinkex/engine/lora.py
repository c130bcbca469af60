"""Low-rank adapters on a shared base model.

All adapters share one base model in memory. Its linear layers are wrapped once; a wrapped layer adds `scale · B A x`
of the adapter that is switched on, and costs nothing when none is. Names and shapes of the tensors are PEFT's, so PEFT
loads a saved adapter unchanged.

Adapters are float32 for every base model, because bfloat16 would round away a step of 1e-5 on a weight of 0.05. They
are rounded to the type of the activations at each use, which costs nothing if that is float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tinkex.errors import InvalidInputError

from .values import LoraSpec

__all__ = ["Adapter", "LoraLinear", "adaptable_layers", "wrap"]

_MLP: Final = frozenset(
    {
        "gate_proj",
        "up_proj",
        "down_proj",
        "fc1",
        "fc2",
        "gate_up_proj",
        "c_fc",
        "dense_h_to_4h",
        "dense_4h_to_h",
    }
)
_SEEDS: Final = 2**64  # torch accepts this many seeds; others wrap around


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of one layer's update, in float32: A is rank × in, B is out × rank."""

    a: nn.Parameter
    b: nn.Parameter


class LoraLinear(nn.Module):
    """A frozen linear layer and the pair that is switched on, if any.

    The layer is torch's `Linear`, or GPT-2's `Conv1D`: a linear layer with a transposed weight.
    """

    def __init__(self, base: Any, *, unembeds: bool = False) -> None:
        super().__init__()
        self.base = base
        self.unembeds = unembeds
        self.pair: Pair | None = None
        self.scale = 0.0

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.base.bias
        return bias

    @property
    def in_features(self) -> int:
        return int(self.base.weight.shape[1 if isinstance(self.base, nn.Linear) else 0])

    @property
    def out_features(self) -> int:
        return int(self.base.weight.shape[0 if isinstance(self.base, nn.Linear) else 1])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if self.pair is None:
            return y
        a, b = self.pair.a.to(x.dtype), self.pair.b.to(x.dtype)
        update = functional.linear(functional.linear(x, a), b)
        return torch.add(y, update, alpha=self.scale)


def wrap(model: Any) -> dict[str, LoraLinear]:
    """Wrap every linear layer of the model in place; return the wrapped layers by name."""
    found = {
        name: module
        for name, module in model.named_modules()
        # GPT-2's layer by name: importing transformers for its class takes seconds.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    unembedding = model.get_output_embeddings()
    wrapped = {}
    for name, module in found.items():
        parent_name, _, attribute = name.rpartition(".")
        layer = LoraLinear(module, unembeds=module is unembedding)
        setattr(model.get_submodule(parent_name), attribute, layer)
        wrapped[name] = layer
    return wrapped


def adaptable_layers(layers: Mapping[str, LoraLinear], spec: LoraSpec) -> list[str]:
    """Names of the layers that an adapter with this spec trains."""
    parts = {name: _part(name, layer) for name, layer in layers.items()}
    asked = [part for part in ("train_attn", "train_mlp", "train_unembed") if getattr(spec, part)]
    if not asked:
        raise InvalidInputError("leaves no layer of this model to train", field="lora_config")
    for part in asked:
        if part not in parts.values():
            raise InvalidInputError(
                "this model has no such layers that an adapter could train; set it to False",
                field=f"lora_config.{part}",
            )
    return [name for name, part in parts.items() if part in asked]


def _part(name: str, layer: LoraLinear) -> str:
    """The field of `LoraSpec` that decides whether a layer is trained."""
    if layer.unembeds:
        return "train_unembed"
    is_mlp = name.rpartition(".")[2] in _MLP or ".mlp." in f".{name}"
    return "train_mlp" if is_mlp else "train_attn"


class Adapter:
    """The trainable tensors of one model, by the name of the layer they belong to."""

    def __init__(self, spec: LoraSpec, pairs: Mapping[str, Pair]) -> None:
        self.spec = spec
        self.pairs = dict(pairs)

    @classmethod
    def fresh(cls, layers: Mapping[str, LoraLinear], spec: LoraSpec, device: Any) -> Adapter:
        """Create an adapter: A is drawn as in PEFT, B is zero, so the model's output does not change yet."""
        generator = torch.Generator().manual_seed(0 if spec.seed is None else spec.seed % _SEEDS)
        pairs = {}
        for name in adaptable_layers(layers, spec):
            layer = layers[name]
            bound = 1 / math.sqrt(layer.in_features)  # kaiming uniform with a = √5
            a = torch.empty(spec.rank, layer.in_features).uniform_(
                -bound, bound, generator=generator
            )
            b = torch.zeros(layer.out_features, spec.rank)
            pairs[name] = _parameters(a, b, device)
        return cls(spec, pairs)

    @classmethod
    def of_tensors(
        cls, spec: LoraSpec, tensors: Mapping[str, tuple[Tensor, Tensor]], device: Any
    ) -> Adapter:
        return cls(spec, {name: _parameters(a, b, device) for name, (a, b) in tensors.items()})

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    def parameters(self) -> Iterator[nn.Parameter]:
        for pair in self.pairs.values():
            yield pair.a
            yield pair.b

    @cached_property
    def is_finite(self) -> bool:
        """Whether all weights are finite; cached, so use it only for an adapter that does not change."""
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters())

    @cached_property
    def digest(self) -> bytes:
        """Identifies the weights; cached, so use it only for an adapter that does not change."""
        found = hashlib.sha256(repr((self.spec.alpha, self.spec.rank)).encode())
        for name, pair in self.pairs.items():
            found.update(name.encode())
            for tensor in (pair.a, pair.b):
                found.update(tensor.detach().cpu().contiguous().numpy().data)
        return found.digest()

    def named_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (pair.a.detach(), pair.b.detach()) for name, pair in self.pairs.items()}

    def frozen_copy(self) -> Adapter:
        """A copy of the current weights without gradients."""
        copies = {
            name: Pair(
                nn.Parameter(pair.a.detach().clone(), requires_grad=False),
                nn.Parameter(pair.b.detach().clone(), requires_grad=False),
            )
            for name, pair in self.pairs.items()
        }
        return Adapter(self.spec, copies)

    @contextmanager
    def switched_on(self, layers: Mapping[str, LoraLinear]) -> Iterator[None]:
        """Apply this adapter to the base model inside the `with` block."""
        for name, pair in self.pairs.items():
            layers[name].pair, layers[name].scale = pair, self.scale
        try:
            yield
        finally:
            for name in self.pairs:
                layers[name].pair = None


def _parameters(a: Tensor, b: Tensor, device: Any) -> Pair:
    # Always copied. Loaded tensors are views of the mapped file: a change of the file would change them, and their
    # alignment differs from that of new tensors, which can change the last bit of a product.
    copies = [
        torch.empty(each.shape, dtype=torch.float32, device=device).copy_(each) for each in (a, b)
    ]
    return Pair(nn.Parameter(copies[0]), nn.Parameter(copies[1]))
