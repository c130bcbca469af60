"""Training of Llama models: forward and backward of a layer, written out without autograd.

Rows are packed: N counts the positions of all sequences of a micro-batch, one after another, without padding. The
residual stream, norms, rotations and softmax are float32; only the inputs and outputs of the matrix products have the
type of the frozen weights.

A layer keeps as little as its backward pass needs. Norms, rotations and `silu(gate) · up` are computed again, since they
are cheap beside the products; above a size, whole layers are (`kept_layers`).

Shapes: N rows, D hidden, I intermediate, H query heads, G key-value heads, E head size; see `packed_attention` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .llama import (
    HeadNorm,
    LlamaBody,
    LlamaLayer,
    Projection,
    blocks_of,
    fuse,
    rms_norm,
    rms_scale,
    rotate,
)
from .lora import Adapter, Pair
from .packed_attention import Run, attend, attend_back, runs_of
from .products import linear

__all__ = ["TrainingRun", "kept_layers"]


@dataclass(slots=True)
class _Factors:
    """The adapters of one projection, fused, in the type of its weight; `b` contains the scale."""

    pairs: list[Pair | None]
    a: Tensor
    b: Tensor
    scale: float

    @classmethod
    def of(cls, projection: Projection, adapter: Adapter) -> _Factors | None:
        pairs = [adapter.pairs.get(name) for name in projection.names]
        if not any(pairs):
            return None
        tensors = [None if pair is None else (pair.a.detach(), pair.b.detach()) for pair in pairs]
        a, b = fuse(tensors, projection.sizes, torch.float32)
        dtype = projection.weight.dtype
        return cls(pairs, a.to(dtype), b.mul_(adapter.scale).to(dtype), adapter.scale)

    def collect(self, sizes: Sequence[int], a_g: Tensor, b_g: Tensor) -> None:
        """Add gradients of the fused factors to those of the adapters."""
        for rows, columns, pair in blocks_of(
            [None if pair is None else (pair.a, pair) for pair in self.pairs], sizes
        ):
            _collect(pair[1].a, a_g[columns])
            _collect(pair[1].b, b_g[rows, columns])


def _collect(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype, copy=True)
    else:
        parameter.grad.add_(gradient)


class _Product:
    """A projection with the factors of one adapter."""

    def __init__(self, projection: Projection, adapter: Adapter) -> None:
        self._projection = projection
        self._factors = _Factors.of(projection, adapter)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and the rows between the two factors, which `backward` needs."""
        y = linear(x, self._projection.weight, self._projection.bias)
        if self._factors is None:
            return y, None
        inner = linear(x, self._factors.a)
        return y.addmm_(inner, self._factors.b.t()), inner

    def backward(
        self, g: Tensor, x: Tensor, inner: Tensor | None, *, needs_input: bool = True
    ) -> Tensor | None:
        """Collect the gradients of the factors; return the gradient of the input."""
        factors, x_g = self._factors, None
        if needs_input:
            x_g = linear(g, self._projection.weight.t())
        if factors is not None and inner is not None:
            inner_g = linear(g, factors.b.t())
            if x_g is not None:
                x_g.addmm_(inner_g, factors.a)
            b_g = (g.t() @ inner).mul_(factors.scale)
            factors.collect(self._projection.sizes, inner_g.t() @ x, b_g)
        return x_g


class _Kept(NamedTuple):
    """What the backward pass of a layer needs."""

    x: Tensor
    qkv: Tensor
    mixed: Tensor
    middle: Tensor
    gate_up: Tensor
    inner: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Rotation:
    """Cosines and sines of the longest run's positions; queries get the scale of attention with them."""

    def __init__(self, cos_TE: Tensor, sin_TE: Tensor, scale: float) -> None:
        self._keys = cos_TE, sin_TE
        self._queries = cos_TE * scale, sin_TE * scale

    def queries(self, length: int) -> tuple[Tensor, Tensor]:
        return self._queries[0][:length], self._queries[1][:length]

    def keys(self, length: int) -> tuple[Tensor, Tensor]:
        return self._keys[0][:length], self._keys[1][:length]


