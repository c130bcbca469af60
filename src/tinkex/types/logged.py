"""What a training loop reports about its run: metrics by step, and samples with their rewards."""

from typing import Annotated

from pydantic import Field

from ._base import RequestModel, ResponseModel

__all__ = ["LogEntry", "LogRequest", "LogResponse", "LoggedSample"]

#: Seconds around 1970 that a browser has a date for.
_DATES = 8.64e12

Text = Annotated[str, Field(max_length=32 << 20)]


class LoggedSample(RequestModel):
    """A prompt and an answer of the model. All fields are optional, but one of `text` and `tokens` must be given.

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


class LogEntry(RequestModel):
    """The report of one step; `time` is in seconds since 1970, by default when the service receives it."""

    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    time: Annotated[float, Field(ge=-_DATES, le=_DATES, allow_inf_nan=False)] | None = None
    metrics: dict[str, float] = {}
    samples: list[LoggedSample] = []


class LogRequest(RequestModel):
    entries: Annotated[list[LogEntry], Field(max_length=10_000)]


class LogResponse(ResponseModel):
    """How many metrics and samples the service accepted."""

    metrics: int = 0
    samples: int = 0
