"""Losses traced by clients: graphs of known operations, never code.

The value of a node is a tensor, a number, or a short flat tuple of either (a shape, or the result of `max` over a
dimension). So only tensors can grow, and `traced_cost` measures their size before the loss runs.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from tinkex.errors import InvalidInputError

from . import graphs
from .checks import Loss
from .values import Array, TracedGraph

__all__ = ["CUSTOM", "TracedLoss"]

#: Requirements of the loss `custom`, besides the inputs that its graph reads.
CUSTOM: Final = Loss("custom", soft_targets=True, whole_sequences=True)

#: Limit for a tuple that is the value of a node: the number of dimensions that a tensor can have.
_MAX_TUPLE: Final = 64
_METRIC: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_CONSTANTS: Final = {
    kind: {name: getattr(torch, name) for name in names} for kind, names in graphs.CONSTANTS.items()
}


def _attribute(value: Any, name: str) -> Any:
    """`getattr`, restricted to harmless attributes of tensors."""
    if not isinstance(value, Tensor) or name not in graphs.ATTRIBUTES:
        raise TypeError(f"reads .{name!s:.40} of a {type(value).__name__}")
    return getattr(value, name)


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Refuse lists and strings: a tensor's shape times a billion would fill the memory."""

    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, Sequence) or isinstance(right, Sequence):
            raise TypeError("does arithmetic with a list or a string")
        return function(left, right)

    return checked


def _power(base: Any, exponent: Any) -> Any:
    # Not Python's power of integers: its result has no size limit.
    of_tensors = isinstance(base, Tensor) or isinstance(exponent, Tensor)
    return operator.pow(base, exponent) if of_tensors else math.pow(base, exponent)


def _masked_select(values: Tensor, mask: Tensor) -> Tensor:
    if not values.is_meta:
        return torch.masked_select(values, mask)
    return torch.where(mask, values, values).flatten()  # upper limit: the mask selects everything


def _item(value: Any, index: Any) -> Any:
    """`value[index]`; on the meta device, assume that a mask selects everything."""
    if not (isinstance(value, Tensor) and value.is_meta):
        return operator.getitem(value, index)
    known: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype in {torch.bool, torch.uint8}:
            places = torch.empty(part.numel(), dtype=torch.long, device="meta")
            known += [places] * part.dim()
        else:
            known.append(part)
    return value[tuple(known)]


def _converted(value: Tensor, *wanted: Any, **options: Any) -> Tensor:
    """`value.to(…)` that ignores devices: the value stays on the model's device, or on the meta device."""
    kept = [each for each in wanted if not isinstance(each, str | torch.device | None)]
    return value.to(*kept, **options) if kept or options else value


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = (
    {f"torch.{name}": getattr(torch, name) for name in graphs.TORCH}
    | {f"torch.nn.functional.{name}": getattr(F, name) for name in graphs.FUNCTIONAL}
    | {f"operator.{name}": getattr(operator, name) for name in graphs.OPERATOR}
    | {f"math.{name}": getattr(math, name) for name in graphs.MATH}
    | {f"operator.{name}": _of_numbers(getattr(operator, name)) for name in ("mod", "mul")}
    | {
        "operator.pow": _power,
        "operator.getitem": _item,
        "torch.masked_select": _masked_select,
        "getattr": _attribute,
    }
)


