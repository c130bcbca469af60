"""Models of the Llama family: fused projections and layers, used by training, prefill and decoding.

Projections that read the same input run as one matrix product, and so do their adapters. Otherwise, on a CPU, the
small products of the seven adapters of a layer take half as long as the model itself.

Shapes: B sequences, T positions, N rows (all positions of all sequences), D hidden, H query heads, G key-value
heads, E head size, R rank of all adapters of a projection together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from .lora import Adapter, LoraLinear
from .products import linear

__all__ = ["LlamaBody", "LlamaLayer", "Projection", "Rows", "is_llama", "rms_norm"]

_FAMILY: Final = frozenset({"llama", "qwen2", "qwen3", "mistral"})


def is_llama(config: Any) -> bool:
    return config.model_type in _FAMILY and not getattr(config, "sliding_window", None)


@dataclass(frozen=True)
class Rows:
    """Adjacent rows of a batch that use one adapter; no adapter means the base model."""

    adapter: Adapter | None
    rows: slice = field(default_factory=lambda: slice(None))


class Projection:
    """Linear layers that read the same input, fused into one."""

    def __init__(self, layers: Mapping[str, LoraLinear]) -> None:
        self._names = list(layers)
        parts = list(layers.values())
        self.sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.data for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat([bias.data for bias in biases]) if biases else None
        # The layers become views of the fused weight, so that memory holds the weights only once.
        for part, weight in zip(parts, torch.split(self.weight, self.sizes), strict=True):
            part.base.weight.data = weight
        # By id of the adapter. Keeping the adapter in the value prevents reuse of its id.
        self._frozen: dict[int, tuple[Adapter, tuple[Tensor, Tensor] | None]] = {}

    def train(self, x_ND: Tensor, adapter: Adapter) -> Tensor:
        """Compute the output for one adapter, with gradients for its tensors."""
        pairs = [adapter.pairs.get(name) for name in self._names]
        if not any(pairs):
            return functional.linear(x_ND, self.weight, self.bias)
        tensors = [
            tensor
            for pair in pairs
            for tensor in ((None, None) if pair is None else (pair.a, pair.b))
        ]
        output: Tensor = _FusedLora.apply(x_ND, self, adapter.scale, *tensors)  # type: ignore[no-untyped-call]
        return output

    def infer(self, x_ND: Tensor, groups: Sequence[Rows]) -> Tensor:
        """Compute the output for rows that may use different adapters, in the type of the weights."""
        x_ND = x_ND.to(self.weight.dtype)
        y = linear(x_ND, self.weight, self.bias)
        for group in groups:
            factors = None if group.adapter is None else self._frozen_factors(group.adapter)
            if factors is not None:
                a, b = factors
                y[group.rows].addmm_(linear(x_ND[group.rows], a), b.t())
        return y

    def _frozen_factors(self, adapter: Adapter) -> tuple[Tensor, Tensor] | None:
        """Fused factors of a sampler's adapter; cached, because the adapter never changes."""
        if id(adapter) not in self._frozen:
            pairs = [adapter.pairs.get(name) for name in self._names]
            tensors = [
                None if pair is None else (pair.a.detach(), pair.b.detach()) for pair in pairs
            ]
            fused = None
            if any(tensors):
                a, b = fuse(tensors, self.sizes, torch.float32)
                dtype = self.weight.dtype
                fused = (a.to(dtype), (b * adapter.scale).to(dtype))
            self._frozen[id(adapter)] = (adapter, fused)
        return self._frozen[id(adapter)][1]

    def forget(self, adapter: Adapter) -> None:
        self._frozen.pop(id(adapter), None)


