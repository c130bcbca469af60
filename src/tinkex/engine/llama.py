"""Models of the Llama family: fused projections and layers, used by training, prefill and decoding.

Projections that read the same input run as one matrix product, and so do their adapters. Otherwise, on a CPU, the
small products of the seven adapters of a layer take half as long as the model itself.

Shapes: B sequences, T positions, N rows (all positions of all sequences), D hidden, H query heads, G key-value
heads, E head size, R rank of all adapters of a projection together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from .kernels import TorchKernels, rms_norm
from .lora import Adapter, LoraLinear
from .native.attention import HeadShape
from .products import AdaptedRows, Factors, TorchProducts
from .shared_weights import Join

__all__ = [
    "HeadNorm",
    "LlamaBody",
    "LlamaLayer",
    "Projection",
    "Rows",
    "is_llama",
    "rotate",
]

#: Batches whose factors a projection remembers.
_BATCHES: Final = 4
_FAMILY: Final = frozenset({"llama", "qwen2", "qwen3", "mistral"})


def is_llama(config: Any) -> bool:
    return (
        config.model_type in _FAMILY
        and config.hidden_act in {"silu", "swish"}
        and not getattr(config, "sliding_window", None)
    )


@dataclass(frozen=True)
class Rows:
    """Adjacent rows of a batch that use one adapter; no adapter means the base model."""

    adapter: Adapter | None
    rows: slice = field(default_factory=lambda: slice(None))


class Projection:
    """Linear layers that read the same input, fused into one."""

    def __init__(
        self,
        layers: Mapping[str, LoraLinear],
        products: TorchProducts,
        dtype: torch.dtype,
        join: Join,
    ) -> None:
        self.products = products
        #: The type of inputs and outputs; the weight may be stored in a shorter one.
        self.dtype = dtype
        self.names = list(layers)
        parts = list(layers.values())
        self.sizes = [part.out_features for part in parts]
        self.weight = join([part.weight.data for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat([bias.data for bias in biases]) if biases else None
        # The layers become views of the fused weight, so that memory holds the weights only once.
        for part, weight in zip(parts, torch.split(self.weight, self.sizes), strict=True):
            part.base.weight.data = weight
        # By id of the adapter. Keeping the adapter in the value prevents reuse of its id.
        self._frozen: dict[int, tuple[Adapter, Factors | None]] = {}
        self._batches: deque[tuple[tuple[Rows, ...], AdaptedRows]] = deque(maxlen=_BATCHES)

    def infer(self, x_ND: Tensor, groups: tuple[Rows, ...]) -> Tensor:
        """Compute the output for rows that may use different adapters."""
        rows = self._adapted_rows(groups)
        x_ND = x_ND.to(self.dtype)
        if not rows.groups:
            return self.products.linear(x_ND, self.weight, self.bias)
        return self.products.adapted(x_ND, self.weight, self.bias, rows)

    def _adapted_rows(self, groups: tuple[Rows, ...]) -> AdaptedRows:
        """The factors of the groups; a batch mostly has the groups of the one before."""
        for known, rows in self._batches:
            if known == groups:
                return rows
        found = AdaptedRows(
            [
                (group.rows, factors)
                for group in groups
                if group.adapter is not None
                and (factors := self._frozen_factors(group.adapter)) is not None
            ]
        )
        self._batches.appendleft((groups, found))
        return found

    def _frozen_factors(self, adapter: Adapter) -> Factors | None:
        """Fused factors of a sampler's adapter; cached, because the adapter never changes."""
        if id(adapter) not in self._frozen:
            self._frozen[id(adapter)] = adapter, self.factors(adapter)
        return self._frozen[id(adapter)][1]

    def factors(self, adapter: Adapter) -> Factors | None:
        """The factors of an adapter, fused; None if it leaves this projection as it is."""
        pairs = [adapter.pairs.get(name) for name in self.names]
        tensors = [None if pair is None else (pair.a.detach(), pair.b.detach()) for pair in pairs]
        return fuse(tensors, self.sizes, adapter.scale, self.dtype) if any(pairs) else None

    def forget(self, adapter: Adapter) -> None:
        self._frozen.pop(id(adapter), None)
        self._batches.clear()


def fuse(
    pairs: Sequence[tuple[Tensor, Tensor] | None],
    sizes: Sequence[int],
    scale: float,
    dtype: torch.dtype,
) -> Factors:
    """Fuse several pairs into one: A stacked, B block-diagonal and scaled, each rounded once to `dtype`.

    The number of columns is even: native products read pairs of numbers.
    """
    present = [pair for pair in pairs if pair is not None]
    ranks = sum(len(pair[0]) for pair in present)
    columns = ranks + ranks % 2
    a = present[0][0].new_zeros(columns, present[0][0].shape[1], dtype=dtype)
    b = a.new_zeros(sum(sizes), columns)
    spans = []
    for rows, part, pair in blocks_of(pairs, sizes):
        a[part] = pair[0]
        b[rows, part] = pair[1] * scale
        spans.append((rows.stop, part.start, part.stop))
    return Factors(a, b, tuple(spans))


