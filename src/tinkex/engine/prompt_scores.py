"""Logprobs of a prompt's own tokens, of its most likely tokens, and of given targets.

Shapes: T positions of the prompt, N positions of a chunk, K alternatives, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from . import drawing
from .values import Array, SampledResult, SampleJob

__all__ = ["PromptScores"]

_EMPTY: Final = -99999.0


class PromptScores:
    """The scores of one prompt, filled in as its chunks are read, some positions at a time."""

    def __init__(self, job: SampleJob, first: int, positions: int) -> None:
        self._job, self._first, self._positions = job, first, positions
        length, k = len(job.prompt_T), job.topk_prompt_logprobs
        self._tokens_T = torch.from_numpy(job.prompt_T.astype(np.int64))
        self._scores_T = np.full(length, np.nan, np.float32)
        self._ids_TK = np.zeros((length, k), np.int32)
        self._values_TK = np.full((length, k), _EMPTY, np.float32)
        targets = job.target_prompt_tokens
        self._targets: Array | None = (
            None if targets is None else np.zeros(targets.shape, np.float32)
        )

    def add(self, start: int, hidden_ND: Tensor, logits_of: Callable[[Tensor], Tensor]) -> bool:
        """Score what the states of the positions from `start` on predict; return whether all of it is finite."""
        first = max(self._first, start + 1)
        last = min(len(self._tokens_T), start + 1 + len(hidden_ND))
        for begin in range(first, last, self._positions):
            end = min(begin + self._positions, last)
            logits_NV = logits_of(hidden_ND[begin - 1 - start : end - 1 - start]).cpu()
            normalizers_N1 = logits_NV.logsumexp(-1, keepdim=True)
            if not normalizers_N1.isfinite().all():
                return False
            self._keep(begin, end, logits_NV, normalizers_N1)
        return True

    def _keep(self, begin: int, end: int, logits_NV: Tensor, normalizers_N1: Tensor) -> None:
        found = logits_NV.gather(-1, self._tokens_T[begin:end, None]) - normalizers_N1
        self._scores_T[begin:end] = found[:, 0].numpy()
        if k := self._job.topk_prompt_logprobs:
            best = drawing.topk(logits_NV, k, normalizers_N1)
            self._ids_TK[begin:end], self._values_TK[begin:end] = best
        targets = self._job.target_prompt_tokens
        if targets is not None and self._targets is not None:
            here = torch.from_numpy(targets[begin - 1 : end - 1].astype(np.int64))
            found = logits_NV.gather(-1, here.clamp_min(0)) - normalizers_N1
            self._targets[begin - 1 : end - 1] = torch.where(here < 0, 0.0, found).numpy()

    def result(self) -> SampledResult:
        job = self._job
        unasked = slice(job.first_scored)  # computed only for the targets
        self._scores_T[unasked], self._ids_TK[unasked] = np.nan, 0
        self._values_TK[unasked] = _EMPTY
        return SampledResult(
            [],
            [],
            [],
            prompt_logprobs_T=self._scores_T if job.prompt_logprobs else None,
            topk_prompt=(self._ids_TK, self._values_TK) if job.topk_prompt_logprobs else None,
            target_prompt_logprobs=self._targets,
        )
