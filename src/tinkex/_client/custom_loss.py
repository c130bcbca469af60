"""Custom losses, computed by the client between two passes at the service.

The service's cross entropy is `Σ -weight · logprob`. With `weight = -∂C/∂logprob` its gradient is the gradient of any
loss C. `tinkex.regularizers` computes C and its derivatives; the training client sends the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.errors import APIResponseValidationError, InvalidInputError
from tinkex.types import CustomLossOutput, Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch

    from tinkex.regularizers import Pipeline

__all__ = ["CustomLossFn", "Surrogate", "forward_data", "merged", "surrogate"]

#: `(data, logprobs per datum) -> (loss, metrics)`
CustomLossFn: TypeAlias = (
    "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, Any]]]"
)


@dataclass(frozen=True)
class Surrogate:
    """A custom loss at given logprobs: its terms, its metrics, and data whose weights carry its gradient."""

    output: CustomLossOutput
    metrics: dict[str, Any]
    data: list[Datum]


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """The data of the first pass: target tokens, and weights of zero, so that its loss is zero."""
    return [_linear(datum, index, None) for index, datum in enumerate(data)]


def _linear(datum: Datum, index: int, weights: TensorData | None) -> Datum:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise InvalidInputError(
            "is required for a custom loss", field=f"data.{index}.target_tokens"
        )
    if weights is None:
        import numpy as np

        weights = TensorData.from_numpy(np.zeros(targets.to_numpy().shape, np.float32))
    return replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def surrogate(
    data: list[Datum], forward: ForwardBackwardOutput, loss_fn: CustomLossFn, pipeline: Pipeline
) -> Surrogate:
    """Evaluate loss plus regularizers at the logprobs of the first pass, and differentiate the sum."""
    leaves = [leaf.requires_grad_() for leaf in _logprobs(forward, data)]
    evaluation = pipeline.evaluate(data, leaves, loss_fn, differentiate=True)
    assert evaluation.gradients is not None
    linear = [
        _linear(datum, index, TensorData.from_torch(-gradient))
        for index, (datum, gradient) in enumerate(zip(data, evaluation.gradients, strict=True))
    ]
    base = evaluation.output.base_loss
    metrics = {} if base is None else dict(base.custom)
    return Surrogate(evaluation.output, metrics, linear)


def _logprobs(forward: ForwardBackwardOutput, data: Sequence[Datum]) -> list[torch.Tensor]:
    outputs = forward.loss_fn_outputs
    if len(outputs) != len(data):
        raise APIResponseValidationError(
            message=f"The service returned {len(outputs)} outputs for {len(data)} datums."
        )
    tensors = []
    for index, (output, datum) in enumerate(zip(outputs, data, strict=True)):
        if "logprobs" not in output:
            raise APIResponseValidationError(
                message=f"The service returned no logprobs for datum {index}."
            )
        tensor = output["logprobs"].to_torch()
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        if tensor.numel() != targets.size:
            raise APIResponseValidationError(
                message=f"The service returned {tensor.numel()} logprobs for the {targets.size} "
                f"targets of datum {index}."
            )
        tensors.append(tensor.reshape(targets.shape))
    return tensors


def merged(result: ForwardBackwardOutput, custom: Surrogate) -> ForwardBackwardOutput:
    """The result of the second pass, with the custom loss in place of the surrogate loss.

    The metrics of the loss are not checked: the gradient is already accumulated, so raising here would lose it.
    With regularizers, `loss:sum` is the sum of `base_loss:sum` and all `regularizers/<name>:sum`.
    """
    metrics, output = dict(result.metrics), custom.output
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
    metrics["loss:sum"] = output.loss_total
    if output.regularizers and output.base_loss is not None:
        metrics["base_loss:sum"] = output.base_loss.value
        metrics |= {
            f"regularizers/{name}:sum": each.contribution
            for name, each in output.regularizers.items()
        }
    return replace(result, metrics=metrics | custom.metrics, custom_loss=output)