def fuse(
    pairs: Sequence[tuple[Tensor, Tensor] | None], sizes: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fuse several pairs into one, in `dtype`: A stacked, B block-diagonal."""
    present = [pair for pair in pairs if pair is not None]
    a = torch.cat([pair[0] for pair in present]).to(dtype)
    b = a.new_zeros(sum(sizes), len(a))
    for rows, columns, pair in _blocks(pairs, sizes):
        b[rows, columns] = pair[1]
    return a, b


def _blocks(pairs: Sequence[Any], sizes: Sequence[int]) -> list[tuple[slice, slice, Any]]:
    """Rows and columns of each pair's B in the fused B."""
    found, row, column = [], 0, 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            rank = pair[0].shape[0]
            found.append((slice(row, row + size), slice(column, column + rank), pair))
            column += rank
        row += size
    return found


class _FusedLora(torch.autograd.Function):
    """`x W' + scale · (x A') B'` for all layers of a projection, and its gradient for x, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, projection: Projection, scale: float, *tensors: Tensor | None
    ) -> Tensor:
        pairs = _paired(tensors)
        a, b = fuse(pairs, projection.sizes, x.dtype)
        inner = functional.linear(x, a)
        y = functional.linear(x, projection.weight, projection.bias)
        y.addmm_(inner, b.t(), alpha=scale)
        ctx.save_for_backward(x, inner, a, b)
        ctx.projection, ctx.scale = projection, scale
        ctx.present = [None if pair is None else (pair[0].detach(), None) for pair in pairs]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, inner, a, b = ctx.saved_tensors
        inner_g = (g @ b).mul_(ctx.scale)
        x_g = None
        if ctx.needs_input_grad[0]:
            x_g = (g @ ctx.projection.weight).addmm_(inner_g, a)
        a_g = inner_g.t() @ x
        b_g = (g.t() @ inner).mul_(ctx.scale)
        gradients: list[Tensor | None] = []
        blocks = iter(_blocks(ctx.present, ctx.projection.sizes))
        for pair in ctx.present:
            if pair is None:
                gradients += [None, None]
            else:
                rows, columns, _ = next(blocks)
                gradients += [a_g[columns].float(), b_g[rows, columns].float()]
        return x_g, None, None, *gradients


def _paired(tensors: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor] | None]:
    return [
        None if a is None or b is None else (a, b)
        for a, b in zip(tensors[::2], tensors[1::2], strict=True)
    ]


class _GatedSilu(torch.autograd.Function):
    """`silu(gate) · up`; saves only its input for the gradient, because these are a layer's widest activations."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        gate_g, up_g = gradient.chunk(2, dim=-1)
        up_g.copy_(functional.silu(gate).mul_(g))
        gate_g.copy_(torch.ops.aten.silu_backward(g * up, gate))
        return gradient


class LlamaLayer:
    """One layer: projections, norms and attention heads."""

    def __init__(self, name: str, module: Any, config: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        prefix = f"{name}.self_attn"
        self.qkv = Projection(
            {
                f"{prefix}.{part}": getattr(attention, part)
                for part in ("q_proj", "k_proj", "v_proj")
            }
        )
        self.out = Projection({f"{prefix}.o_proj": attention.o_proj})
        self.gate_up = Projection(
            {f"{name}.mlp.{part}": getattr(mlp, part) for part in ("gate_proj", "up_proj")}
        )
        self.down = Projection({f"{name}.mlp.down_proj": mlp.down_proj})
        self.activation = mlp.act_fn
        self._is_silu = config.hidden_act in {"silu", "swish"}
        before, after = module.input_layernorm, module.post_attention_layernorm
        self.before = (before.weight, before.variance_epsilon)
        self.after = (after.weight, after.variance_epsilon)
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.heads: int = config.num_attention_heads
        self.groups: int = config.num_key_value_heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def gated(self, gate_up: Tensor) -> Tensor:
        """`activation(gate) · up`, with gradients."""
        if self._is_silu:
            product: Tensor = _GatedSilu.apply(gate_up)  # type: ignore[no-untyped-call]
            return product
        gate, up = gate_up.chunk(2, dim=-1)
        other: Tensor = self.activation(gate) * up
        return other

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split B × T × all heads into rotated queries, rotated keys, and values: each B × heads × T × E."""
        heads = qkv.view(*qkv.shape[:2], -1, self.size)
        turned, v = torch.split(heads, [self.heads + self.groups, self.groups], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(turned, [self.heads, self.groups], dim=2)
            turned = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        turned = _rotate(turned.transpose(1, 2), cos, sin)
        q, k = torch.split(turned, [self.heads, self.groups], dim=1)
        return q, k, v.transpose(1, 2)


class LlamaBody:
    """The layers of a Llama model; `hidden` runs all positions at once, with gradients."""

    def __init__(self, model: Any) -> None:
        self.module: Any = getattr(model, model.base_model_prefix)
        prefix = model.base_model_prefix
        self.layers = [
            LlamaLayer(f"{prefix}.layers.{index}", layer, model.config)
            for index, layer in enumerate(self.module.layers)
        ]
        self._leave_the_file(model)

    def _leave_the_file(self, model: Any) -> None:
        """Copy the weights that are not fused: then nothing keeps the mapped file, and memory holds one copy."""
        fused = {
            projection.weight.untyped_storage().data_ptr()
            for layer in self.layers
            for projection in layer.projections
        }
        for parameter in model.parameters():
            if parameter.data.untyped_storage().data_ptr() not in fused:
                parameter.data = parameter.data.clone()

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, with a dimension to broadcast over heads."""
        cos, sin = self.module.rotary_emb(x, positions)
        return cos[:, None], sin[:, None]

    def hidden(self, tokens_BT: Tensor, adapter: Adapter) -> Tensor:
        batch, length = tokens_BT.shape
        x = self.module.embed_tokens(tokens_BT).flatten(0, 1)
        positions = torch.arange(length, device=x.device)[None]
        cos, sin = self.rotation(x, positions)
        for layer in self.layers:
            normed = rms_norm(x, *layer.before)
            qkv = layer.qkv.train(normed, adapter).view(batch, length, -1)
            q, k, v = layer.split(qkv, cos, sin)
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = x + layer.out.train(mixed.transpose(1, 2).reshape(len(x), -1), adapter)
            normed = rms_norm(x, *layer.after)
            x = x + layer.down.train(layer.gated(layer.gate_up.train(normed, adapter)), adapter)
        states: Tensor = self.module.norm(x).view(batch, length, -1)
        return states


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
