"""Run a model for the continuations of a batch.

`LeanDecoder` runs models of the Llama family: it calls the matrix products itself and keeps keys and values in pages.
`PlainDecoder` runs every other model with transformers' own forward, one sequence at a time.

Shapes: N rows (tokens of all chunks, one after another), D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .batch_scheduler import Fork, Step
from .continuations import Continuation
from .lean_decoder import LeanDecoder
from .llama import Rows
from .lora import Adapter
from .trainer import LanguageModel

__all__ = ["Decoder", "PlainDecoder", "decoder_for"]


class Decoder(Protocol):
    """Keeps keys and values of the continuations in a batch."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether continuations can share pages."""

    @property
    def page_bytes(self) -> int: ...

    def read(self, step: Step, groups: tuple[Rows, ...]) -> Tensor:
        """Read the chunks of a step; return the hidden states of all rows, in the order of the chunks."""

    def logits(self, hidden_ND: Tensor, groups: Sequence[Rows]) -> Tensor:
        """Compute the logits of hidden states that `read` returned."""

    def fork(self, fork: Fork) -> None:
        """Give a continuation the keys and values of another one with the same text."""

    def leave(self, continuations: Iterable[Continuation]) -> None:
        """Drop the state of continuations that left the batch."""

    def release(self) -> None:
        """Free the memory; the state of all continuations is lost."""

    def forget(self, adapter: Adapter) -> None:
        """Drop tensors that were prepared for an adapter; it is not used any more."""


def decoder_for(base: LanguageModel, page: int) -> Decoder:
    if base.llama is not None:
        return LeanDecoder(base, base.llama, page)
    return PlainDecoder(base, page)


class PlainDecoder:
    """Decoder for any model; uses transformers' forward and cache."""

    shares_prefixes: Final = False

    def __init__(self, base: LanguageModel, page: int) -> None:
        self._base = base
        self._page = page
        self._caches: dict[Continuation, Any] = {}

    @property
    def page_bytes(self) -> int:
        # An upper estimate: few model families have a larger cache per position.
        config = self._base.config.get_text_config()
        numbers = 2 * config.num_hidden_layers * config.hidden_size
        size: int = self._page * numbers * self._base.dtype.itemsize
        return size

    def fork(self, fork: Fork) -> None:
        self._caches[fork.target] = copy.deepcopy(self._caches[fork.source])

    def leave(self, continuations: Iterable[Continuation]) -> None:
        for one in continuations:
            self._caches.pop(one, None)

    def release(self) -> None:
        self._caches.clear()

    def forget(self, adapter: Adapter) -> None:
        """Nothing is prepared per adapter."""

    @torch.inference_mode()
    def read(self, step: Step, groups: tuple[Rows, ...]) -> Tensor:
        from transformers import DynamicCache

        states = []
        for chunk in step.chunks:
            one = chunk.continuation
            if chunk.start == 0:
                self._caches[one] = DynamicCache(config=self._base.config)
            text = one.text(chunk.start, chunk.start + chunk.count)
            tokens = torch.from_numpy(text)[None].to(self._base.device)
            states.append(self._with(chunk.adapter, self._forward(tokens, self._caches[one])))
        return torch.cat(states)

    def _forward(self, tokens: Tensor, cache: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            output = self._base.body(input_ids=tokens, past_key_values=cache, use_cache=True)
            states: Tensor = output.last_hidden_state[0]
            return states

        return run

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor, groups: Sequence[Rows]) -> Tensor:
        found = []
        for group in groups:
            run = partial(self._base.logits, hidden_ND[group.rows])
            found.append(self._with(group.adapter, run))
        return torch.cat(found)

    def _with(self, adapter: Any, run: Callable[[], Tensor]) -> Tensor:
        if adapter is None:
            return run()
        with adapter.switched_on(self._base.layers):
            return run()
