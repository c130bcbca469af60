"""JSON as every release of the protocol writes and reads it.

Writing: values and `type` tags are sent, None is left out, numpy arrays are written directly, and NaN, which JSON
does not have, becomes null. Reading: unknown fields and null are ignored, tags may be missing.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any, Final, TypeVar, cast

import orjson
from pydantic import BaseModel, ValidationError

from tinkex._lazy import np
from tinkex.errors import DecodeError, InvalidInputError
from tinkex.types._base import FROM_WIRE, first_complaint
from tinkex.types.inputs import Datum, EncodedTextChunk, ModelInput
from tinkex.types.logged import LogEntry, LoggedSample
from tinkex.types.runs import CreateSessionRequest, SetCheckpointTtlRequest
from tinkex.types.sampling import SampledSequence, SampleResponse, SamplingParams
from tinkex.types.tensors import PromptAltTokens, TensorData, TopkLogprobs, tensor_from_object
from tinkex.types.training import (
    AdamOptimizerConfig,
    AdamParams,
    CreateModelRequest,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
)

__all__ = ["decode", "encode", "first_complaint", "from_object", "parse"]

T = TypeVar("T")

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_UTC_Z

# -- writing -------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Write any value of the protocol."""
    try:
        return orjson.dumps(value, default=_written, option=_OPTIONS)
    except TypeError as error:  # orjson's own error, or from `_written`
        raise InvalidInputError(f"cannot be written as JSON: {error}") from error


