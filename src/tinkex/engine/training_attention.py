"""Attention of a micro-batch in training, forward and backward: queries, keys and values in, mixed values out.

Shapes: N rows, T positions, H query heads, G key-value heads, E head size; see `packed_attention` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from .kernels import add_norm_back
from .llama import HeadNorm, LlamaBody, LlamaLayer, rotate
from .native.attention import NativeAttention, packed_rows
from .packed_attention import Run, attend, attend_back, runs_of

__all__ = ["TrainingAttention", "attention_of"]


class TrainingAttention(Protocol):
    """Attention over the packed sequences of one micro-batch, the same for all layers."""

    def forward(self, layer: LlamaLayer, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed values, N × H·E, given rows of queries, keys and values; and what else `backward` needs."""

    def backward(
        self, layer: LlamaLayer, qkv: Tensor, mixed: tuple[Tensor, Tensor], mixed_g: Tensor
    ) -> Tensor:
        """The gradient of `qkv`, given what `forward` returned."""


def attention_of(body: LlamaBody, lengths: Sequence[int]) -> TrainingAttention:
    tables = body.rotation_table(max(lengths))
    if body.attention is not None:
        return _Native(body.attention, lengths, *tables)
    return _Torch(runs_of(lengths), *tables, body.layers[0].size ** -0.5)


class _Native:
    def __init__(
        self, attention: NativeAttention, lengths: Sequence[int], cos_TE: Tensor, sin_TE: Tensor
    ) -> None:
        self._attention, self._rows = attention, packed_rows(lengths)
        self._cos_NE = torch.cat([cos_TE[:length] for length in lengths])
        self._sin_NE = torch.cat([sin_TE[:length] for length in lengths])

    def forward(self, layer: LlamaLayer, qkv: Tensor) -> tuple[Tensor, Tensor]:
        rotated = self._attention.rotate(qkv, layer.shape, self._cos_NE, self._sin_NE)
        return self._attention.attend(rotated, layer.shape, self._rows)

    def backward(
        self, layer: LlamaLayer, qkv: Tensor, mixed: tuple[Tensor, Tensor], mixed_g: Tensor
    ) -> Tensor:
        rotated = self._attention.rotate(qkv, layer.shape, self._cos_NE, self._sin_NE)
        return self._attention.attend_back(
            rotated, layer.shape, self._rows, mixed, mixed_g, self._cos_NE, self._sin_NE
        )


_NOTHING: Final = torch.empty(0)


class _Torch:
    def __init__(self, runs: Sequence[Run], cos_TE: Tensor, sin_TE: Tensor, scale: float) -> None:
        self._runs = runs
        self._keys = cos_TE, sin_TE
        self._queries = cos_TE * scale, sin_TE * scale

    def forward(self, layer: LlamaLayer, qkv: Tensor) -> tuple[Tensor, Tensor]:
        mixed = qkv.new_empty(len(qkv), layer.heads * layer.size)
        for run in self._runs:
            q, k, v = self._heads(layer, qkv, run)
            part = mixed[run.rows].view(run.count, run.length, layer.groups, -1, layer.size)
            part.permute(0, 2, 3, 1, 4).copy_(attend(q, k, v))
        return mixed, _NOTHING

    def backward(
        self, layer: LlamaLayer, qkv: Tensor, mixed: tuple[Tensor, Tensor], mixed_g: Tensor
    ) -> Tensor:
        qkv_g = torch.empty_like(qkv)
        for run in self._runs:
            q, k, v = self._heads(layer, qkv, run)
            part = mixed_g[run.rows].view(run.count, run.length, layer.groups, -1, layer.size)
            g = part.permute(0, 2, 3, 1, 4).contiguous()
            q_g, k_g, v_g = attend_back(q, k, v, g)
            to_q, to_k, to_v = _views(layer, qkv_g, run)
            raw_q, raw_k, _ = _views(layer, qkv, run)
            cos, sin = _first(self._queries, run.length)
            to_q.copy_(_head_norm_back(raw_q, rotate(q_g, cos, -sin), layer.q_norm))
            cos, sin = _first(self._keys, run.length)
            to_k.copy_(_head_norm_back(raw_k, rotate(k_g, cos, -sin), layer.k_norm))
            to_v.copy_(v_g)
        return qkv_g

    def _heads(self, layer: LlamaLayer, qkv: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated and scaled queries, rotated keys, and values of a run: contiguous, in the type of the products."""
        q, k, v = _views(layer, qkv, run)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q = rotate(q, *_first(self._queries, run.length)).to(layer.dtype)
        k = rotate(k, *_first(self._keys, run.length)).to(layer.dtype)
        return q, k, v.contiguous()


def _first(table: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first positions."""
    return table[0][:length], table[1][:length]


def _views(layer: LlamaLayer, qkv: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a run as B × G × R × T × E queries, and B × G × T × E keys and values."""
    heads = qkv[run.rows].view(run.count, run.length, -1, layer.size).transpose(1, 2)
    q, k, v = torch.split(heads, [layer.heads, layer.groups, layer.groups], dim=1)
    return q.view(len(q), layer.groups, -1, *q.shape[2:]), k, v


def _head_norm_back(heads: Tensor, g: Tensor, norm: HeadNorm | None) -> Tensor:
    if norm is None:
        return g
    x_g = torch.zeros_like(g)
    add_norm_back(x_g, heads.float(), g, norm.weight, norm.eps)
    return x_g
