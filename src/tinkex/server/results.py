"""Results as JSON: those without a protobuf form, and all for clients that do not read protobuf.

JSON has no NaN and no infinities. Every official client fails on a null in their place, after the work is done. As
strings (`"NaN"`, `"Infinity"`, `"-Infinity"`, as in protobuf's JSON) all clients read them as numbers, and a training
loop can see that its loss or gradient was not finite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinkex._wire import json_codec
from tinkex.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse, TensorData

__all__ = ["encode_result"]


def encode_result(value: Any) -> bytes:
    """A result as JSON that every client can read."""
    if isinstance(value, OptimStepResponse):
        return json_codec.encode({"metrics": _readable(value.metrics or {})})
    if isinstance(value, ForwardBackwardOutput):
        outputs = [
            {name: _tensor(tensor) for name, tensor in output.items()}
            for output in value.loss_fn_outputs
        ]
        return json_codec.encode(
            {
                "loss_fn_output_type": value.loss_fn_output_type,
                "loss_fn_outputs": outputs,
                "metrics": _readable(value.metrics),
            }
        )
    if isinstance(value, SampleResponse):
        return _encode_samples(value)
    return json_codec.encode(value)


def _encode_samples(value: SampleResponse) -> bytes:
    """Encode samples. Null means a prompt position without a logprob; a sampled token always has a number."""
    body = json_codec.encode(value)
    logprobs = [sequence.logprobs_np for sequence in value.sequences]
    if all(each is None or np.isfinite(each).all() for each in logprobs):
        return body
    content = json_codec.parse(body)
    for sequence, numbers in zip(content["sequences"], logprobs, strict=True):
        if numbers is not None:
            sequence["logprobs"] = [_number(number) for number in numbers.tolist()]
    return json_codec.encode(content)


def _readable(metrics: dict[str, float]) -> dict[str, float | str]:
    return {name: _number(value) for name, value in metrics.items()}


def _tensor(tensor: TensorData) -> Any:
    if np.isfinite(tensor.values).all():
        return tensor
    data = [_number(value) for value in tensor.values.reshape(-1).tolist()]
    return {"data": data, "dtype": tensor.dtype, "shape": tensor.shape}


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
