"""The state of sampling requests and of their continuations: plain data without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from tinkex.errors import RequestFailedError

from .values import Array, SampledResult, SampleJob

if TYPE_CHECKING:
    from .processors import Shaping

__all__ = ["Chunk", "Continuation", "SamplingRequest", "Weights"]


class Weights(Protocol):
    """What the scheduler knows of an adapter."""

    @property
    def digest(self) -> bytes: ...


@dataclass(slots=True, eq=False)
class Continuation:
    """One continuation of a prompt, and what the cache holds of it."""

    request: SamplingRequest
    index: int
    random: np.random.Generator
    shaping: Shaping | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[Array, Array]] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    pages: list[int] = field(default_factory=list)
    length: int = 0  # positions in the cache
    keys: list[bytes] = field(default_factory=list)  # of the full pages that were published
    followers: list[Continuation] = field(
        default_factory=list
    )  # wait until this one has read their text

    @property
    def text_length(self) -> int:
        return len(self.request.job.prompt_T) + len(self.tokens)

    @property
    def unread(self) -> int:
        """Tokens to read before the next draw."""
        return len(self.request.job.prompt_T) + len(self.tokens) - self.length

    def text(self, start: int = 0, stop: int | None = None) -> Array:
        """Prompt and drawn tokens from position `start` to `stop`."""
        prompt_T = self.request.job.prompt_T
        length, stop = len(prompt_T), self.text_length if stop is None else stop
        prompt = prompt_T[start:stop].astype(np.int64)
        if stop <= length:
            return prompt
        drawn = np.array(self.tokens[max(0, start - length) : stop - length], np.int64)
        return np.concatenate([prompt, drawn]) if len(prompt) else drawn

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.request.job.prompt_T[-1])

    def rewind(self) -> None:
        """Reset the random generator to one number per appended token; undoes the draw of a failed step."""
        self.random = random_numbers(self.request.job, self.index)
        self.random.random(len(self.tokens))


@dataclass(slots=True, eq=False, weakref_slot=True)
class SamplingRequest:
    """An unfinished job."""

    job_id: str
    job: SampleJob
    adapter: Weights | None
    stops: frozenset[int]
    window: int  # number of last tokens to search for stop strings
    limit: int  # tokens to draw at most
    left: int  # continuations that are not finished
    new_shaping: Callable[[], Shaping | None] = lambda: None
    started: list[Continuation] = field(default_factory=list)
    back: list[Continuation] = field(default_factory=list)  # started, but not in the batch
    prompt: SampledResult | None = None
    cached_tokens: int = 0
    failure: RequestFailedError | None = None

    @property
    def waits(self) -> bool:
        return bool(self.back) or len(self.started) < self.job.num_samples

    @property
    def scored_from(self) -> int | None:
        """First prompt position whose logprob is asked for; the positions from the one before it must be read."""
        job = self.job
        if job.target_prompt_tokens is not None:
            return 1
        return job.first_scored if job.prompt_logprobs or job.topk_prompt_logprobs else None

    def take(self) -> Continuation:
        """Return the next continuation to read: one that left the batch, or else a new one."""
        if self.back:
            return self.back.pop()
        index = len(self.started)
        random, shaping = random_numbers(self.job, index), self.new_shaping()
        self.started.append(Continuation(self, index, random, shaping))
        return self.started[-1]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one continuation that a step reads."""

    continuation: Continuation
    start: int
    count: int

    @property
    def adapter(self) -> Weights | None:
        return self.continuation.request.adapter

    @property
    def completes(self) -> bool:
        """Whether the next token is drawn after this chunk."""
        return self.start + self.count == self.continuation.text_length


def random_numbers(job: SampleJob, index: int) -> np.random.Generator:
    """Random generator of one continuation; the same seed and index give the same numbers."""
    if job.seed is None:
        return np.random.Generator(np.random.Philox())
    key = (job.seed & (2**64 - 1), index)
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))
