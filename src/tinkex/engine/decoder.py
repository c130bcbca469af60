"""Run a model one token at a time, for many sequences at once.

`LeanDecoder` runs models of the Llama family: it calls the matrix products itself, fuses projections that read the
same input, and keeps keys and values in one tensor per layer. `PlainDecoder` runs every other model with
transformers' own forward, one sequence at a time.

Sequences of different users share a batch, and the values of one may be NaN. So the cache beyond a sequence's length
is always zero: a masked position still takes part in the arithmetic, and 0 · NaN is NaN.

Shapes: B sequences in the batch, T positions, D hidden, H query heads, G key-value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .llama import LlamaBody, LlamaLayer, Rows, rms_norm
from .lora import Adapter
from .trainer import LanguageModel

__all__ = ["Decoder", "Rows", "decoder_for"]

_GROW: Final = 64


class Decoder(Protocol):
    """Keeps the state of sequences in slots 0 … B-1; the caller assigns sequences to slots."""

    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Tensor], adapter: Adapter | None
    ) -> list[Tensor]:
        """Read prompts into reserved slots; return the hidden states of each prompt."""

    def step(self, tokens_B: Tensor, lengths: Sequence[int], groups: Sequence[Rows]) -> Tensor:
        """Read one token into each of the first B slots, at position `lengths[slot]`; return the next logits."""

    def prompt_logits(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        """Compute the logits of hidden states that `prefill` returned."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""

    def size(self, slots: int, length: int) -> int:
        """Bytes of memory that `slots` sequences of `length` positions need."""

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of at most `length` positions; state outside of that is lost."""

    def release(self) -> None:
        """Free the memory; the state of all sequences is lost."""

    def forget(self, adapter: Adapter) -> None:
        """Drop tensors that were prepared for an adapter; it is not used any more."""


def decoder_for(base: LanguageModel) -> Decoder:
    if base.llama is not None:
        return LeanDecoder(base, base.llama)
    return PlainDecoder(base)


class LeanDecoder:
    """Decoder for the Llama family, with minimal overhead between the matrix products."""

    def __init__(self, base: LanguageModel, body: LlamaBody) -> None:
        self._base = base
        self._body = body
        self._caches = [_Cache() for _ in body.layers]
        self._slots = self._capacity = 0
        #: For each slot, the number of positions that may be nonzero.
        self._filled: list[int] = []

    # -- the cache ---------------------------------------------------------------------------

    def size(self, slots: int, length: int) -> int:
        first = self._body.layers[0]
        numbers = 2 * len(self._caches) * first.groups * first.size
        size: int = slots * _rounded(length) * numbers * self._base.dtype.itemsize
        return size

    @torch.inference_mode()
    def reserve(self, slots: int, length: int) -> None:
        """Resize the cache.

        Every slot has the capacity of the longest sequence. A larger cache is kept until less than half of it is
        needed: sequences join and leave all the time, and every resize copies the cache.
        """
        needed = slots, _rounded(length)
        wanted = max(self._slots, needed[0]), max(self._capacity, needed[1])
        if wanted[0] * wanted[1] > 2 * needed[0] * needed[1]:
            wanted = needed
        if wanted == (self._slots, self._capacity):
            return
        kept, filled = min(self._slots, wanted[0]), min(self._capacity, wanted[1])
        first = self._body.layers[0]
        shape = (wanted[0], first.groups, wanted[1], first.size)
        for cache in self._caches:
            keys = torch.zeros(shape, dtype=self._base.dtype, device=self._base.device)
            values = torch.zeros_like(keys)
            if kept:
                keys[:kept, :, :filled] = cache.keys[:kept, :, :filled]
                values[:kept, :, :filled] = cache.values[:kept, :, :filled]
            cache.keys, cache.values = keys, values
        self._slots, self._capacity = wanted
        self._filled = [min(each, filled) for each in self._filled[:kept]]
        self._filled += [0] * (wanted[0] - kept)

    def release(self) -> None:
        self._slots = self._capacity = 0
        self._filled = []
        self._caches = [_Cache() for _ in self._caches]

    @torch.inference_mode()  # a tensor that was created in inference mode can be changed only in it
    def copy(self, source: int, target: int, length: int) -> None:
        for cache in self._caches:
            cache.keys[target, :, :length] = cache.keys[source, :, :length]
            cache.values[target, :, :length] = cache.values[source, :, :length]
        self._clear(target, length)

    def _clear(self, slot: int, length: int) -> None:
        """Zero the values that a slot's previous sequence left beyond `length`."""
        beyond = slice(length, self._filled[slot])
        if beyond.start < beyond.stop:
            for cache in self._caches:
                cache.keys[slot, :, beyond] = 0
                cache.values[slot, :, beyond] = 0
        self._filled[slot] = length

    def forget(self, adapter: Adapter) -> None:
        for layer in self._body.layers:
            for projection in layer.projections:
                projection.forget(adapter)

    # -- running -----------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Tensor], adapter: Adapter | None
    ) -> list[Tensor]:
        lengths = [len(prompt) for prompt in prompts]
        longest, count = max(lengths), len(prompts)
        tokens_BT = torch.zeros(count, longest, dtype=torch.long, device=self._base.device)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
        x = self._body.module.embed_tokens(tokens_BT).flatten(0, 1)
        cos, sin = self._body.rotation(x, torch.arange(longest, device=x.device)[None])
        groups = (Rows(adapter),)
        where = torch.tensor(list(slots), device=x.device)
        padding = None
        if min(lengths) < longest:
            lengths_B = torch.tensor(lengths, device=x.device)
            padding = _beyond(longest, lengths_B)[:, None, :, None]
        for layer, cache in zip(self._body.layers, self._caches, strict=True):
            qkv = layer.qkv.infer(rms_norm(x, *layer.before), groups).view(count, longest, -1)
            q, k, v = layer.split(qkv, cos, sin)
            if padding is not None:
                k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
            cache.keys[where, :, :longest] = k
            cache.values[where, :, :longest] = v
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = _finish(layer, x, mixed.transpose(1, 2).reshape(len(x), -1), groups)
        for slot in slots:
            self._clear(slot, longest)  # the padding before `longest` is zero already
        hidden_BTD = self._body.module.norm(x).view(count, longest, -1)
        return [hidden_BTD[row, :length] for row, length in enumerate(lengths)]

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, lengths: Sequence[int], groups: Sequence[Rows]) -> Tensor:
        count, longest = len(tokens_B), max(lengths) + 1
        x = self._body.module.embed_tokens(tokens_B)
        lengths_B = torch.tensor(lengths, device=x.device)
        cos, sin = self._body.rotation(x, lengths_B[:, None])
        mask = None
        if min(lengths) + 1 < longest:
            mask = torch.zeros(count, longest, dtype=x.dtype, device=x.device)
            mask = mask.masked_fill_(_beyond(longest, lengths_B + 1), -torch.inf)[:, None, None]
        self._filled[:count] = [length + 1 for length in lengths]
        rows = torch.arange(count, device=x.device)
        for layer, cache in zip(self._body.layers, self._caches, strict=True):
            qkv = layer.qkv.infer(rms_norm(x, *layer.before), groups).view(count, 1, -1)
            q, k, v = layer.split(qkv, cos, sin)
            cache.keys[rows, :, lengths_B] = k[:, :, 0]
            cache.values[rows, :, lengths_B] = v[:, :, 0]
            keys, values = cache.keys[:count, :, :longest], cache.values[:count, :, :longest]
            q = q.reshape(count, layer.groups, -1, layer.size) * layer.size**-0.5
            scores = torch.matmul(q, keys.transpose(2, 3))
            if mask is not None:
                scores.add_(mask)
            mixed = torch.matmul(scores.softmax(-1), values).view(count, -1)
            x = _finish(layer, x, mixed, groups)
        return self._logits(self._body.module.norm(x), groups)

    def _logits(self, hidden: Tensor, groups: Sequence[Rows]) -> Tensor:
        logits = self._base.logits(hidden)
        name = "lm_head"
        for group in groups:
            pair = None if group.adapter is None else group.adapter.pairs.get(name)
            if group.adapter is None or pair is None:
                continue
            # Computed in float32, the type of logits and adapter, so nothing is rounded.
            rows = (hidden if group.rows is None else hidden.index_select(0, group.rows)).float()
            inner = functional.linear(rows, pair.a).mul_(group.adapter.scale)
            if group.rows is None:
                logits.addmm_(inner, pair.b.t())
            else:
                logits.index_add_(0, group.rows, functional.linear(inner, pair.b))
        return logits

    def prompt_logits(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        with torch.inference_mode():
            return self._logits(hidden, (Rows(adapter, None),))


def _beyond(longest: int, lengths_B: Tensor) -> Tensor:
    """Mask of the positions 0 … longest - 1 that are beyond each sequence's length."""
    return torch.arange(longest, device=lengths_B.device) >= lengths_B[:, None]


def _rounded(length: int) -> int:
    return -(-length // _GROW) * _GROW


@dataclass
class _Cache:
    """Keys and values of one layer, each with shape slots × G × T × E."""

    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))


