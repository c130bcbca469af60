"""Adds `loss:sum` to the metrics of a pass, for services that leave it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tinkex._lazy import np
from tinkex.types import Datum, ForwardBackwardOutput

__all__ = ["divides_by_weights", "with_loss_sum"]

_SUM: Final = "loss:sum"
#: The name of the same metric in SkyRL's training backends.
_OTHER_NAME: Final = "total_loss:sum"
#: The loss of each token, in the outputs of SkyRL's JAX backend.
_ELEMENTWISE: Final = "elementwise_loss"


def with_loss_sum(
    result: ForwardBackwardOutput, data: Sequence[Datum], loss_fn: str
) -> ForwardBackwardOutput:
    """`result` with `loss:sum` in its metrics, if it can be computed."""
    if _SUM in result.metrics:
        return result
    total = result.metrics.get(_OTHER_NAME)
    if total is None and len(result.loss_fn_outputs) == len(data):
        total = _cross_entropy(result, data) if loss_fn == "cross_entropy" else _added_up(result)
    return result if total is None else replace(result, metrics={**result.metrics, _SUM: total})


def _cross_entropy(result: ForwardBackwardOutput, data: Sequence[Datum]) -> float | None:
    total = 0.0
    for datum, output in zip(data, result.loss_fn_outputs, strict=True):
        logprobs = output.get("logprobs")
        if logprobs is None:
            return None
        scores = logprobs.to_numpy().reshape(-1).astype(np.float64)
        given = datum.loss_fn_inputs.get("weights")
        weights = np.ones_like(scores) if given is None else given.to_numpy().reshape(-1)
        if weights.size != scores.size:
            return None
        # A token of weight 0 adds nothing, even if its logprob is not finite.
        total -= float((scores * weights)[weights != 0].sum())
    return total


def _added_up(result: ForwardBackwardOutput) -> float | None:
    losses = [output.get(_ELEMENTWISE) for output in result.loss_fn_outputs]
    if any(loss is None for loss in losses):
        return None
    return float(
        sum(loss.to_numpy().astype(np.float64).sum() for loss in losses if loss is not None)
    )


def divides_by_weights(result: ForwardBackwardOutput) -> bool:
    """Whether a result looks like SkyRL's JAX backend, where the loss of a datum is a weighted mean, not a sum."""
    outputs = result.loss_fn_outputs
    return not result.metrics and any(_ELEMENTWISE in output for output in outputs)
