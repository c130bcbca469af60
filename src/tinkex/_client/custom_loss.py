"""Losses computed on the caller's side: forward, their gradient, and back as weights.

The service's cross entropy is `Σ -weight · logprob`, so sending `weight = -∂C/∂logprob` makes its gradient the
gradient of any C. All functions here are plain tensor work; the wire calls are the training client's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.errors import APIResponseValidationError, InvalidInputError
from tinkex.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["CustomLossFn", "Surrogate", "forward_data", "merged", "surrogate"]

#: `(data, logprobs per datum) -> (loss, metrics)`
CustomLossFn: TypeAlias = (
    "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, Any]]]"
)


@dataclass(frozen=True)
class Surrogate:
    """A custom loss at one point: its value, its metrics, and the data that carries its gradient."""

    loss: float
    metrics: dict[str, float]
    data: list[Datum]


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """The data of the first pass: only what it reads, with weights that make its loss zero."""
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
    data: list[Datum], forward: ForwardBackwardOutput, loss_fn: CustomLossFn
) -> Surrogate:
    """Evaluate `loss_fn` at the logprobs of the first pass and differentiate it."""
    import torch

    leaves = [leaf.requires_grad_() for leaf in _logprobs(forward, data)]
    returned = loss_fn(data, leaves)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise InvalidInputError(
            f"must return (loss, metrics), got {type(returned).__name__}", field="loss_fn"
        )
    loss, metrics = returned
    _check_loss(loss)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    linear = []
    for index, (datum, gradient) in enumerate(zip(data, gradients, strict=True)):
        if gradient is None:
            raise InvalidInputError(
                f"the loss does not depend on the logprobs of datum {index}", field="loss_fn"
            )
        if not torch.isfinite(gradient).all():
            raise InvalidInputError(
                f"the gradient at the logprobs of datum {index} is not finite", field="loss_fn"
            )
        linear.append(_linear(datum, index, TensorData.from_torch(-gradient)))
    return Surrogate(
        float(loss.detach()),
        {str(name): _number(value, name) for name, value in metrics.items()},
        linear,
    )


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
        expected = datum.loss_fn_inputs["target_tokens"].to_numpy().size
        if tensor.numel() != expected:
            raise APIResponseValidationError(
                message=f"The service returned {tensor.numel()} logprobs for the {expected} "
                f"targets of datum {index}."
            )
        tensors.append(tensor)
    return tensors


def _check_loss(loss: Any) -> None:
    import torch

    if not isinstance(loss, torch.Tensor):
        raise InvalidInputError(
            f"the loss must be a torch tensor, not {type(loss).__name__}", field="loss_fn"
        )
    if loss.numel() != 1:
        raise InvalidInputError(
            f"the loss must be one number, not {tuple(loss.shape)}; sum or average it",
            field="loss_fn",
        )
    if not loss.requires_grad:
        raise InvalidInputError(
            "the loss is detached from the logprobs, so nothing would be trained", field="loss_fn"
        )
    if not torch.isfinite(loss).all():
        raise InvalidInputError(f"the loss is {float(loss.detach())}", field="loss_fn")


def _number(value: Any, name: object) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"is not a number: {value!r:.80}", field=f"metrics.{name}"
        ) from error


def merged(result: ForwardBackwardOutput, custom: Surrogate) -> ForwardBackwardOutput:
    """The result of the second pass with the custom loss in place of its surrogate's."""
    metrics = dict(result.metrics)
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
    return ForwardBackwardOutput(
        result.loss_fn_output_type,
        result.loss_fn_outputs,
        {**metrics, "loss:sum": custom.loss, **custom.metrics},
    )