def _finish(layer: LlamaLayer, x: Tensor, mixed: Tensor, groups: Sequence[Rows]) -> Tensor:
    """The second half of a layer: attention's output projection and the feed-forward block."""
    x = x + layer.out.infer(mixed, groups)
    gate, up = layer.gate_up.infer(rms_norm(x, *layer.after), groups).chunk(2, dim=-1)
    return x + layer.down.infer(layer.activation(gate).mul_(up), groups)


class PlainDecoder:
    """Decoder for any model; uses transformers' forward and cache."""

    def __init__(self, base: LanguageModel) -> None:
        self._base = base
        self._caches: dict[int, Any] = {}

    def size(self, slots: int, length: int) -> int:
        # An upper estimate: few model families have a larger cache per position.
        config = self._base.config.get_text_config()
        numbers = 2 * config.num_hidden_layers * config.hidden_size
        size: int = slots * length * numbers * self._base.dtype.itemsize
        return size

    def reserve(self, slots: int, length: int) -> None:
        """Caches grow on demand; drop those of slots that are no longer in use."""
        for slot in [slot for slot in self._caches if slot >= slots]:
            del self._caches[slot]

    def release(self) -> None:
        self._caches.clear()

    def forget(self, adapter: Adapter) -> None:
        """Nothing is prepared per adapter."""

    def copy(self, source: int, target: int, length: int) -> None:
        import copy

        self._caches[target] = copy.deepcopy(self._caches[source])

    @torch.inference_mode()
    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Tensor], adapter: Adapter | None
    ) -> list[Tensor]:
        return [
            self._forward(slot, prompt[None], adapter, fresh=True)
            for slot, prompt in zip(slots, prompts, strict=True)
        ]

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, lengths: Sequence[int], groups: Sequence[Rows]) -> Tensor:
        logits: list[Tensor] = [torch.empty(0)] * len(tokens_B)
        for group in groups:
            rows = range(len(tokens_B)) if group.rows is None else group.rows.tolist()
            for row in rows:
                hidden = self._forward(row, tokens_B[row][None, None], group.adapter, fresh=False)
                logits[row] = self.prompt_logits(hidden, group.adapter)[0]
        return torch.stack(logits)

    def prompt_logits(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        with torch.inference_mode():
            return self._with(adapter, lambda: self._base.logits(hidden))

    def _forward(
        self, slot: int, tokens: Tensor, adapter: Adapter | None, *, fresh: bool
    ) -> Tensor:
        from transformers import DynamicCache

        if fresh:
            self._caches[slot] = DynamicCache(config=self._base.config)
        cache = self._caches[slot]

        def run() -> Tensor:
            output = self._base.body(input_ids=tokens, past_key_values=cache, use_cache=True)
            states: Tensor = output.last_hidden_state[0]
            return states

        return self._with(adapter, run)

    def _with(self, adapter: Adapter | None, run: Any) -> Tensor:
        if adapter is None:
            result: Tensor = run()
            return result
        with adapter.switched_on(self._base.layers):
            switched: Tensor = run()
            return switched
