"""What a training loop reports about its run: metrics by step, and samples with their rewards."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, field_serializer

from ._base import RequestModel, ResponseModel

__all__ = ["LogEntry", "LogRequest", "LogResponse", "LoggedSample"]

Text = Annotated[str, Field(max_length=32 << 20)]


def _readable(number: float | None) -> float | str | None:
    """JSON has no NaN and no infinities; as text every reader takes them for numbers."""
    return number if number is None or math.isfinite(number) else str(number)


class LoggedSample(RequestModel):
    """A prompt and what a model made of it. Everything is optional but one of `text` and `tokens`.

    `logprobs` has one entry for each of `tokens`, `alternatives` the most likely tokens there as pairs of token and
    logprob. Samples with the same `group` belong together, such as all answers to one question. The texts of tokens
    are looked up in the tokenizer of the run's base model.
    """

    prompt: Text | None = None
    prompt_tokens: list[int] | None = None
    text: Text | None = None
    tokens: list[int] | None = None
    logprobs: list[float | None] | None = None
    alternatives: list[list[tuple[int, float]]] | None = None
    stop_reason: str | None = None
    reward: float | None = None
    group: str | None = None
    metadata: dict[str, str] | None = None

    @field_serializer("reward")
    def _write_reward(self, reward: float | None) -> Any:
        return _readable(reward)

    @field_serializer("logprobs")
    def _write_logprobs(self, logprobs: list[float | None] | None) -> Any:
        return None if logprobs is None else [_readable(number) for number in logprobs]


class LogEntry(RequestModel):
    """What is reported of one step; `time` is in seconds since 1970, by default when the service receives it."""

    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    time: float | None = None
    metrics: dict[str, float] = {}
    samples: list[LoggedSample] = []

    @field_serializer("metrics")
    def _write_metrics(self, metrics: dict[str, float]) -> Any:
        return {name: _readable(value) for name, value in metrics.items()}


class LogRequest(RequestModel):
    entries: Annotated[list[LogEntry], Field(max_length=10_000)]


class LogResponse(ResponseModel):
    """How many metrics and samples were taken."""

    metrics: int = 0
    samples: int = 0
