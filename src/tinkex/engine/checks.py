"""Validation of requests, shared by both engines so that they raise the same errors.

The checks work on plain values; none of them needs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from .values import Array, Example, SampleJob

__all__ = [
    "LOSSES",
    "Loss",
    "can_overflow",
    "check_base",
    "check_examples",
    "check_job",
    "check_loss",
    "check_same_base",
    "check_settings",
    "is_float32",
    "lacks_memory",
    "not_finite",
    "overflowing",
]


@dataclass(frozen=True)
class Loss:
    """A loss: its name, its required inputs, and its settings with their defaults.

    With `whole_sequences`, the terms depend on each other, so the loss needs all positions of an example at once.
    """

    name: str
    required: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    soft_targets: bool = False
    whole_sequences: bool = False


_LARGEST: Final = float(np.finfo(np.float32).max)
_RL: Final = ("logprobs", "advantages")


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


LOSSES: Final[Mapping[str, Loss]] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", soft_targets=True),
        Loss("importance_sampling", _RL),
        Loss("ppo", _RL, _clip(0.8, 1.2)),
        Loss("cispo", _RL, _clip(0.0, 4.0)),
        Loss("dro", _RL, {"beta": 0.05}),
        Loss(
            "gspo",
            (*_RL, "sequence_ratio_mask"),
            _clip(1 - 3e-4, 1 + 4e-4),
            whole_sequences=True,
        ),
    )
}


def check_base(name: str, known: Collection[str], field: str = "base_model") -> None:
    """Refuse an unknown base model."""
    if name not in known:
        raise InvalidInputError(
            f"this service does not have {name!r:.200}; it has {', '.join(known) or 'none'}. "
            "`tinkex serve --base-model NAME`, repeated for several, says which models it has",
            field=field,
        )


def check_same_base(wanted: str, trained_on: str) -> None:
    """Refuse to sample from a model on another base model than the one it was trained on."""
    if wanted != trained_on:
        raise InvalidInputError(
            f"is {wanted!r:.200}, the model was trained on {trained_on!r:.200}", field="base_model"
        )


def check_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Return the loss called `name` and its complete settings; refuse unknown settings by name."""
    loss = LOSSES.get(name)
    if loss is None:
        raise InvalidInputError(
            f"unknown loss {name!r:.80}; this service has {', '.join(LOSSES)}", field="loss_fn"
        )
    settings = dict(loss.defaults)
    for key, value in config.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise InvalidInputError(
                f"{name} has no setting {key!r:.80}; it has {known}", field="loss_fn_config"
            )
        if isinstance(value, str):
            raise InvalidInputError(f"{key} must be a number", field="loss_fn_config")
        settings[key] = float(value)
    return loss, settings


def check_settings(name: str, config: Mapping[str, float | str]) -> None:
    """Refuse settings that are not numbers of float32, in which losses are computed, or contradict each other.

    Not part of `check_loss`: a pass that was accepted without this check must be repeatable.
    """
    if name not in LOSSES:  # a custom loss, or an unknown one, which its pass refuses
        return
    _, settings = check_loss(name, config)
    for key, value in settings.items():
        if not is_float32(value):
            raise InvalidInputError(
                f"must be a finite number of 32 bits, not {value}", field=f"loss_fn_config.{key}"
            )
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if low is not None and high is not None and low > high:
        key = "clip_low_threshold" if "clip_low_threshold" in config else "clip_high_threshold"
        raise InvalidInputError(
            f"the lower threshold {low} is above the upper one, {high}",
            field=f"loss_fn_config.{key}",
        )


def is_float32(value: float) -> bool:
    """Whether a number is finite in float32."""
    return abs(value) <= _LARGEST  # False for NaN


def check_examples(
    examples: Sequence[Example], loss: Loss, *, vocab_size: int, context_length: int
) -> None:
    """Refuse invalid examples; the error names the index of the datum and the input."""
    if not examples:
        raise InvalidInputError("is empty", field="data")
    for index, example in enumerate(examples):
        at = f"data.{index}"
        if example.length > context_length:
            raise InvalidInputError(
                f"has {example.length} tokens, the model's context is {context_length}",
                field=f"{at}.model_input",
            )
        _check_tokens(example.tokens_T, vocab_size, f"{at}.model_input")
        targets = example.inputs.get("target_tokens")
        if targets is None:
            raise InvalidInputError("is required", field=f"{at}.target_tokens")
        if targets.ndim == 2 and not loss.soft_targets:
            raise InvalidInputError(
                "this loss takes one target per position", field=f"{at}.target_tokens"
            )
        if targets.ndim not in {1, 2} or len(targets) != example.length:
            raise InvalidInputError(
                f"has shape {list(targets.shape)} for an input of {example.length} tokens",
                field=f"{at}.target_tokens",
            )
        _check_tokens(targets, vocab_size, f"{at}.target_tokens")
        for name in (*loss.required, "weights"):
            values = example.inputs.get(name)
            if values is None:
                if name != "weights":
                    raise InvalidInputError("is required", field=f"{at}.{name}")
            elif values.shape != targets.shape:
                raise InvalidInputError(
                    f"has shape {list(values.shape)}, target_tokens has {list(targets.shape)}",
                    field=f"{at}.{name}",
                )
            else:
                _check_finite(values, f"{at}.{name}")


