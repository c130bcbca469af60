"""Checks of arguments before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf, isfinite
from typing import Any, Final, get_args

from tinkex import types
from tinkex.errors import InvalidInputError

from .retry import RetryConfig

__all__ = [
    "check_count",
    "check_data",
    "check_extensions",
    "check_loss",
    "check_name",
    "check_retry_config",
    "check_sampling_params",
    "check_seconds",
    "check_timeout",
    "is_seconds",
]

_PER_POSITION: Final = frozenset({"target_tokens", "weights", "advantages", "logprobs"})
#: Losses that accept text settings; all other losses accept numbers only.
_WITH_TEXT: Final = frozenset({"custom", "stable_reinforce"})


def check_data(data: Sequence[types.Datum]) -> None:
    if isinstance(data, types.Datum) or not isinstance(data, Sequence):
        raise InvalidInputError(
            f"expected a list of Datum, got {type(data).__name__}", field="data"
        )
    if not data:
        raise InvalidInputError("is empty: there is nothing to train on", field="data")
    for index, datum in enumerate(data):
        if not isinstance(datum, types.Datum):
            raise InvalidInputError(
                f"expected Datum, got {type(datum).__name__}", field=f"data.{index}"
            )
        _check_lengths(datum, index)


def _check_lengths(datum: types.Datum, index: int) -> None:
    """Tensors that are read per position must have one row per token of the input."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in datum.model_input.chunks):
        return  # only the service knows how many positions an image takes
    expected = datum.model_input.length
    for name in _PER_POSITION & datum.loss_fn_inputs.keys():
        length = len(datum.loss_fn_inputs[name])
        if length != expected:
            raise InvalidInputError(
                f"has {length} rows for an input of {expected} tokens",
                field=f"data.{index}.loss_fn_inputs.{name}",
            )


def check_loss(
    loss_fn: str, config: Mapping[str, float | str] | None
) -> dict[str, float | str] | None:
    if loss_fn not in get_args(types.LossFnType):
        raise InvalidInputError(
            f"unknown loss {loss_fn!r:.80}; known losses: {', '.join(get_args(types.LossFnType))}",
            field="loss_fn",
        )
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise InvalidInputError(
            f"expected a mapping, got {type(config).__name__}", field="loss_fn_config"
        )
    return {
        _config_key(key): _config_value(key, value, may_be_text=loss_fn in _WITH_TEXT)
        for key, value in config.items()
    }


def _config_key(key: Any) -> str:
    if not isinstance(key, str):
        raise InvalidInputError(f"key {key!r:.80} is not a string", field="loss_fn_config")
    return key


def _config_value(key: str, value: Any, *, may_be_text: bool) -> float | str:
    field = f"loss_fn_config.{key}"
    if isinstance(value, str):
        if key == "loss_id":  # an id stays text, even if it consists of digits
            return value
        try:
            number = float(value.strip())
        except ValueError:
            if may_be_text:
                return value
            raise InvalidInputError(f"expected a number, got {value!r:.80}", field=field) from None
    elif isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "__len__"):
        raise InvalidInputError(f"expected a number or text, got {value!r:.80}", field=field)
    else:
        number = float(value)
    if not isfinite(number):
        raise InvalidInputError(f"must be finite, not {number}", field=field)
    return number


def check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip():
        raise InvalidInputError(f"must be a non-empty string, got {name!r:.80}", field="name")
    if "/" in name or name in {".", ".."}:
        raise InvalidInputError(f"{name!r:.80} must be one path segment", field="name")


def check_count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(
            f"must be a whole number of {least} or more, not {value!r:.80}", field=name
        )
    return value


def is_seconds(value: Any) -> bool:
    """Whether the value is a positive, finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def check_seconds(name: str, value: Any) -> float:
    if not is_seconds(value):
        raise InvalidInputError(
            f"must be a positive number of seconds, not {value!r:.80}", field=name
        )
    return float(value)


#: Seconds. No call takes longer, so a larger timeout is probably in milliseconds, as in the Elixir SDK.
_LONG: Final = 86_400.0


def check_timeout(timeout: Any) -> None:
    """Refuse a timeout that is not a number of seconds; warn if it was probably meant in milliseconds."""
    seconds = check_seconds("timeout", timeout)
    if seconds > _LONG:
        hours = seconds / 3600
        warnings.warn(
            f"timeout={seconds:.0f} is {hours:.0f} hours: timeouts are in seconds", stacklevel=4
        )


def check_sampling_params(params: Any) -> types.SamplingParams:
    if params is None:
        return types.SamplingParams()
    if isinstance(params, Mapping):
        return types.SamplingParams(**params)
    if not isinstance(params, types.SamplingParams):
        raise InvalidInputError(
            f"expected SamplingParams, got {type(params).__name__}", field="sampling_params"
        )
    return params


def check_extensions(params: types.SamplingParams, flags: types.ClientConfigResponse) -> None:
    """Refuse extensions of `SamplingParams` that the service does not know: it would ignore them."""
    if not flags.sample_extensions and (used := params.extensions):
        raise InvalidInputError(
            f"is an extension of the tinkex service, which this service does not offer; leave out {', '.join(used)}",
            field=f"sampling_params.{used[0]}",
        )


def check_retry_config(config: Any) -> RetryConfig | None:
    """Accept a RetryConfig, a mapping of its fields, or the official class. Checked here, before the first sample."""
    if config is None or isinstance(config, RetryConfig):
        return config
    names = [each.name for each in fields(RetryConfig)]
    if isinstance(config, Mapping):
        for name in config:
            if name not in names:
                raise InvalidInputError(
                    f"{name!r:.80} is not one of {', '.join(names)}", field="retry_config"
                )
        return RetryConfig(**config)
    # The official SDK's class has the same fields except max_retries.
    if all(hasattr(config, name) for name in names if name != "max_retries"):
        return RetryConfig(
            **{name: getattr(config, name) for name in names if hasattr(config, name)}
        )
    raise InvalidInputError(
        f"expected RetryConfig, got {type(config).__name__}", field="retry_config"
    )
