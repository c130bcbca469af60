"""Run models of the Llama family for sampling: all rows of a step in one pass, whatever they belong to.

The products read packed rows without padding; attention reads the paged cache. Between the products everything is
float32, in as few operations as possible: on a CPU they cost as much as the products of a single row.

Shapes: N rows, D hidden, H query heads, G key-value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .attention import AttentionPlan
from .batch_scheduler import Fork, Step
from .continuations import Chunk, Continuation
from .kv_cache import KeyValueCache
from .llama import LlamaBody, LlamaLayer, Rows, rms_norm, rotate
from .lora import Adapter
from .products import linear
from .trainer import LanguageModel

__all__ = ["LeanDecoder"]


class LeanDecoder:
    """Decoder for the Llama family, with minimal overhead between the matrix products."""

    shares_prefixes: Final = True

    def __init__(self, base: LanguageModel, body: LlamaBody, page: int) -> None:
        self._base, self._body = base, body
        first = body.layers[0]
        self.cache = KeyValueCache(
            len(body.layers),
            first.groups,
            first.size,
            page,
            dtype=body.dtype,
            device=base.device,
        )

    @property
    def page_bytes(self) -> int:
        return self.cache.page_bytes

    def fork(self, fork: Fork) -> None:
        if fork.copied is not None:
            self.cache.copy(*fork.copied)

    def leave(self, continuations: Iterable[Continuation]) -> None:
        """Pages are managed by the scheduler."""

    def release(self) -> None:
        self.cache.release()

    def forget(self, adapter: Adapter) -> None:
        for layer in self._body.layers:
            for projection in layer.projections:
                projection.forget(adapter)

    @torch.inference_mode()
    def read(self, step: Step, groups: Sequence[Rows]) -> Tensor:
        self.cache.prepare(step.fresh)
        tokens_N, positions_N = _tokens(step.chunks)
        device = self._base.device
        x = self._body.embed(tokens_N.to(device))
        cos, sin = self._rotation(x, positions_N.to(device))
        first = self._body.layers[0]
        heads = (first.heads, first.groups, first.size)
        plan = AttentionPlan(step.chunks, self.cache, heads, device)
        for index, layer in enumerate(self._body.layers):
            qkv = layer.qkv.infer(rms_norm(x, *layer.before), groups)
            heads_NHE = _rotated(layer, qkv.float(), cos, sin)
            x.add_(layer.out.infer(plan.attend(index, heads_NHE), groups))
            gate, up = layer.gate_up.infer(rms_norm(x, *layer.after), groups).chunk(2, dim=-1)
            x.add_(layer.down.infer(layer.activation(gate).mul_(up), groups))
        return rms_norm(x, *self._body.norm)

    def _rotation(self, x: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, N × (H + G) × E; those of the queries have the scale of attention, as in training."""
        layer = self._body.layers[0]
        cos, sin = self._body.module.rotary_emb(x, positions_N[None])
        scales = torch.ones(layer.heads + layer.groups, 1, device=x.device)
        scales[: layer.heads] = layer.size**-0.5
        return cos[0, :, None] * scales, sin[0, :, None] * scales

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor, groups: Sequence[Rows]) -> Tensor:
        unembed = self._base.unembed
        logits = linear(hidden_ND.to(unembed.weight.dtype), unembed.weight, unembed.bias)
        logits = self._base.scaled(logits.float())
        for group in groups:
            pair = None if group.adapter is None else group.adapter.pairs.get("lm_head")
            if group.adapter is not None and pair is not None:
                # Computed in float32, the type of logits and adapter, so nothing is rounded.
                inner = linear(hidden_ND[group.rows].float(), pair.a).mul_(group.adapter.scale)
                logits[group.rows].addmm_(inner, pair.b.t())
        return logits


def _tokens(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    """Tokens and positions of all rows."""
    if all(chunk.count == 1 for chunk in chunks):
        last = [chunk.continuation.last_token for chunk in chunks]
        return torch.tensor(last), torch.tensor([chunk.start for chunk in chunks])
    tokens = [chunk.continuation.text(chunk.start, chunk.start + chunk.count) for chunk in chunks]
    positions = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
    return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(positions))


def _rotated(layer: LlamaLayer, qkv_ND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries, keys and values, N × heads × E; changes `qkv_ND`."""
    heads = qkv_ND.view(len(qkv_ND), -1, layer.size)
    turned = heads[:, : layer.heads + layer.groups]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = torch.split(turned, [layer.heads, layer.groups], dim=1)
        q.copy_(layer.q_norm(q))
        k.copy_(layer.k_norm(k))
    turned.copy_(rotate(turned, cos, sin))
    return heads
