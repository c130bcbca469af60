"""Sampling: parameters, requests, and sampled sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from tinkex._lazy import np
from tinkex.errors import InvalidInputError

from ._base import RequestModel, ResponseModel
from .inputs import ModelInput
from .tensors import Array, PromptAltTokens, TensorData, TopkLogprobs, numpy_dtype, packed

__all__ = [
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "GetSamplerResponse",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "SampleRequest",
    "SampleResponse",
    "SampleStreamChunk",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
]

StopReason: TypeAlias = Literal["length", "stop"]
TopkRows: TypeAlias = list[list[tuple[int, float]] | None]

#: The constraints of `SamplingParams`, of which a request has at most one.
CONSTRAINTS: Final = ("json_schema", "regex", "grammar")
#: The fields of `SamplingParams` that only services of tinkex know.
EXTENSIONS: Final = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    *CONSTRAINTS,
    "kept_mass",
)
_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]


class SamplingParams(RequestModel):
    """How tokens are drawn.

    `stop=None` stops at the model's end token, `stop=[]` never stops early. `max_tokens=None` samples to
    the end of the context, `temperature=0` is greedy, and `top_k=-1` and `top_p=1` turn these filters off.

    The fields from `min_p` on are extensions of the tinkex service; other services do not know them, and the client
    refuses to send them there. `presence_penalty` and `frequency_penalty` are subtracted from the logits of tokens
    that were drawn before, `repetition_penalty` divides the logits of all tokens of prompt and sample. Of
    `json_schema`, `regex` and `grammar` (Lark syntax of llguidance) at most one is given: every sample matches it.
    `kept_mass=True` reports how much probability the filters and the constraint kept at each token: a token was
    drawn with probability `exp(logprob) / kept_mass`.
    """

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(ge=0, le=1)] = 1
    # Extensions of the tinkex service. They are absent from requests unless set.
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    kept_mass: bool | None = None

    @property
    def extensions(self) -> list[str]:
        """The fields in use that only services of tinkex know."""
        return [name for name in EXTENSIONS if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _has_one_constraint(self) -> SamplingParams:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined; give one constraint")
        return self


class SampleRequest(RequestModel):
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=0)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


def _floats(values: Array) -> list[float | None]:
    """A list with None for NaN, which means "not computed"."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def flat_array(values: Any, dtype: np.dtype[Any], field: str) -> Array | None:
    """A one-dimensional array; None means NaN, which JSON does not have."""
    if values is None:
        return None
    if isinstance(values, list) and None in values:
        values = [math.nan if value is None else value for value in values]
    array = packed(values, dtype, field=field)
    if array.ndim != 1:
        raise InvalidInputError(f"must be one flat list, not {array.ndim}-dimensional", field=field)
    return array


@dataclass(init=False, eq=False, repr=False)
class SampledSequence:
    """One sampled sequence; its stop token, if there is one, is the last of `tokens`.

    The `*_np` attributes are the received arrays; the plain names are the same as lists, which the
    constructor also accepts. An unknown `stop_reason` is kept as the service wrote it.
    """

    stop_reason: StopReason | None
    sequence_id: str
    tokens_np: Array | None = None
    logprobs_np: Array | None = None
    topk_logprobs_np: TopkLogprobs | None = None
    kept_mass_np: Array | None = None

    def __init__(
        self,
        stop_reason: StopReason | None,
        sequence_id: str = "",
        tokens_np: Array | None = None,
        logprobs_np: Array | None = None,
        topk_logprobs_np: TopkLogprobs | None = None,
        *,
        tokens: Any = None,
        logprobs: Any = None,
        topk_logprobs: Any = None,
        kept_mass_np: Array | None = None,
        kept_mass: Any = None,
    ) -> None:
        if stop_reason is not None and not isinstance(stop_reason, str):
            raise InvalidInputError(
                f"must be length or stop, not {stop_reason!r:.80}", field="stop_reason"
            )
        self.stop_reason = stop_reason
        self.sequence_id = sequence_id
        self.tokens_np = (
            flat_array(tokens, numpy_dtype("int32"), "tokens") if tokens_np is None else tokens_np
        )
        if logprobs_np is None:
            logprobs_np = flat_array(logprobs, numpy_dtype("float32"), "logprobs")
        self.logprobs_np = logprobs_np
        if topk_logprobs_np is None and topk_logprobs is not None:
            topk_logprobs_np = TopkLogprobs.from_rows(topk_logprobs, field="topk_logprobs")
        self.topk_logprobs_np = topk_logprobs_np
        if kept_mass_np is None:
            kept_mass_np = flat_array(kept_mass, numpy_dtype("float32"), "kept_mass")
        self.kept_mass_np = kept_mass_np

    @cached_property
    def tokens(self) -> list[int]:
        return [] if self.tokens_np is None else self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float] | None:
        return None if self.logprobs_np is None else self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> TopkRows | None:
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.tolist()

    @cached_property
    def kept_mass(self) -> list[float] | None:
        """Per token, the probability that the filters and the constraint kept; None unless requested."""
        return None if self.kept_mass_np is None else self.kept_mass_np.tolist()

    def __repr__(self) -> str:
        return (
            f"SampledSequence(stop_reason={self.stop_reason!r}, sequence_id={self.sequence_id!r}, "
            f"tokens={self.tokens!r:.120}, logprobs={self.logprobs!r:.120})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledSequence):
            return NotImplemented
        names = ("stop_reason", "tokens", "logprobs", "topk_logprobs", "kept_mass")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]