def blocks_of(pairs: Sequence[Any], sizes: Sequence[int]) -> list[tuple[slice, slice, Any]]:
    """Rows and columns of each pair's B in the fused B."""
    found, row, column = [], 0, 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            rank = pair[0].shape[0]
            found.append((slice(row, row + size), slice(column, column + rank), pair))
            column += rank
        row += size
    return found


@dataclass(frozen=True)
class HeadNorm:
    """A norm over each head, which some families apply before the rotation."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> HeadNorm | None:
        return None if module is None else cls(*_norm_of(module))

    def __call__(self, heads: Tensor) -> Tensor:
        return rms_norm(heads.float(), self.weight, self.eps)


class LlamaLayer:
    """One layer: projections, norms and attention heads."""

    def __init__(
        self,
        name: str,
        module: Any,
        config: Any,
        products: TorchProducts,
        dtype: torch.dtype,
        join: Join,
    ) -> None:
        def projection(block: str, *parts: str) -> Projection:
            layers = {
                f"{name}.{block}.{part}": getattr(getattr(module, block), part) for part in parts
            }
            return Projection(layers, products, dtype, join)

        attention = module.self_attn
        #: The type of the inputs and outputs of the products.
        self.dtype = dtype
        self.qkv = projection("self_attn", "q_proj", "k_proj", "v_proj")
        self.out = projection("self_attn", "o_proj")
        self.gate_up = projection("mlp", "gate_proj", "up_proj")
        self.down = projection("mlp", "down_proj")
        self.before = _norm_of(module.input_layernorm)
        self.after = _norm_of(module.post_attention_layernorm)
        self.q_norm = HeadNorm.of(getattr(attention, "q_norm", None))
        self.k_norm = HeadNorm.of(getattr(attention, "k_norm", None))
        self.heads: int = config.num_attention_heads
        self.groups: int = config.num_key_value_heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.shape = HeadShape(self.heads, self.groups, self.size)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class LlamaBody:
    """The layers of a Llama model, its embedding and its last norm. `join` puts the weights into memory."""

    def __init__(self, model: Any, kernels: TorchKernels, join: Join) -> None:
        self.kernels = kernels
        self.module: Any = getattr(model, model.base_model_prefix)
        self.dtype: torch.dtype = model.dtype
        prefix, products = model.base_model_prefix, kernels.products
        self.layers = [
            LlamaLayer(f"{prefix}.layers.{index}", layer, model.config, products, self.dtype, join)
            for index, layer in enumerate(self.module.layers)
        ]
        first = self.layers[0]
        served = first.shape.is_served and first.q_norm is None
        #: Attention in C, used by training and sampling, or None if torch computes it.
        self.attention = kernels.attention if served else None
        self.norm = _norm_of(self.module.norm)
        # The angles of these kinds depend on the longest position of a call.
        kind = getattr(self.module.rotary_emb, "rope_type", "default")
        self._angles_change = kind in {"dynamic", "longrope"}
        self._rotations = self.norm[0].new_empty(0), self.norm[0].new_empty(0)
        self._leave_the_file(model, join)

    def _leave_the_file(self, model: Any, join: Join) -> None:
        """Copy the weights that are not fused: then nothing keeps the mapped file, and memory holds one copy."""
        fused = {
            projection.weight.untyped_storage().data_ptr()
            for layer in self.layers
            for projection in layer.projections
        }
        for parameter in model.parameters():
            if parameter.data.untyped_storage().data_ptr() not in fused:
                parameter.data = join([parameter.data])

    def rotations(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of some positions, each N × E in float32; looked up, because a step of sampling needs few."""
        if self._angles_change:
            cos, sin = self.module.rotary_emb(self.norm[0], positions_N[None])
            return cos[0], sin[0]
        needed = int(positions_N.max()) + 1
        if needed > len(self._rotations[0]):
            self._rotations = self.rotation_table(1 << (needed - 1).bit_length())
        cos, sin = self._rotations
        return cos[positions_N], sin[positions_N]

    def rotation_table(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, each T × E in float32."""
        device = self.norm[0].device
        positions = torch.arange(length, device=device)[None]
        tables: tuple[Tensor, Tensor] = self.module.rotary_emb(
            torch.empty(0, device=device), positions
        )
        return tables[0][0], tables[1][0]

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream of new rows, in float32."""
        embedded: Tensor = self.module.embed_tokens(tokens)
        return embedded.float()


def _norm_of(module: Any) -> tuple[Tensor, float]:
    """Weight and epsilon of a norm; the weight in float32."""
    return module.weight.data.float().clone(), module.variance_epsilon


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by the angles of their positions; contiguous, in float32."""
    half, x = x.shape[-1] // 2, x.float()
    turned = torch.empty(x.shape, device=x.device)
    torch.mul(x, cos, out=turned)
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned
