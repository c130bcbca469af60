"""One tensor or a list of them: what a penalty needs so as not to care.

A penalty treats a list as the rows of its tensors, one after another. The last axis holds the alternatives of a row,
all other axes are rows; a tensor of one axis is one row.
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
    """Make a regularizer that was written for one tensor one for training too: it gets the data one after another."""

    @wraps(function)
    def regularizer(data: Sequence[Datum], logprobs: Logprobs, *options: Any) -> Any:
        return function(data, torch.cat(as_list(logprobs)), *options)

    return regularizer


def as_list(logprobs: Logprobs) -> list[torch.Tensor]:
    return [logprobs] if isinstance(logprobs, torch.Tensor) else list(logprobs)


def field_of(data: Sequence[Datum], logprobs: Logprobs, key: str) -> list[torch.Tensor]:
    """What the data bring under `key`: of every datum beside a list, of the first beside one tensor."""
    if not data:
        raise InvalidInputError(f"there is no datum to take {key!r} from", field="data")
    found = []
    chosen = data[:1] if isinstance(logprobs, torch.Tensor) else data
    for index, datum in enumerate(chosen):
        if key not in datum.loss_fn_inputs:
            raise InvalidInputError("is missing", field=f"data.{index}.loss_fn_inputs.{key}")
        found.append(datum.loss_fn_inputs[key].to_torch())
    return found


def like(tensors: Sequence[torch.Tensor], others: Any, what: str) -> list[torch.Tensor]:
    """The others as constants of the same kinds and shapes as `tensors`."""
    listed = as_list(others)
    if len(listed) != len(tensors):
        raise InvalidInputError(f"has {len(listed)} tensors for {len(tensors)}", field=what)
    for index, (tensor, other) in enumerate(zip(tensors, listed, strict=True)):
        if other.shape != tensor.shape:
            raise InvalidInputError(
                f"tensor {index} has the shape {tuple(other.shape)}, the logprobs "
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