@dataclass(init=False, eq=False)
class SampleResponse:
    """The sequences of one request, and the requested facts about the prompt.

    As in `SampledSequence`, prompt logprobs may be given as arrays or as lists.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: Array | None = None
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        prompt_logprobs_np: Array | None = None,
        topk_prompt_logprobs_np: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_cache_hit_tokens: int = 0,
        prompt_alt_tokens: PromptAltTokens | None = None,
        *,
        prompt_logprobs: Any = None,
        topk_prompt_logprobs: Any = None,
    ) -> None:
        self.sequences = sequences
        if prompt_logprobs_np is None:
            prompt_logprobs_np = flat_array(
                prompt_logprobs, numpy_dtype("float32"), "prompt_logprobs"
            )
        self.prompt_logprobs_np = prompt_logprobs_np
        if topk_prompt_logprobs_np is None and topk_prompt_logprobs is not None:
            topk_prompt_logprobs_np = TopkLogprobs.from_rows(
                topk_prompt_logprobs, field="topk_prompt_logprobs"
            )
        self.topk_prompt_logprobs_np = topk_prompt_logprobs_np
        self.target_prompt_logprobs = target_prompt_logprobs
        self.prompt_cache_hit_tokens = prompt_cache_hit_tokens
        self.prompt_alt_tokens = prompt_alt_tokens

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """One per prompt token; None where it was not computed, as for the first token."""
        return None if self.prompt_logprobs_np is None else _floats(self.prompt_logprobs_np)

    @cached_property
    def topk_prompt_logprobs(self) -> TopkRows | None:
        rows = self.topk_prompt_logprobs_np
        return None if rows is None else rows.tolist()


@dataclass(frozen=True, slots=True)
class SampleStreamChunk:
    """One token of a streamed sample, its end, or an error.

    `token` is the token's text if the service sends it, else empty; then decode `token_id`.
    """

    token: str = ""
    token_id: int | None = None
    index: int = 0
    finish_reason: str | None = None
    total_tokens: int | None = None
    logprob: float | None = None
    error: str | None = None

    @property
    def event_type(self) -> Literal["token", "done", "error"]:
        if self.error is not None:
            return "error"
        return "token" if self.finish_reason is None else "done"

    @property
    def done(self) -> bool:
        return self.event_type != "token"


class CreateSamplingSessionRequest(RequestModel):
    session_id: str
    sampling_session_seq_id: Annotated[int, Field(ge=0)]
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(ResponseModel):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(RequestModel):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(ResponseModel):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: Annotated[int, Field(ge=1)]


class GetSamplerResponse(ResponseModel):
    sampler_id: str
    base_model: str
    model_path: str | None = None
    tokenizer_id: str | None = None  # sent by the tinkex service only
    tokenizer_sha256: str | None = None  # of the files that the tinkex service offers for download
