"""Converts wire requests into engine values; refuses what this service does not support, naming the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import orjson

from tinkex.engine.checks import is_float32
from tinkex.engine.values import (
    MAX_RANK,
    AdamStep,
    Array,
    Constraint,
    Example,
    LoraSpec,
    PassJob,
    SampleJob,
)
from tinkex.errors import InvalidInputError
from tinkex.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    LoraConfig,
    ModelInput,
    OptimizerConfig,
    OptimParamsBase,
    SampleRequest,
    SamplingParams,
    TensorData,
)
from tinkex.types.training import MAX_TTL

__all__ = [
    "SampleLimits",
    "adam_step",
    "check_optimizer",
    "check_ttl",
    "lora_spec",
    "sample_job",
    "training_pass",
]

MIN_TTL: Final = 3600
#: Most elements of one tensor after a sparse one is made dense: a hundred full contexts of 20 alternatives.
MAX_ELEMENTS: Final = 1 << 26


def tokens_of(value: ModelInput, field: str) -> Array:
    parts = []
    for index, chunk in enumerate(value.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise InvalidInputError(
                f"is a chunk of type {chunk.type}; the models of this service accept only text tokens",
                field=f"{field}.chunks.{index}",
            )
        parts.append(chunk.tokens_np)
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def training_pass(inputs: ForwardBackwardInput, *, backward: bool) -> PassJob:
    """The engine's pass for a request."""
    examples = [_example(datum, f"data.{index}") for index, datum in enumerate(inputs.data)]
    return PassJob(examples, inputs.loss_fn, dict(inputs.loss_fn_config or {}), backward)


def _example(datum: Datum, field: str) -> Example:
    tensors = {
        name: dense(tensor, f"{field}.{name}") for name, tensor in datum.loss_fn_inputs.items()
    }
    return Example(tokens_of(datum.model_input, f"{field}.model_input"), tensors)


def dense(tensor: TensorData, field: str) -> Array:
    """The values of a tensor; elements that a sparse one omits are zero."""
    size = int(np.prod(np.asarray(tensor.shape or [0], dtype=np.float64)))
    if tensor.is_sparse and size > MAX_ELEMENTS:
        raise InvalidInputError(
            f"would have {size} elements as a dense tensor, more than {MAX_ELEMENTS}", field=field
        )
    return tensor.to_numpy()


def adam_step(params: OptimParamsBase) -> AdamStep:
    if not isinstance(params, AdamParams):
        raise InvalidInputError(
            f"this model was created with AdamW and does not accept {type(params).__name__}",
            field="optim_params",
        )
    return AdamStep(**dict(params))


def check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidInputError(
            f"this service trains with adamw, not {config.type!r:.80}",
            field="optimizer_config.type",
        )


def lora_spec(config: LoraConfig | None, seed: int) -> LoraSpec:
    config = config or LoraConfig()
    if config.rank > MAX_RANK:
        raise InvalidInputError(
            f"must be at most {MAX_RANK}, got {config.rank}", field="lora_config.rank"
        )
    return LoraSpec(
        rank=config.rank,
        seed=seed if config.seed is None else config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )


def check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise InvalidInputError(
            f"must be between {MIN_TTL} seconds (an hour) and {MAX_TTL} (ten years), "
            f"got {ttl_seconds}",
            field="ttl_seconds",
        )


