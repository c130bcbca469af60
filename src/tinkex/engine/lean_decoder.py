"""Runs models of the Llama family for sampling: all rows of a step in one pass, whatever request they belong to.

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

from .attention import attention_of_step
from .batch_scheduler import Fork, Step
from .continuations import Chunk, Continuation
from .kv_cache import KeyValueCache
from .llama import LlamaBody, Rows
from .lora import Adapter
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
    def read(self, step: Step, groups: tuple[Rows, ...]) -> Tensor:
        self.cache.prepare(step.fresh)
        tokens_N, positions_N = _tokens(step.chunks)
        device = self._base.device
        x = self._body.embed(tokens_N.to(device))
        rotations = self._body.rotations(positions_N.to(device))
        attention = attention_of_step(self._body, step.chunks, self.cache, rotations)
        kernels, layers = self._body.kernels, self._body.layers
        normed = kernels.norm(x, *layers[0].before, self._body.dtype)
        for index, layer in enumerate(layers):
            mixed = attention.attend(index, layer, layer.qkv.infer(normed, groups))
            out = layer.out.infer(mixed, groups)
            x, normed = kernels.add_norm(x, out, *layer.after)
            down = layer.down.infer(kernels.gated(layer.gate_up.infer(normed, groups)), groups)
            if index + 1 < len(layers):
                x, normed = kernels.add_norm(x, down, *layers[index + 1].before)
        return kernels.norm(kernels.add(x, down), *self._body.norm)

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor, groups: Sequence[Rows]) -> Tensor:
        unembed, products = self._base.unembed, self._body.kernels.products
        rounded_ND = hidden_ND.to(self._body.dtype)
        logits = self._base.scaled(
            products.linear(rounded_ND, unembed.weight, unembed.bias, dtype=torch.float32)
        )
        for group in groups:
            pair = None if group.adapter is None else group.adapter.pairs.get("lm_head")
            if group.adapter is not None and pair is not None:
                # Computed in float32, the type of logits and adapter, so nothing is rounded.
                inner = products.linear(hidden_ND[group.rows].float(), pair.a)
                products.add_linear(logits[group.rows], inner.mul_(group.adapter.scale), pair.b)
        return logits


def _tokens(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    """Tokens and positions of all rows."""
    if all(chunk.count == 1 for chunk in chunks):
        last = [chunk.continuation.last_token for chunk in chunks]
        return torch.tensor(last), torch.tensor([chunk.start for chunk in chunks])
    tokens = [chunk.continuation.text(chunk.start, chunk.start + chunk.count) for chunk in chunks]
    positions = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
    return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(positions))
