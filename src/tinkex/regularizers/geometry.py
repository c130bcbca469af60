"""Penalties on shape: orthogonal rows, and gradients of a target length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum

from .penalties import Penalty, Values
from .protocol import Logprobs
from .tensors import as_list, field_of, flat, like

__all__ = ["GradientPenalty", "Orthogonality"]


@dataclass(frozen=True)
class Orthogonality(Penalty):
    """How far the rows of a matrix are from orthogonal, measured by their products G = M·Mᵀ.

    `soft` is Σ G² off the diagonal, `hard` Σ (G − I)², `spectral` soft plus (trace G − n)². By default the last axis is
    a row's content and all other axes are rows; with `sequence` the positions are the rows, with `vocabulary` the
    alternatives. A list of data is stacked, so these two need data of one shape.
    """

    name: ClassVar[str] = "orthogonality"

    mode: Literal["soft", "hard", "spectral"] = "soft"
    normalize: bool = True
    axis: Literal["rows", "sequence", "vocabulary"] = "rows"

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        matrix = self._matrix(logprobs)
        if self.normalize:
            length = torch.linalg.vector_norm(matrix, dim=-1, keepdim=True)
            matrix = matrix / length.clamp_min(1e-8)
        products = matrix @ matrix.T
        unit = torch.eye(len(products), dtype=products.dtype, device=products.device)
        if self.mode == "hard":
            value = (products - unit).square().sum()
        else:
            value = (products * (1 - unit)).square().sum()
            if self.mode == "spectral":
                value = value + (products.trace() - len(products)).square()
        return value, {"orthogonality": value.detach()}

    def _matrix(self, logprobs: Logprobs) -> torch.Tensor:
        if self.axis == "rows":
            parts = [tensor.reshape(-1, tensor.shape[-1]) for tensor in as_list(logprobs)]
            _check_one(sorted({part.shape[-1] for part in parts}), "rows of one length")
            return torch.cat(parts)
        if isinstance(logprobs, torch.Tensor):
            stacked = logprobs
        else:
            _check_one(sorted({tuple(tensor.shape) for tensor in logprobs}), "data of one shape")
            stacked = torch.stack(list(logprobs))
        if stacked.dim() not in {2, 3}:
            raise InvalidInputError(
                f"axis {self.axis!r} needs two or three axes, not {stacked.dim()}", field="logprobs"
            )
        wanted = -1 if self.axis == "vocabulary" else -2
        moved = stacked.movedim(wanted, 0)
        return moved.reshape(len(moved), -1)


def _check_one(found: Sequence[Any], what: str) -> None:
    if len(found) > 1:
        raise InvalidInputError(f"needs {what}, not {found}", field="logprobs")


@dataclass(frozen=True)
class GradientPenalty(Penalty):
    """(‖∇f(x)‖ − target_norm)², where f is `loss_fn(data, logprobs)`, which may return metrics beside its value.

    x is the logprobs, or with `interpolated` a point between the reference in the data (0) and the logprobs (1), at
    `epsilon`. Without `epsilon` each call draws a random point.
    """

    name: ClassVar[str] = "gradient_penalty"

    loss_fn: Callable[..., Any] | None = None
    mode: Literal["output", "interpolated"] = "output"
    target_norm: float = 1.0
    reference_field: str = "reference_logprobs"
    epsilon: float | None = None

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        if self.loss_fn is None:
            raise InvalidInputError("is required", field="loss_fn")
        point = [
            tensor if tensor.requires_grad else tensor.detach().requires_grad_()
            for tensor in as_list(logprobs)
        ]
        if self.mode == "interpolated":
            what = f"loss_fn_inputs.{self.reference_field}"
            reference = like(point, field_of(data, logprobs, self.reference_field), what)
            share = float(torch.rand(())) if self.epsilon is None else self.epsilon
            point = [
                share * tensor + (1 - share) * other
                for tensor, other in zip(point, reference, strict=True)
            ]
        returned = self.loss_fn(data, point[0] if isinstance(logprobs, torch.Tensor) else point)
        value = returned[0] if isinstance(returned, tuple) else returned
        # create_graph: the length of the gradient is differentiated once more.
        found = torch.autograd.grad(value, point, create_graph=True, allow_unused=True)
        parts = [gradient for gradient in found if gradient is not None]
        length = torch.linalg.vector_norm(flat(parts)) if parts else value.new_zeros(())
        return (length - self.target_norm).square(), {}
