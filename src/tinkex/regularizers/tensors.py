"""Helpers that let a penalty accept one tensor or a list of tensors.

A penalty treats a list as the concatenated rows of its tensors. The last axis has the alternatives of a row, all other
axes are rows; a one-dimensional tensor is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum

from .protocol import Logprobs

__all__ = ["as_list", "field_of", "flat", "joined", "like", "reduced", "rows"]


def joined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a regularizer for one tensor to training, where it gets the concatenated tensors of all data."""

    @wraps(function)
    def regularizer(data: Sequence[Datum], logprobs: Logprobs, *options: Any) -> Any:
        return function(data, torch.cat(as_list(logprobs)), *options)

    return regularizer


def as_list(logprobs: Logprobs) -> list[torch.Tensor]:
    return [logprobs] if isinstance(logprobs, torch.Tensor) else list(logprobs)


def field_of(data: Sequence[Datum], logprobs: Logprobs, key: str) -> list[torch.Tensor]:
    """The field `key` of every datum if `logprobs` is a list, of the first datum if it is one tensor."""
    if not data:
        raise InvalidInputError(f"needs at least one datum with {key!r}", field="data")
    found = []
    chosen = data[:1] if isinstance(logprobs, torch.Tensor) else data
    for index, datum in enumerate(chosen):
        if key not in datum.loss_fn_inputs:
            raise InvalidInputError("is missing", field=f"data.{index}.loss_fn_inputs.{key}")
        found.append(datum.loss_fn_inputs[key].to_torch())
    return found


def like(tensors: Sequence[torch.Tensor], others: Any, what: str) -> list[torch.Tensor]:
    """The others as constants with the dtypes and shapes of `tensors`."""
    listed = as_list(others)
    if len(listed) != len(tensors):
        raise InvalidInputError(f"has {len(listed)} tensors, needs {len(tensors)}", field=what)
    for index, (tensor, other) in enumerate(zip(tensors, listed, strict=True)):
        if other.shape != tensor.shape:
            raise InvalidInputError(
                f"tensor {index} has shape {tuple(other.shape)}, the logprobs "
                f"{tuple(tensor.shape)}",
                field=what,
            )
    return [other.detach().to(tensor) for tensor, other in zip(tensors, listed, strict=True)]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of all tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def rows(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """One sum per row of all tensors."""
    return torch.cat([term.sum(-1).reshape(-1) for term in terms])


def reduced(values: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.mean()
