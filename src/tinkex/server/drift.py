"""How far the logprobs of a sampler are from those of the trainer, on the same tokens.

Reinforcement learning depends on this gap: it trains on logprobs of the sampler as if they were the trainer's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tinkex.engine.values import Array, SampledResult, SampleJob

__all__ = ["SHARE", "Drift", "checking_job"]

#: One in this many requests is checked.
SHARE: Final = 50


@dataclass
class Drift:
    """Sums over the tokens that were checked: absolute differences of logprobs."""

    chance: Callable[[], float] = random.random
    tokens: int = 0
    total: float = 0.0
    worst: float = 0.0

    def wants(self, job: SampleJob, result: SampledResult) -> bool:
        """Whether to check this request: filters change logprobs on purpose, so only plain ones are compared."""
        plain = job.temperature == 1 and job.top_k <= 0 and job.top_p == 1 and job.min_p == 0
        return plain and len(result.tokens[0]) > 0 and self.chance() * SHARE < 1

    def add(self, sampled: Array, trained: Array) -> None:
        gaps = np.abs(np.asarray(sampled, np.float64) - trained)
        self.tokens += len(gaps)
        self.total += float(gaps.sum())
        self.worst = max(self.worst, float(gaps.max(initial=0.0)))


def checking_job(job: SampleJob, result: SampledResult) -> SampleJob:
    """A request for the trainer's logprobs of the first sequence of a result."""
    tokens = result.tokens[0]
    return replace(
        job,
        prompt_T=np.concatenate([job.prompt_T, tokens]),
        num_samples=1,
        max_tokens=1,
        prompt_logprobs=True,
        prompt_logprobs_last_n=len(tokens),
        topk_sample_logprobs=0,
        stream=False,
    )