def _some(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


@singledispatch
def _written(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # not registered: that would import numpy
        return np.ascontiguousarray(value)  # orjson writes contiguous arrays directly
    raise TypeError(f"{type(value).__name__} is not a value of the protocol")


@_written.register
def _(value: BaseModel) -> Any:
    extra = value.__pydantic_extra__
    fields = value.__dict__ | extra if extra else value.__dict__
    return {name: field for name, field in fields.items() if field is not None}


@_written.register
def _(value: SamplingParams) -> Any:
    written = _some(**value.__dict__)
    if value.logit_bias is not None:
        written["logit_bias"] = {str(token): bias for token, bias in value.logit_bias.items()}
    return written


@_written.register
def _(value: EncodedTextChunk) -> Any:
    return {"tokens": value.tokens_np, "type": value.type}


@_written.register
def _(value: OptimStepRequest) -> Any:
    key = "adam_params" if isinstance(value.optim_params, AdamParams) else "optimizer_params"
    return _some(
        model_id=value.model_id, seq_id=value.seq_id, type=value.type, **{key: value.optim_params}
    )


@_written.register
def _(value: SetCheckpointTtlRequest) -> Any:
    return {"ttl_seconds": value.ttl_seconds}  # null means: never expire


@_written.register
def _(value: CreateSessionRequest) -> Any:
    # Services built on the types of the official SDK refuse a session without this field, even if it is null.
    return {**_some(**value.__dict__), "user_metadata": value.user_metadata}


@_written.register
def _(value: CreateModelRequest) -> Any:
    # AdamW is the default and left out: services older than 0.29.1 refuse the field.
    written = dict(value.__dict__)
    if written["optimizer_config"] == AdamOptimizerConfig():
        del written["optimizer_config"]
    return _some(**written)


@_written.register
def _(value: LogEntry) -> Any:
    metrics = {name: _finite_or_text(number) for name, number in value.metrics.items()}
    return {**_some(**value.__dict__), "metrics": metrics}


@_written.register
def _(value: LoggedSample) -> Any:
    written = _some(**value.__dict__)
    if value.reward is not None:
        written["reward"] = _finite_or_text(value.reward)
    if value.logprobs is not None:
        written["logprobs"] = [
            None if number is None else _finite_or_text(number) for number in value.logprobs
        ]
    return written


def _finite_or_text(number: float) -> float | str:
    """JSON has no NaN and no infinities; as text every reader takes them for numbers."""
    return number if math.isfinite(number) else str(number)


@_written.register(bytes)
def _(value: bytes) -> Any:
    return base64.b64encode(value).decode("ascii")


@_written.register
def _(value: TensorData) -> Any:
    crow, col = value.indices or (None, None)
    return _some(
        data=np.ascontiguousarray(value.values).reshape(-1),
        dtype=value.dtype,
        shape=value.shape,
        sparse_crow_indices=crow,
        sparse_col_indices=col,
    )


@_written.register
def _(value: Datum) -> Any:
    return {"model_input": value.model_input, "loss_fn_inputs": value.loss_fn_inputs}


@_written.register
def _(value: ForwardBackwardInput) -> Any:
    return _some(data=value.data, loss_fn=value.loss_fn, loss_fn_config=value.loss_fn_config)


@_written.register
def _(value: ForwardBackwardRequest) -> Any:
    return _some(
        forward_backward_input=value.forward_backward_input,
        model_id=value.model_id,
        seq_id=value.seq_id,
    )


@_written.register
def _(value: ForwardRequest) -> Any:
    return _some(forward_input=value.forward_input, model_id=value.model_id, seq_id=value.seq_id)


@_written.register
def _(value: ForwardBackwardOutput) -> Any:
    return {
        "loss_fn_output_type": value.loss_fn_output_type,
        "loss_fn_outputs": value.loss_fn_outputs,
        "metrics": value.metrics,
    }


@_written.register
def _(value: TopkLogprobs) -> Any:
    return value.tolist()


@_written.register
def _(value: PromptAltTokens) -> Any:
    return {"tokens": value.tokens, "logprobs": value.logprobs}


@_written.register
def _(value: SampledSequence) -> Any:
    return _some(
        stop_reason=value.stop_reason,
        tokens=[] if value.tokens_np is None else value.tokens_np,
        logprobs=value.logprobs_np,
        topk_logprobs=value.topk_logprobs_np,
        kept_mass=value.kept_mass_np,
    )


@_written.register
def _(value: SampleResponse) -> Any:
    return _some(
        type="sample",
        sequences=list(value.sequences),
        prompt_logprobs=value.prompt_logprobs_np,
        topk_prompt_logprobs=value.topk_prompt_logprobs_np,
        target_prompt_logprobs=value.target_prompt_logprobs,
        prompt_cache_hit_tokens=value.prompt_cache_hit_tokens or None,
        prompt_alt_tokens=value.prompt_alt_tokens,
    )


# -- reading -------------------------------------------------------------------------------------


def parse(data: bytes | bytearray | memoryview) -> Any:
    """Read JSON into plain objects; an empty body reads as `{}`."""
    if not data:
        return {}
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"is not JSON: {error}", field="body") from error


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Read a value of `kind`."""
    return from_object(parse(data), kind)


def from_object(value: Any, kind: type[T]) -> T:
    """Read a value of `kind` from parsed JSON; an error names the field that does not fit."""
    if not isinstance(value, dict):
        raise DecodeError(f"expected an object, got {value!r:.80}", field="body")
    try:
        if issubclass(kind, BaseModel):
            return cast("T", kind.model_validate(value, context=FROM_WIRE, extra="ignore"))
        return cast("T", _READERS[kind](value))
    except ValidationError as error:
        raise _decode_error(error) from error
    except KeyError as error:
        raise DecodeError("is required", field=str(error.args[0])) from error
    except InvalidInputError as error:
        raise DecodeError(str(error)) from error


def _decode_error(error: ValidationError) -> DecodeError:
    field, complaint = first_complaint(error)
    return DecodeError(complaint, field=field or "body")


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise DecodeError(f"expected a list, got {value!r:.80}", field=field)
    return value


def _dict(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DecodeError(f"expected an object, got {value!r:.80}", field=field)
    return value


def _tensors(value: Any, field: str) -> dict[str, TensorData]:
    return {
        name: tensor_from_object(tensor, field=f"{field}.{name}")
        for name, tensor in _dict(value or {}, field).items()
    }


def _datum(value: Any, field: str) -> Datum:
    entry = _dict(value, field)
    return Datum(
        model_input=_nested(entry.get("model_input"), ModelInput, f"{field}.model_input"),
        loss_fn_inputs=_tensors(entry.get("loss_fn_inputs"), f"{field}.loss_fn_inputs"),
    )


def _nested(value: Any, kind: type[T], field: str) -> T:
    try:
        return from_object(value, kind)
    except DecodeError as error:
        raise DecodeError(str(error), field=field) from error


def _forward_backward_input(value: Any, field: str) -> ForwardBackwardInput:
    entry = _dict(value, field)
    data = _list(entry["data"], f"{field}.data")
    loss_fn = entry["loss_fn"]
    if not isinstance(loss_fn, str):
        raise DecodeError(f"expected text, got {loss_fn!r:.80}", field=f"{field}.loss_fn")
    return ForwardBackwardInput(
        data=[_datum(datum, f"{field}.data.{index}") for index, datum in enumerate(data)],
        loss_fn=loss_fn,  # type: ignore[arg-type]  # the engine refuses an unknown loss
        loss_fn_config=_loss_config(entry.get("loss_fn_config"), f"{field}.loss_fn_config"),
    )


def _loss_config(value: Any, field: str) -> dict[str, float | str] | None:
    if value is None:
        return None
    for name, setting in _dict(value, field).items():
        if not isinstance(setting, int | float | str):
            raise DecodeError(
                f"expected a number or text, got {setting!r:.80}", field=f"{field}.{name}"
            )
    return cast("dict[str, float | str]", value)


def _integer(value: Any, field: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DecodeError(f"expected an integer, got {value!r:.80}", field=field)
    return value


def _model_id(value: Any) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"expected text, got {value!r:.80}", field="model_id")
    return value


def _forward_backward_request(value: dict[str, Any]) -> ForwardBackwardRequest:
    inputs = _forward_backward_input(value["forward_backward_input"], "forward_backward_input")
    model_id, seq_id = _model_id(value["model_id"]), _integer(value.get("seq_id"), "seq_id")
    return ForwardBackwardRequest(inputs, model_id, seq_id)


def _forward_request(value: dict[str, Any]) -> ForwardRequest:
    inputs = _forward_backward_input(value["forward_input"], "forward_input")
    model_id, seq_id = _model_id(value["model_id"]), _integer(value.get("seq_id"), "seq_id")
    return ForwardRequest(inputs, model_id, seq_id)


def _forward_backward_output(value: dict[str, Any]) -> ForwardBackwardOutput:
    outputs = _list(value.get("loss_fn_outputs") or [], "loss_fn_outputs")
    metrics = _dict(value.get("metrics") or {}, "metrics")
    return ForwardBackwardOutput(
        loss_fn_output_type=str(value.get("loss_fn_output_type") or ""),
        loss_fn_outputs=[
            _tensors(output, f"loss_fn_outputs.{index}") for index, output in enumerate(outputs)
        ],
        metrics={name: _number(number, f"metrics.{name}") for name, number in metrics.items()},
    )


#: JSON does not have these numbers; protobuf's JSON form writes them like this.
_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")


def _number(value: Any, field: str) -> float:
    if value is None:
        return float("nan")
    if value in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DecodeError(f"expected a number, got {value!r:.80}", field=field)
    return float(value)


def _sampled_sequence(value: Any, field: str) -> SampledSequence:
    entry = _dict(value, field)
    return SampledSequence(
        stop_reason=entry.get("stop_reason"),
        sequence_id=entry.get("sequence_id") or "",
        tokens=_list(entry["tokens"], f"{field}.tokens"),
        logprobs=entry.get("logprobs"),
        topk_logprobs=entry.get("topk_logprobs"),
        kept_mass=entry.get("kept_mass"),
    )


def _sample_response(value: dict[str, Any]) -> SampleResponse:
    sequences = _list(value["sequences"], "sequences")
    target = value.get("target_prompt_logprobs")
    return SampleResponse(
        sequences=[
            _sampled_sequence(sequence, f"sequences.{index}")
            for index, sequence in enumerate(sequences)
        ],
        prompt_logprobs=value.get("prompt_logprobs"),
        topk_prompt_logprobs=value.get("topk_prompt_logprobs"),
        target_prompt_logprobs=(
            None if target is None else tensor_from_object(target, field="target_prompt_logprobs")
        ),
        prompt_cache_hit_tokens=(
            _integer(value.get("prompt_cache_hit_tokens"), "prompt_cache_hit_tokens") or 0
        ),
        prompt_alt_tokens=_prompt_alt_tokens(value.get("prompt_alt_tokens")),
    )


def _prompt_alt_tokens(value: Any) -> PromptAltTokens | None:
    if value is None:
        return None
    tensors = _tensors(value, "prompt_alt_tokens")
    return PromptAltTokens(tensors["tokens"], tensors["logprobs"])


_READERS: dict[Any, Callable[[dict[str, Any]], Any]] = {
    dict: dict,  # as it is, for a caller who reads it
    ForwardBackwardRequest: _forward_backward_request,
    ForwardRequest: _forward_request,
    ForwardBackwardOutput: _forward_backward_output,
    SampleResponse: _sample_response,
}
