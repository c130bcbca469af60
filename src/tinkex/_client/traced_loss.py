"""Traced losses, run by handle: at the service if it supports them, else in this process.

A traced loss is a function of one datum's logprobs and of some of its inputs. `torch.fx` records its operations, and
the recorded graph runs instead of the function: it cannot branch on values and can call only torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Concatenate, Final, TypeAlias

from tinkex.errors import InvalidInputError
from tinkex.types import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
    Datum,
)

if TYPE_CHECKING:
    import torch

__all__ = ["LossHandle", "PerDatumLossFn", "check_inputs", "encoded", "local_loss", "traced"]

#: `(logprobs, *inputs of the datum) -> (loss, metrics named custom/<name>:sum or :mean)`
PerDatumLossFn: TypeAlias = Callable[
    Concatenate["torch.Tensor", ...], "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
]

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_MAX_INPUTS: Final = 16


@dataclass(frozen=True)
class LossHandle:
    """A traced loss; give it to `forward_backward_custom` in place of a function."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: Any = field(repr=False, compare=False)
    loss_id: str | None = None  # set if the service runs the loss

    @property
    def key(self) -> str:
        """Equal for losses with the same operations and the same inputs."""
        return hashlib.sha256(f"{self.graph.code}{self.inputs!r}".encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names in a datum's `loss_fn_inputs` that the loss reads, in the order of its parameters."""
        return tuple(item.name for item in self.inputs[1:])


def traced(
    fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank], session_id: str
) -> LossHandle:
    """Record the operations of a loss."""
    import torch.fx

    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _inputs(fn, name, input_ranks)
    try:
        graph = torch.fx.symbolic_trace(fn)
    except Exception as error:
        raise InvalidInputError(
            f"{name} cannot be traced: {error}. A traced loss calls torch functions only and does "
            "not branch on the values of its inputs",
            field="fn",
        ) from error
    return LossHandle(name, inputs, session_id, graph)


def _inputs(
    fn: PerDatumLossFn, name: str, ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    parameters = list(signature(fn).parameters.values())
    if not parameters or any(
        parameter.kind in {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
        for parameter in parameters
    ):
        raise InvalidInputError(
            f"{name} must name each of its inputs; *args and **kwargs are not supported", field="fn"
        )
    if len(parameters) > _MAX_INPUTS:
        raise InvalidInputError(f"{name} takes more than {_MAX_INPUTS} inputs", field="fn")
    names = ["logprobs", *(parameter.name for parameter in parameters[1:])]
    unknown = set(ranks) - {*names, parameters[0].name}
    if unknown:
        raise InvalidInputError(f"{name} has no input {min(unknown)!r}", field="input_ranks")
    made = []
    for position, declared in enumerate(names):
        if not _NAME.fullmatch(declared):
            raise InvalidInputError(
                f"{declared!r:.80} is not a valid name of an input: use lower-case letters, digits and _",
                field="fn",
            )
        rank = ranks.get(declared, ranks.get(parameters[0].name, 1) if position == 0 else None)
        if rank is None:
            raise InvalidInputError(f"lacks the rank of {declared!r}", field="input_ranks")
        if rank not in ({1, 2} if position == 0 else {0, 1, 2}):
            raise InvalidInputError(f"{declared!r} cannot have rank {rank}", field="input_ranks")
        made.append(CustomLossInput(name=declared, rank=rank))
    return tuple(made)


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Refuse data that lacks an input of the loss, or has it with another rank."""
    logprobs, *others = handle.inputs
    for index, datum in enumerate(data):
        wanted = [("target_tokens", logprobs.rank), *((item.name, item.rank) for item in others)]
        for name, rank in wanted:
            tensor = datum.loss_fn_inputs.get(name)
            if tensor is None:
                raise InvalidInputError(
                    f"is required by the loss {handle.name}", field=f"data.{index}.{name}"
                )
            found = 1 if tensor.shape is None else len(tensor.shape)
            if found != rank:
                raise InvalidInputError(
                    f"has rank {found}, the loss {handle.name} takes rank {rank}",
                    field=f"data.{index}.{name}",
                )


def local_loss(
    handle: LossHandle,
) -> Callable[[list[Datum], list[Any]], tuple[Any, dict[str, float]]]:
    """The traced loss as a function of a whole batch, run in this process."""

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total: Any = None
        metrics: dict[str, list[float]] = {}
        for datum, logp in zip(data, logprobs, strict=True):
            inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
            value, numbers = handle.graph(logp, *inputs)
            total = value if total is None else total + value
            for name, number in numbers.items():
                metrics.setdefault(name, []).append(float(number.detach()))
        return total, {
            name: math.fsum(numbers) / (len(numbers) if name.endswith(":mean") else 1)
            for name, numbers in metrics.items()
        }

    return loss


# -- on the wire -----------------------------------------------------------------------------------


def encoded(handle: LossHandle) -> CustomLossGraph:
    """The recorded graph as plain data. The service decides which operations it allows."""
    from torch.fx.node import _get_qualified_name

    nodes = []
    for node in handle.graph.graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            target = _get_qualified_name(node.target)
            if target.startswith("_operator."):  # CPython's internal name of the module `operator`
                target = target.removeprefix("_")
        nodes.append(
            CustomLossNode(
                op=node.op,
                name=node.name,
                target=target,
                args=[_written(argument) for argument in node.args],
                kwargs={name: _written(argument) for name, argument in node.kwargs.items()},
            )
        )
    return CustomLossGraph(nodes=nodes)


def _written(value: Any) -> Any:
    import torch
    import torch.fx

    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_written(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_written(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(name): _written(item) for name, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_written(part) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    raise InvalidInputError(
        f"passes a {type(value).__name__} to an operation; values of this type cannot be sent",
        field="fn",
    )
