"""What changes the distribution of a sequence beyond temperature, top-k and top-p: penalties, biases and constraints.

The penalties are those of OpenAI's API and of transformers: presence and frequency count the drawn tokens, repetition
counts prompt and drawn tokens. They are applied to the logits before the temperature. Constraints are applied when a
token is drawn, so that logprobs stay those of the unconstrained model.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from tinkex.errors import RequestFailedError

from .grammars import Matcher
from .values import Constraint, SampleJob

__all__ = ["Shaping", "shaping_of"]


class Shaping:
    """The state of one sequence from which its penalties, biases and allowed tokens are computed."""

    def __init__(self, job: SampleJob, vocab_size: int, matcher: Matcher | None) -> None:
        self._job = job
        #: The constraint of the sequence, if it has one.
        self.matcher = matcher
        self._counts_V: Tensor | None = None
        self._seen_V: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        if job.presence_penalty or job.frequency_penalty:
            self._counts_V = torch.zeros(vocab_size)
        if job.repetition_penalty != 1:
            self._seen_V = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen_V[torch.from_numpy(job.prompt_T.astype("int64"))] = True
        if job.logit_bias:
            ids, values = zip(*job.logit_bias, strict=True)
            self._bias = torch.tensor(ids), torch.tensor(values)

    @property
    def failure(self) -> RequestFailedError | None:
        return None if self.matcher is None else self.matcher.failure

    def adjust(self, logits_V: Tensor) -> None:
        """Apply penalties and biases in place."""
        if self._seen_V is not None:
            penalty = self._job.repetition_penalty
            penalized = torch.where(logits_V < 0, logits_V * penalty, logits_V / penalty)
            torch.where(self._seen_V, penalized, logits_V, out=logits_V)
        if self._counts_V is not None:
            logits_V.sub_(self._counts_V * self._job.frequency_penalty)
            logits_V.sub_((self._counts_V > 0) * self._job.presence_penalty)
        if self._bias is not None:
            logits_V.index_add_(0, *self._bias)

    def take(self, token: int) -> bool:
        """Count a drawn token; True if the constraint allows nothing after it."""
        if self._counts_V is not None:
            self._counts_V[token] += 1
        if self._seen_V is not None:
            self._seen_V[token] = True
        return self.matcher is not None and self.matcher.take(token)


def shaping_of(
    job: SampleJob,
    vocab_size: int,
    ends: Collection[int],
    matcher: Callable[[Constraint, Collection[int]], Matcher] | None,
) -> Shaping | None:
    """The shaping of a new sequence; None for a job that needs none, as most do."""
    if not job.shaped:
        return None
    found = None
    if job.constraint is not None:
        assert matcher is not None  # `check_job` refuses the job otherwise
        found = matcher(job.constraint, ends)
    return Shaping(job, vocab_size, found)
