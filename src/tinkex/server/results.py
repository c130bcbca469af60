"""Results as JSON: those that have no other form, and all for clients that read no protobuf.

JSON has no word for NaN and the infinities. As null they fail every official client after the work was done. As text
(`"NaN"`, `"Infinity"`, `"-Infinity"`: protobuf's own way) all of them read the numbers they are, and a loop can see
that its loss or its gradient was not finite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinkex._wire import json_codec
from tinkex.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse, TensorData

__all__ = ["encode_result"]


def encode_result(value: Any) -> bytes:
    """A result as every client reads it."""
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
    """Null is for positions of a prompt that were not scored; a token that was drawn has a number."""
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
