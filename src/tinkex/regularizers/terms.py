"""Evaluates one function at one point: calls it, checks it, and differentiates it.

All of this runs on the function's own thread, so that gradients are computed in parallel too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum

from .errors import CustomLossError
from .gradients import Gradients, gradients
from .protocol import Logprobs

__all__ = ["Point", "Term"]


@dataclass(frozen=True)
class Term:
    """The result of the base loss or a regularizer; `gradients` is None if there is none or it was not requested."""

    loss: torch.Tensor
    metrics: dict[str, Any]
    gradients: Gradients | None

    @property
    def value(self) -> float:
        return float(self.loss.detach())


@dataclass(frozen=True)
class Point:
    """The arguments of all functions, and the leaves at which to differentiate, if requested."""

    data: list[Datum]
    logprobs: Logprobs
    leaves: list[torch.Tensor] | None

    @classmethod
    def of(cls, data: Sequence[Datum], logprobs: Logprobs, *, track: bool) -> Point:
        alone = isinstance(logprobs, torch.Tensor)
        tensors = [logprobs] if isinstance(logprobs, torch.Tensor) else list(logprobs)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                raise InvalidInputError(
                    "must be a floating-point tensor, or a list of them", field="logprobs"
                )
        if track:
            tensors = [
                tensor if tensor.requires_grad else tensor.detach().requires_grad_()
                for tensor in tensors
            ]
        return cls(list(data), tensors[0] if alone else tensors, tensors if track else None)

    def term(self, function: Callable[..., Any], name: str | None, *, strict: bool) -> Term:
        """Evaluate a function; with `strict` it must have a finite gradient."""
        # Separate lists: functions run in parallel and may change their arguments.
        logprobs = self.logprobs if isinstance(self.logprobs, torch.Tensor) else [*self.logprobs]
        try:
            loss, metrics = _unpacked(function(list(self.data), logprobs), name, strict=strict)
            found = None if self.leaves is None else gradients(loss, self.leaves)
            plain = _plain(metrics)
        except CustomLossError:
            raise
        except BaseException as error:
            raise CustomLossError(f"raised {type(error).__name__}: {error}", name=name) from error
        if strict:
            _check_gradients(found, name)
        return Term(loss, plain, found)


def _unpacked(
    returned: Any, name: str | None, *, strict: bool
) -> tuple[torch.Tensor, Mapping[Any, Any]]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise CustomLossError(
            f"must return (loss, metrics), got {type(returned).__name__}", name=name
        )
    loss, metrics = returned
    if not isinstance(metrics, Mapping):
        raise CustomLossError(
            f"must return a mapping of metrics, got {type(metrics).__name__}", name=name
        )
    if isinstance(loss, int | float) and not strict:
        loss = torch.tensor(float(loss))
    if not isinstance(loss, torch.Tensor):
        raise CustomLossError(f"must return a torch tensor, not {type(loss).__name__}", name=name)
    if loss.numel() != 1:
        raise CustomLossError(
            f"must return one number, not a tensor of shape {tuple(loss.shape)}; sum or average it",
            name=name,
        )
    if not torch.isfinite(loss).all():
        raise CustomLossError(f"value is {float(loss.detach())}", name=name)
    if not (
        loss.is_floating_point() or loss.is_complex()
    ):  # an integer total would truncate the other terms
        loss = loss.float()
    return loss.reshape(()), metrics


def _check_gradients(found: Gradients | None, name: str | None) -> None:
    if found is None:
        raise CustomLossError(
            "is detached from the logprobs, so nothing would be trained", name=name
        )
    for index, gradient in enumerate(found):
        if gradient is not None and not torch.isfinite(gradient).all():
            raise CustomLossError(
                f"gradient at the logprobs of datum {index} is not finite", name=name
            )


def _plain(value: Any) -> Any:
    """A metric without tensors, so that it can be serialised."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.item() if value.numel() == 1 else value.tolist()
    if type(value).__module__ == "numpy":
        return value.tolist()  # also for a scalar
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