def check_job(
    job: SampleJob,
    *,
    vocab_size: int,
    context_length: int,
    detokenize: Callable[[Sequence[int]], str] | None,
) -> None:
    """Refuse an invalid job before it joins the batch: there, an error would fail a step that others share."""
    if len(job.prompt_T) >= context_length:
        raise InvalidInputError(
            f"has {len(job.prompt_T)} tokens; the model's context of {context_length} "
            "leaves no room for a sample",
            field="prompt",
        )
    _check_tokens(job.prompt_T, vocab_size, "prompt")
    for token, _ in job.logit_bias:  # of any size, so not as an array
        if not 0 <= token < vocab_size:
            raise InvalidInputError(
                f"token {token!s:.40} is outside the vocabulary of {vocab_size}",
                field="sampling_params.logit_bias",
            )
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(job, name) > vocab_size:
            raise InvalidInputError(f"must be at most the vocabulary of {vocab_size}", field=name)
    targets = job.target_prompt_tokens
    if targets is not None:
        rows = len(job.prompt_T) - 1
        if targets.ndim != 2 or len(targets) != rows:
            raise InvalidInputError(
                f"must be {rows} rows, one per prompt token after the first; "
                f"its shape is {list(targets.shape)}",
                field="target_prompt_logprobs",
            )
        if targets.size:
            # A negative target means: no token.
            _check_tokens(targets.clip(0), vocab_size, "target_prompt_logprobs")
    if job.stop_texts:
        if detokenize is None:
            raise InvalidInputError("stop strings need a tokenizer", field="stop")
        detokenize(())  # loads the tokenizer, so that an unreadable one raises here


def _check_finite(values: Array, at: str) -> None:
    """Refuse values that would make the loss NaN and, after one step, the whole model."""
    finite = np.isfinite(values)
    if not finite.all():
        where = [int(place) for place in np.argwhere(~finite)[0]]
        position = where[0] if len(where) == 1 else where
        raise InvalidInputError(
            f"has {float(values[tuple(where)])} at position {position}, which is not a finite number",
            field=at,
        )


def _check_tokens(tokens: Array, vocab_size: int, at: str) -> None:
    if not tokens.size:
        raise InvalidInputError("has no tokens", field=at)
    if tokens.dtype.kind not in "iu":
        raise InvalidInputError(f"has numbers of type {tokens.dtype}, not integers", field=at)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise InvalidInputError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}", field=at
        )


def lacks_memory(error: Exception) -> bool:
    """Whether an error of torch, or of Python, is for want of memory."""
    # On the CPU, torch raises a plain RuntimeError.
    typed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return typed or "you tried to allocate" in str(error)


def can_overflow(job: SampleJob) -> bool:
    """Whether the parameters of a request could make finite logits infinite."""
    return bool(job.logit_bias) or job.repetition_penalty != 1


def overflowing(job: SampleJob) -> RequestFailedError:
    """The error of a request whose parameters make logits of the model infinite."""
    chosen = {
        "repetition_penalty": job.repetition_penalty != 1,
        "logit_bias": bool(job.logit_bias),
        "temperature": 0 < job.temperature < 1,
    }
    names = ", ".join(f"sampling_params.{name}" for name, used in chosen.items() if used)
    return RequestFailedError(
        f"{names}: the logits are finite without this, and overflow with it; choose less extreme values",
        category=RequestErrorCategory.User,
    )


def not_finite(job: SampleJob, adapter: object) -> RequestFailedError:
    """The error of a request whose model computes no probabilities."""
    whose = "base model" if adapter is None else "adapter"
    return RequestFailedError(
        f"The {whose} of sampler {job.sampler_id!r:.200} does not give finite logits: its weights are NaN, "
        "infinite or far too large, usually because the learning rate was too high. "
        "Sample from an earlier checkpoint, or train again with a smaller learning rate.",
        category=RequestErrorCategory.User,
    )