class TracedLoss:
    """A checked graph; runs on one example at a time."""

    def __init__(self, graph: TracedGraph) -> None:
        graphs.check_graph(graph)
        self.graph = graph
        self._dying = graphs.last_uses(graph)

    def __call__(
        self, logprobs: Tensor, inputs: Mapping[str, Array]
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss and the metrics of one example."""
        given = [
            torch.tensor(inputs[name], device=logprobs.device) for name, _ in self.graph.inputs[1:]
        ]
        loss, metrics = self.run([logprobs, *given])
        return loss, {
            name: float(value.detach() if isinstance(value, Tensor) else value)
            for name, value in metrics.items()
        }

    def check_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Refuse an example if an input of the loss is missing or has the wrong rank."""
        for name, rank in self.graph.inputs[1:]:
            array = inputs.get(name)
            if array is None:
                raise self.refused(f"takes {name!r}, which a datum does not have")
            if array.ndim != rank:
                raise self.refused(f"takes {name!r} of rank {rank}, a datum has rank {array.ndim}")

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss and the metrics, from real tensors or from meta tensors (shapes without data).

        Each value is freed after its last use.
        """
        values = iter(tensors)
        known: dict[str, Any] = {}
        for node, dying in zip(self.graph.nodes, self._dying, strict=True):
            try:
                if node["op"] == "output":
                    return self._result(_value(node["args"][0], known), tensors[0])
                known[node["name"]] = _run(node, known, values)
            except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
                raise self.refused(
                    f"failed at {node['name']} ({node['target']}): {error}"
                ) from error
            for name in dying:
                del known[name]
        raise self.refused("returns nothing")

    def _result(self, value: Any, logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
        pair = isinstance(value, tuple | list) and len(value) == 2
        loss, metrics = value if pair else (value, {})
        if not isinstance(loss, Tensor) or loss.dim():
            raise self.refused("must return a scalar loss and a dict of scalar metrics")
        if loss.grad_fn is None and logprobs.requires_grad:
            raise self.refused("does not depend on the logprobs")
        for name, number in dict(metrics).items():
            if not _METRIC.fullmatch(str(name)):
                raise self.refused(f"names a metric {name!r:.80}; write custom/<name>:sum or :mean")
            if not isinstance(number, Tensor | int | float) or (
                isinstance(number, Tensor) and number.numel() != 1
            ):
                raise self.refused(f"gives a metric {name!r:.80} that is not a number")
        return loss, dict(metrics)

    def refused(self, complaint: str) -> InvalidInputError:
        return InvalidInputError(f"the loss {self.graph.name!r:.80} {complaint}", field="loss_fn")


def _run(node: Mapping[str, Any], known: Mapping[str, Any], inputs: Any) -> Any:
    if node["op"] == "placeholder":
        return next(inputs)
    args = [_value(argument, known) for argument in node["args"]]
    options = {name: _value(argument, known) for name, argument in node["kwargs"].items()}
    options.pop("device", None)  # everything stays on the model's device
    target: str = node["target"]
    if node["op"] == "call_function":
        value = _FUNCTIONS[target](*args, **options)
    elif not isinstance(args[0], Tensor):
        raise TypeError(f"calls .{target}() of a {type(args[0]).__name__}")
    elif target == "masked_select":
        value = _masked_select(*args, **options)
    elif target == "to":
        value = _converted(*args, **options)
    else:
        value = getattr(args[0], target)(*args[1:], **options)
    _check_value(value)
    return value


def _check_value(value: Any) -> None:
    """Refuse a value that is not a tensor, a number, or a short tuple of these."""
    if isinstance(value, tuple):
        if len(value) > _MAX_TUPLE or any(isinstance(item, tuple) for item in value):
            raise ValueError(f"makes a tuple of more than {_MAX_TUPLE} numbers")
        for item in value:
            _check_value(item)
    elif isinstance(value, int):
        if abs(value) > graphs.LARGEST_NUMBER:
            raise ValueError("makes a number that is too large")
    elif not isinstance(value, Tensor | float | torch.dtype | torch.device):
        raise TypeError(f"makes a {type(value).__name__}; tensors and numbers are allowed")


def _value(argument: Any, known: Mapping[str, Any]) -> Any:
    """Decode an argument of a node: a plain value, a list, or an object whose only key is the argument's kind."""
    if isinstance(argument, list):
        return [_value(item, known) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, value),) = argument.items()
    if kind == "ref":
        return known[value]
    if kind == "tuple":
        return tuple(_value(item, known) for item in value)
    if kind == "dict":
        return {name: _value(item, known) for name, item in value.items()}
    if kind == "slice":
        return slice(*(_value(item, known) for item in value))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float":
        return float(value)
    if kind == "device":
        return None
    return _CONSTANTS[kind][value]
