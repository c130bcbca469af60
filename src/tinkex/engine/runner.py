"""Run the steps that the scheduler plans: everything in sampling that computes with tensors, except drawing.

Shapes: N rows of a step, B continuations to draw for, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .batch_scheduler import Fork, Step
from .continuations import Chunk, Continuation, SamplingRequest
from .decoder import Decoder
from .llama import Rows
from .lora import Adapter
from .prompt_scores import PromptScores

__all__ = ["Runner"]


class Runner:
    """Reads chunks, and scores prompts on the way."""

    def __init__(self, decoder: Decoder, logit_positions: int) -> None:
        self.decoder = decoder
        self._logit_positions = logit_positions
        self._scores: WeakKeyDictionary[SamplingRequest, PromptScores] = WeakKeyDictionary()

    def run(self, step: Step) -> tuple[Tensor, list[SamplingRequest]]:
        """Read the chunks of a step.

        Returns the next logits of the chunks that complete their text, and the requests whose prompt scores are
        not finite.
        """
        hidden_ND = self.decoder.read(step, _groups(step.chunks, [c.count for c in step.chunks]))
        failed, ends, first = [], [], 0
        for chunk in step.chunks:
            request = chunk.continuation.request
            if request.prompt is None and request.scored_from is not None:
                states = hidden_ND[first : first + chunk.count]
                if not self._score(request, request.scored_from, chunk, states):
                    failed.append(request)
            first += chunk.count
            if chunk.completes:
                ends.append(first - 1)
        return self._logits(hidden_ND, step.chunks, ends), failed

    def _logits(self, hidden_ND: Tensor, chunks: Sequence[Chunk], ends: Sequence[int]) -> Tensor:
        complete = [chunk for chunk in chunks if chunk.completes]
        if not complete:
            return hidden_ND.new_empty(0, 0)
        if len(ends) < len(hidden_ND):
            hidden_ND = hidden_ND.index_select(0, torch.tensor(ends, device=hidden_ND.device))
        return self.decoder.logits(hidden_ND, _groups(complete, [1] * len(complete))).cpu()

    def _score(self, request: SamplingRequest, first: int, chunk: Chunk, states_ND: Tensor) -> bool:
        scores = self._scores.get(request)
        if scores is None:
            scores = PromptScores(request.job, first, self._logit_positions)
            self._scores[request] = scores
        groups = (Rows(cast("Adapter | None", request.adapter)),)
        prompt_left = max(0, len(request.job.prompt_T) - chunk.start)
        finite = scores.add(
            chunk.start, states_ND[:prompt_left], lambda rows: self.decoder.logits(rows, groups)
        )
        if chunk.start + chunk.count >= len(request.job.prompt_T):
            request.prompt = scores.result()
            del self._scores[request]
        return finite

    def fork(self, forks: Iterable[Fork]) -> None:
        for fork in forks:
            self.decoder.fork(fork)

    def leave(self, departed: list[Continuation]) -> None:
        """Drop the state of continuations that left the batch, and forget them."""
        if departed:
            self.decoder.leave(departed)
            departed.clear()


def _groups(chunks: Sequence[Chunk], counts: Sequence[int]) -> tuple[Rows, ...]:
    """Rows by adapter; chunks with the same adapter stand together."""
    groups: list[Rows] = []
    first, begin = 0, 0
    for index, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        first += count
        if index + 1 == len(chunks) or chunks[index + 1].adapter is not chunk.adapter:
            groups.append(Rows(cast("Adapter | None", chunk.adapter), slice(begin, first)))
            begin = first
    return tuple(groups)
