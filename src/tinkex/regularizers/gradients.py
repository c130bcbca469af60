"""Gradients with respect to the logprobs, and their norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

__all__ = ["Gradients", "grad_norm", "gradients", "norm", "weighted_sum"]

#: One per leaf; None where the function does not depend on the leaf.
Gradients: TypeAlias = Sequence[torch.Tensor | None]


def gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Gradients | None:
    """The gradient of a scalar at every leaf; None if it depends on none of them."""
    if not loss.requires_grad:
        return None
    # Several losses may share a part of the graph, so it must be kept.
    found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, retain_graph=True)
    return None if all(gradient is None for gradient in found) else found


def weighted_sum(
    terms: Sequence[tuple[float, Gradients]], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Σ weight · gradient at every leaf; zeros where no term depends on it."""
    total = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
    for weight, parts in terms:
        for place, part in zip(total, parts, strict=True):
            if part is not None and weight:  # 0 times infinity is not 0
                place.add_(part.detach(), alpha=weight)
    return total


def norm(parts: Gradients) -> float:
    """The Euclidean norm of all parts together."""
    squares = [part.detach().double().square().sum() for part in parts if part is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def grad_norm(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> float:
    """‖∂function/∂x‖ at one point; a result with several elements is summed first."""
    leaf = at.detach().clone().requires_grad_()
    return norm(gradients(function(leaf), [leaf]) or [])