@dataclass(frozen=True)
class SampleLimits:
    """Limits of one sampling request; the fields are settings of the service."""

    max_samples: int = 1024
    #: Every stop string is searched for after every token of every sequence.
    max_stop_strings: int = 64
    #: Total UTF-8 bytes of all stop strings: the searched text is as long as the longest.
    max_stop_bytes: int = 1024
    max_stop_tokens: int = 4096
    #: Alternatives per position.
    max_topk: int = 1024
    #: Alternatives and targets with a logprob in one result, over all positions and sequences; the default takes 32 MB.
    max_alternatives: int = 1 << 22
    #: Bytes of a JSON schema, regular expression or grammar; the engine compiles it between two steps.
    max_grammar_bytes: int = 64 << 10
    #: Seconds of computing that compiling it may take.
    max_grammar_seconds: float = 2.0
    #: Entries of `logit_bias`.
    max_biases: int = 4096

    def check(self, request: SampleRequest, prompt_length: int, context_length: int) -> None:
        """Refuse a request over a limit before memory is allocated for it."""
        self._refuse_above("max_samples", request.num_samples, "num_samples")
        stop = request.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        texts = [item for item in stops if isinstance(item, str)]
        field = "sampling_params.stop"
        self._refuse_above("max_stop_strings", len(texts), field, "strings")
        self._refuse_above(
            "max_stop_bytes", sum(len(text.encode()) for text in texts), field, "bytes"
        )
        self._refuse_above("max_stop_tokens", len(stops) - len(texts), field, "token ids")
        constraint = _constraint(request.sampling_params)
        if constraint is not None:
            size = len(constraint.text.encode())
            self._refuse_above(
                "max_grammar_bytes", size, f"sampling_params.{constraint.kind}", "bytes"
            )
        biases = len(request.sampling_params.logit_bias or ())
        self._refuse_above("max_biases", biases, "sampling_params.logit_bias", "tokens")
        drawn = _most_drawn(request.sampling_params.max_tokens, context_length)
        targets = request.target_prompt_logprobs
        shape = [] if targets is None else targets.shape or []
        alternatives = {
            "topk_prompt_logprobs": request.topk_prompt_logprobs * prompt_length,
            "topk_sample_logprobs": request.topk_sample_logprobs * drawn * request.num_samples,
            "target_prompt_logprobs": math.prod(shape),
        }
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            self._refuse_above("max_topk", getattr(request, name), name)
        for name, count in alternatives.items():
            self._refuse_above("max_alternatives", count, name, "logprobs in the result")

    def check_together(self, jobs: Sequence[SampleJob], context_length: int) -> None:
        """Refuse jobs whose results make one answer with too many alternatives."""
        alternatives = {
            "topk_prompt_logprobs": sum(
                job.topk_prompt_logprobs * len(job.prompt_T) for job in jobs
            ),
            "topk_sample_logprobs": sum(
                job.topk_sample_logprobs
                * _most_drawn(job.max_tokens, context_length)
                * job.num_samples
                for job in jobs
            ),
        }
        for name, count in alternatives.items():
            self._refuse_above(
                "max_alternatives", count, name, "logprobs in the answers to all prompts"
            )

    def _refuse_above(self, setting: str, asked: int, field: str, unit: str = "") -> None:
        limit: int = getattr(self, setting)
        if asked > limit:
            what = f"{limit} {unit}".strip()
            raise InvalidInputError(
                f"must be at most {what}, got {asked}; the limit is the service's setting {setting}",
                field=field,
            )


def _most_drawn(max_tokens: int | None, context_length: int) -> int:
    """The tokens that a sequence may get."""
    return context_length if max_tokens is None else min(max_tokens, context_length)


def sample_job(
    request: SampleRequest, sampler_id: str, *, limits: SampleLimits, context_length: int
) -> SampleJob:
    """The engine's job for a request."""
    params = request.sampling_params
    prompt = tokens_of(request.prompt, "prompt")
    limits.check(request, len(prompt), context_length)
    if request.prompt_alt_tokens_k:
        raise InvalidInputError(
            "this service does not support alternative prompt tokens; "
            "topk_prompt_logprobs gives the likeliest tokens of each position",
            field="prompt_alt_tokens_k",
        )
    _check_shaping(params)
    stop_tokens, stop_texts = _stops(params.stop)
    targets = request.target_prompt_logprobs
    return SampleJob(
        sampler_id=sampler_id,
        prompt_T=prompt,
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop_tokens=stop_tokens,
        stop_texts=stop_texts,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_tokens=None if targets is None else targets.to_numpy(pad_value=-1),
        min_p=params.min_p or 0.0,
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=tuple((params.logit_bias or {}).items()),
        constraint=_constraint(params),
        kept_mass=bool(params.kept_mass),
    )


def _check_shaping(params: SamplingParams) -> None:
    """Refuse parameters that are not finite as float32, the type of logits, and would spoil those of any model."""
    for token, bias in (params.logit_bias or {}).items():
        if not is_float32(bias):
            raise InvalidInputError(
                f"the bias {bias} of token {token!s:.40} is not a finite number of 32 bits",
                field="sampling_params.logit_bias",
            )
    penalty = params.repetition_penalty
    if penalty is not None and not (is_float32(penalty) and is_float32(1 / penalty)):
        raise InvalidInputError(
            f"{penalty} or its inverse is not a finite number of 32 bits",
            field="sampling_params.repetition_penalty",
        )


def _constraint(params: SamplingParams) -> Constraint | None:
    if params.json_schema is not None:
        return Constraint("json_schema", orjson.dumps(params.json_schema).decode())
    if params.regex is not None:
        return Constraint("regex", params.regex)
    return None if params.grammar is None else Constraint("grammar", params.grammar)


def _stops(
    stop: str | Sequence[str] | Sequence[int] | None,
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """The stop tokens and stop strings; with stop strings alone, no token stops."""
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        stop = [stop]
    texts = tuple(item for item in stop if isinstance(item, str))
    tokens = tuple(item for item in stop if not isinstance(item, str))
    if "" in texts:
        raise InvalidInputError("a stop string must not be empty", field="sampling_params.stop")
    return tokens, texts


def lora_of(stored: Mapping[str, object]) -> LoraSpec:
    """The adapter's settings from their stored form."""
    return LoraSpec(**stored)  # type: ignore[arg-type]  # written from the same dataclass
