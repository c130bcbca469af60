"""Training of Llama models: forward and backward of a layer, written out without autograd.

Rows are packed: N counts the positions of all sequences of a micro-batch, one after another, without padding. The
residual stream, norms, rotations and softmax are float32; only the inputs and outputs of the matrix products have the
type of `--dtype`.

A layer keeps as little as its backward pass needs. Norms, rotations and `silu(gate) · up` are computed again, since they
are cheap beside the products; above a size, whole layers are (`kept_layers`).

Shapes: N rows, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .kernels import TorchKernels
from .llama import LlamaBody, LlamaLayer, Projection, blocks_of
from .lora import Adapter
from .products import PairGradients
from .training_attention import TrainingAttention, attention_of

__all__ = ["MicroBatchPass", "kept_layers"]

#: Activations, gradients and scratch memory of the layer that runs backward, in sizes of what a layer keeps.
_PASSING: Final = 3


def _gradient(parameter: Tensor) -> Tensor:
    """What gradients are added to."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad


class _Product:
    """A projection with the factors of one adapter."""

    def __init__(self, projection: Projection, adapter: Adapter) -> None:
        self._projection = projection
        self._pairs = [adapter.pairs.get(name) for name in projection.names]
        self._factors, self._scale = projection.factors(adapter), adapter.scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and the rows between the two factors, which `backward` needs."""
        projection = self._projection
        weight, bias = projection.weight, projection.bias
        if self._factors is None:
            return projection.products.linear(x, weight, bias), None
        return projection.products.adapted_and_inner(x, weight, bias, self._factors)

    def backward(self, g: Tensor, *, needs_input: bool = True) -> tuple[Tensor, Tensor | None]:
        """The gradients of the input, empty if nobody needs it, and of the rows between the factors."""
        products, weight = self._projection.products, self._projection.weight
        if self._factors is None:
            return products.back(g, weight) if needs_input else g.new_empty(0), None
        if not needs_input:
            return g.new_empty(0), products.inner_back(g, self._factors)
        return products.adapted_back(g, weight, self._factors)

    def collect(self, g: Tensor, x: Tensor, inner: Tensor | None, inner_g: Tensor | None) -> None:
        """Add the gradients of the factors to those of the adapter."""
        if inner is None or inner_g is None:
            return
        pairs = [None if pair is None else (pair.a, pair) for pair in self._pairs]
        gradients = [
            PairGradients(rows, columns, _gradient(pair.a), _gradient(pair.b))
            for rows, columns, (_, pair) in blocks_of(pairs, self._projection.sizes)
        ]
        products = self._projection.products
        products.add_gradients(g, x, inner, inner_g, self._scale, gradients)


class _Kept(NamedTuple):
    """What the backward pass of a layer needs."""

    x: Tensor
    qkv: Tensor
    mixed: tuple[Tensor, Tensor]
    middle: Tensor
    gate_up: Tensor
    inner: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Layer:
    def __init__(
        self,
        layer: LlamaLayer,
        kernels: TorchKernels,
        adapter: Adapter,
        attention: TrainingAttention,
    ) -> None:
        self._layer, self._kernels, self._attention = layer, kernels, attention
        self._qkv, self._out, self._gate_up, self._down = (
            _Product(projection, adapter) for projection in layer.projections
        )

    def forward(self, x: Tensor) -> tuple[Tensor, _Kept]:
        layer, kernels = self._layer, self._kernels
        qkv, qkv_inner = self._qkv.forward(kernels.norm(x, *layer.before, layer.dtype))
        mixed = self._attention.forward(layer, qkv)
        out, out_inner = self._out.forward(mixed[0])
        middle, normed = kernels.add_norm(x, out, *layer.after)
        gate_up, up_inner = self._gate_up.forward(normed)
        down, down_inner = self._down.forward(kernels.gated(gate_up))
        inner = qkv_inner, out_inner, up_inner, down_inner
        return kernels.add(middle, down), _Kept(x, qkv, mixed, middle, gate_up, inner)

    def backward(self, g: Tensor, rounded: Tensor, kept: _Kept, *, needs_input: bool) -> Tensor:
        """Turn the gradient of the output into that of the input: `g` in place, `rounded` as a new tensor."""
        layer, kernels = self._layer, self._kernels
        qkv_inner, out_inner, up_inner, down_inner = kept.inner
        hidden_g, inner_g = self._down.backward(rounded)
        gate_up_g, hidden = kernels.gated_back(kept.gate_up, hidden_g)
        self._down.collect(rounded, hidden, down_inner, inner_g)
        normed_g, inner_g = self._gate_up.backward(gate_up_g)
        normed = kernels.norm(kept.middle, *layer.after, layer.dtype)
        self._gate_up.collect(gate_up_g, normed, up_inner, inner_g)
        del hidden_g, hidden, gate_up_g
        rounded = kernels.add_norm_back(g, kept.middle, normed_g, *layer.after)
        mixed_g, inner_g = self._out.backward(rounded)
        self._out.collect(rounded, kept.mixed[0], out_inner, inner_g)
        qkv_g = self._attention.backward(layer, kept.qkv, kept.mixed, mixed_g)
        normed_g, inner_g = self._qkv.backward(qkv_g, needs_input=needs_input)
        normed = kernels.norm(kept.x, *layer.before, layer.dtype)
        self._qkv.collect(qkv_g, normed, qkv_inner, inner_g)
        if needs_input:
            rounded = kernels.add_norm_back(g, kept.x, normed_g, *layer.before)
        return rounded


# -- a micro-batch --------------------------------------------------------------------------------


class MicroBatchPass:
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
        attention = attention_of(body, lengths)
        self._layers = [_Layer(layer, body.kernels, adapter, attention) for layer in body.layers]
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
        return self._body.kernels.norm(x, *self._body.norm)

    def backward(self, g_ND: Tensor) -> None:
        """Add the gradients of the adapter, given the gradient of the hidden states."""
        g = torch.zeros_like(self._last)
        self._body.kernels.add_norm_back(g, self._last, g_ND.float(), *self._body.norm)
        rounded = g.to(self._body.dtype)
        for number in reversed(range(len(self._layers))):
            layer, saved = self._layers[number], self._saved.pop()
            if isinstance(saved, Tensor):
                saved = layer.forward(saved)[1]
            rounded = layer.backward(g, rounded, saved, needs_input=number > 0)


def kept_layers(body: LlamaBody, rows: int, activation_bytes: int) -> int:
    """How many layers keep their activations; the others keep their input and run again in the backward pass.

    Depends on the model and the number of rows alone, and does not change any bit of the result.
    """
    layer = body.layers[0]
    size = layer.dtype.itemsize
    hidden = layer.out.sizes[0]
    projected = sum(layer.qkv.sizes) + hidden + sum(layer.gate_up.sizes)
    inputs = rows * hidden * 4  # of one layer, kept in any case
    everything = 2 * inputs + rows * projected * size
    passing = _PASSING * everything  # of the layer that runs backward
    left = activation_bytes - passing - inputs * len(body.layers)
    return max(0, min(len(body.layers), left // (everything - inputs)))