class _Layer:
    def __init__(
        self, layer: LlamaLayer, adapter: Adapter, runs: Sequence[Run], rotation: _Rotation
    ) -> None:
        self._layer, self._runs, self._rotation = layer, runs, rotation
        self._qkv, self._out, self._gate_up, self._down = (
            _Product(projection, adapter) for projection in layer.projections
        )

    def forward(self, x: Tensor) -> tuple[Tensor, _Kept]:
        layer = self._layer
        qkv, qkv_inner = self._qkv.forward(rms_norm(x, *layer.before, layer.dtype))
        mixed = self._mix(qkv)
        out, out_inner = self._out.forward(mixed)
        middle = x + out
        gate_up, up_inner = self._gate_up.forward(rms_norm(middle, *layer.after, layer.dtype))
        down, down_inner = self._down.forward(layer.gated(gate_up))
        inner = qkv_inner, out_inner, up_inner, down_inner
        return middle + down, _Kept(x, qkv, mixed, middle, gate_up, inner)

    def backward(self, g: Tensor, kept: _Kept, *, needs_input: bool) -> Tensor:
        """Gradient of the layer's input; changes `g` in place."""
        layer = self._layer
        qkv_inner, out_inner, up_inner, down_inner = kept.inner
        hidden_g = self._down.backward(g.to(layer.dtype), layer.gated(kept.gate_up), down_inner)
        assert hidden_g is not None
        gate_up_g = _gated_back(kept.gate_up, hidden_g)
        del hidden_g
        normed = rms_norm(kept.middle, *layer.after, layer.dtype)
        normed_g = self._gate_up.backward(gate_up_g, normed, up_inner)
        del gate_up_g
        assert normed_g is not None
        _add_norm_back(g, kept.middle, normed_g, *layer.after)
        mixed_g = self._out.backward(g.to(layer.dtype), kept.mixed, out_inner)
        assert mixed_g is not None
        qkv_g = self._mix_back(kept.qkv, mixed_g)
        normed = rms_norm(kept.x, *layer.before, layer.dtype)
        normed_g = self._qkv.backward(qkv_g, normed, qkv_inner, needs_input=needs_input)
        if normed_g is not None:
            _add_norm_back(g, kept.x, normed_g, *layer.before)
        return g

    # -- attention ---------------------------------------------------------------------------

    def _mix(self, qkv: Tensor) -> Tensor:
        layer = self._layer
        mixed = qkv.new_empty(len(qkv), layer.heads * layer.size)
        for run in self._runs:
            q, k, v = self._heads(qkv, run)
            part = mixed[run.rows].view(run.count, run.length, layer.groups, -1, layer.size)
            part.permute(0, 2, 3, 1, 4).copy_(attend(q, k, v))
        return mixed

    def _mix_back(self, qkv: Tensor, mixed_g: Tensor) -> Tensor:
        layer, qkv_g = self._layer, torch.empty_like(qkv)
        for run in self._runs:
            q, k, v = self._heads(qkv, run)
            part = mixed_g[run.rows].view(run.count, run.length, layer.groups, -1, layer.size)
            g = part.permute(0, 2, 3, 1, 4).contiguous()
            q_g, k_g, v_g = attend_back(q, k, v, g)
            to_q, to_k, to_v = self._views(qkv_g, run)
            raw_q, raw_k, _ = self._views(qkv, run)
            cos, sin = self._rotation.queries(run.length)
            to_q.copy_(_head_norm_back(raw_q, rotate(q_g, cos, -sin), layer.q_norm))
            cos, sin = self._rotation.keys(run.length)
            to_k.copy_(_head_norm_back(raw_k, rotate(k_g, cos, -sin), layer.k_norm))
            to_v.copy_(v_g)
        return qkv_g

    def _heads(self, qkv: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated and scaled queries, rotated keys, and values of a run: contiguous, in the type of the products."""
        layer = self._layer
        q, k, v = self._views(qkv, run)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q = rotate(q, *self._rotation.queries(run.length)).to(layer.dtype)
        k = rotate(k, *self._rotation.keys(run.length)).to(layer.dtype)
        return q, k, v.contiguous()

    def _views(self, qkv: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of a run as B × G × R × T × E queries, and B × G × T × E keys and values."""
        layer = self._layer
        heads = qkv[run.rows].view(run.count, run.length, -1, layer.size).transpose(1, 2)
        q, k, v = torch.split(heads, [layer.heads, layer.groups, layer.groups], dim=1)
        return q.view(len(q), layer.groups, -1, *q.shape[2:]), k, v


def _head_norm_back(heads: Tensor, g: Tensor, norm: HeadNorm | None) -> Tensor:
    if norm is None:
        return g
    x_g = torch.zeros_like(g)
    _add_norm_back(x_g, heads.float(), g, norm.weight, norm.eps)
    return x_g


def _gated_back(gate_up: Tensor, g: Tensor) -> Tensor:
    """Gradient of `silu(gate) · up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gradient = torch.empty_like(gate_up)
    gate_g, up_g = gradient.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), g, out=up_g)
    gate_g.copy_(torch.ops.aten.silu_backward(g * up, gate))
    return gradient


def _add_norm_back(x_g: Tensor, x: Tensor, normed_g: Tensor, weight: Tensor, eps: float) -> None:
    """Add the gradient of a norm's input to `x_g`."""
    scale = rms_scale(x, eps)
    g = normed_g * weight
    along = (g * x).sum(-1, keepdim=True).mul_(scale**3).div_(-x.shape[-1])
    x_g.addcmul_(g, scale).addcmul_(x, along)


# -- a micro-batch --------------------------------------------------------------------------------


class TrainingRun:
    """Forward and backward pass of one micro-batch through all layers."""

    def __init__(
        self,
        body: LlamaBody,
        tokens_N: Tensor,
        lengths: Sequence[int],
        adapter: Adapter,
        *,
        activation_bytes: int,
    ) -> None:
        self._body, self._tokens_N = body, tokens_N
        runs = runs_of(lengths)
        rotation = _Rotation(*body.rotation_table(max(lengths)), body.layers[0].size ** -0.5)
        self._layers = [_Layer(layer, adapter, runs, rotation) for layer in body.layers]
        self._kept = kept_layers(body, len(tokens_N), activation_bytes)
        self._saved: list[Tensor | _Kept] = []
        self._last = tokens_N.new_empty(0)

    def forward(self, *, backward: bool) -> Tensor:
        """The final hidden states, normed; keeps what `backward` needs if it follows."""
        x = self._body.embed(self._tokens_N)
        recomputed = len(self._layers) - self._kept
        for number, layer in enumerate(self._layers):
            output, kept = layer.forward(x)
            if backward:
                self._saved.append(x if number < recomputed else kept)
            x = output
            del kept
        self._last = x
        return rms_norm(x, *self._body.norm)

    def backward(self, g_ND: Tensor) -> None:
        """Add the gradients of the adapter, given the gradient of the hidden states."""
        g = torch.zeros_like(self._last)
        _add_norm_back(g, self._last, g_ND.float(), *self._body.norm)
        for number in reversed(range(len(self._layers))):
            layer, saved = self._layers[number], self._saved.pop()
            if isinstance(saved, Tensor):
                saved = layer.forward(saved)[1]
            g = layer.backward(g, saved, needs_input=number > 0)


def kept_layers(body: LlamaBody, rows: int, activation_bytes: int) -> int:
    """How many layers keep their activations; the others keep their input and run again in the backward pass.

    Depends on the model and the number of rows alone, and does not change any bit of the result.
    """
    layer = body.layers[0]
    size = layer.dtype.itemsize
    hidden = layer.out.sizes[0]
    projected = sum(layer.qkv.sizes) + hidden + sum(layer.gate_up.sizes)
    everything = rows * (2 * hidden * 4 + projected * size)
    inputs = rows * hidden * 4 * len(body.layers)
    return max(0, min(len(body.layers), (activation_bytes - inputs) // everything))
