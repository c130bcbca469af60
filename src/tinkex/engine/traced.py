"""Losses that users have traced and sent: graphs of known operations, never code.

A graph is a list of nodes as `torch.fx` records them. Every operation is looked up in a table; what is not there is
refused by name before anything runs. Nodes can only name nodes before them, so a graph always ends.
"""

# ruff: noqa: SIM905 - so many names read better without quotes

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

from .checks import Loss
from .values import Array, Example, TracedGraph

__all__ = ["CUSTOM", "TracedLoss", "TracedSum"]

#: What the loss `custom` needs of an example beside what its graph reads.
CUSTOM: Final = Loss("custom", soft_targets=True, whole_sequences=True)

_MAX_NODES: Final = 2000
_MAX_ELEMENTS: Final = 1 << 26
_METRIC: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_TORCH: Final = """
    abs add bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_max clamp_min clip concat cos cosh cumsum diff
    div divide dot eq erf exp exp2 expm1 flatten floor fmax fmin full_like gather ge gt index_select isfinite isinf
    isnan le lerp log log10 log1p log2 log_softmax logaddexp logcumsumexp logical_and logical_not logical_or
    logical_xor logsumexp lt masked_fill masked_select max maximum mean median min minimum mul multiply nan_to_num ne
    neg negative norm ones_like pow prod quantile reciprocal relu remainder reshape round rsqrt sigmoid sign sin
    softmax sort sqrt square squeeze stack std sub subtract sum take_along_dim tanh topk transpose true_divide
    unsqueeze var where xlogy zeros_like
""".split()
_FUNCTIONAL: Final = """
    binary_cross_entropy binary_cross_entropy_with_logits elu gelu hardtanh huber_loss kl_div l1_loss leaky_relu
    log_softmax logsigmoid mse_loss normalize relu sigmoid silu smooth_l1_loss softmax softplus softsign tanh
""".split()
_OPERATOR: Final = """
    abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg not_ or_ pos pow sub truediv xor
""".split()
_MATH: Final = (
    "ceil cos exp expm1 floor isfinite isinf isnan log log10 log1p log2 pow sin sqrt tanh".split()
)
_METHODS: Final = frozenset(_TORCH) | set(
    """
    all any bool contiguous detach dim double float half int long new_full numel permute size t to type_as view
    """.split()
)

#: What may be read of a tensor with a dot; fx writes that as a call of `getattr`.
_ATTRIBUTES: Final = frozenset("T device dtype mT ndim shape".split())


def _attribute(value: Any, name: str) -> Any:
    """`getattr` of what is known to be harmless."""
    if not isinstance(value, Tensor) or name not in _ATTRIBUTES:
        raise TypeError(f"reads .{name!s:.40} of a {type(value).__name__}")
    return getattr(value, name)


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Not of lists and text: the shape of a tensor, taken a billion times, would fill the memory."""

    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, Sequence) or isinstance(right, Sequence):
            raise TypeError("counts with a list or a text")
        return function(left, right)

    return checked


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = (
    {f"torch.{name}": getattr(torch, name) for name in _TORCH}
    | {f"torch.nn.functional.{name}": getattr(F, name) for name in _FUNCTIONAL}
    | {f"operator.{name}": getattr(operator, name) for name in _OPERATOR}
    | {f"math.{name}": getattr(math, name) for name in _MATH}
    | {f"operator.{name}": _of_numbers(getattr(operator, name)) for name in ("mod", "mul")}
    | {"getattr": _attribute}
)


class TracedLoss:
    """A graph that was found harmless, and can be run on one example after another."""

    def __init__(self, graph: TracedGraph) -> None:
        self._graph = graph
        _check(graph)

    def __call__(
        self, logprobs: Tensor, inputs: Mapping[str, Array]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of one example, and its metrics."""
        values = iter([logprobs, *self._inputs(logprobs, inputs)])
        known: dict[str, Any] = {}
        try:
            for node in self._graph.nodes:
                if node["op"] == "output":
                    return self._result(_value(node["args"][0], known), logprobs)
                known[node["name"]] = _run(node, known, values)
        except InvalidInputError:
            raise
        except Exception as error:
            raise self._refused(f"failed at {node['name']} ({node['target']}): {error}") from error
        raise self._refused("returns nothing")

    def _inputs(self, logprobs: Tensor, given: Mapping[str, Array]) -> list[Tensor]:
        found = []
        for name, rank in self._graph.inputs[1:]:
            array = given.get(name)
            if array is None:
                raise self._refused(f"takes {name!r}, which a datum does not have")
            if array.ndim != rank:
                raise self._refused(f"takes {name!r} of rank {rank}, a datum has rank {array.ndim}")
            found.append(torch.from_numpy(array).to(logprobs.device))
        return found

    def _result(self, value: Any, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
        pair = isinstance(value, tuple | list) and len(value) == 2
        loss, metrics = value if pair else (value, {})
        if not isinstance(loss, Tensor) or loss.dim():
            raise self._refused("must return a scalar loss and a dict of scalar metrics")
        if loss.grad_fn is None and logprobs.requires_grad:
            raise self._refused("does not depend on the logprobs")
        numbers = {}
        for name, number in dict(metrics).items():
            if not _METRIC.fullmatch(str(name)):
                raise self._refused(
                    f"names a metric {name!r:.80}; write custom/<name>:sum or :mean"
                )
            numbers[str(name)] = float(number.detach() if isinstance(number, Tensor) else number)
        return loss, numbers

    def _refused(self, complaint: str) -> InvalidInputError:
        return InvalidInputError(f"the loss {self._graph.name!r:.80} {complaint}", field="loss_fn")


def _check(graph: TracedGraph) -> None:
    """Refuse a graph that does anything but arithmetic."""

    def refuse(complaint: str) -> InvalidInputError:
        return InvalidInputError(complaint, field="graph")

    if len(graph.nodes) > _MAX_NODES:
        raise refuse(f"has {len(graph.nodes)} nodes, more than {_MAX_NODES}")
    placeholders = sum(node["op"] == "placeholder" for node in graph.nodes)
    if placeholders != len(graph.inputs):
        raise refuse(f"takes {placeholders} inputs, {len(graph.inputs)} are declared")
    if not graph.nodes or graph.nodes[-1]["op"] != "output":
        raise refuse("must end with its output")
    known: set[str] = set()
    for node in graph.nodes:
        kind, target = node["op"], node["target"]
        if kind == "call_function" and target not in _FUNCTIONS:
            raise refuse(f"calls {target!r:.100}, which a loss may not")
        if target == "getattr" and not _reads_attribute(node):
            raise refuse(f"reads {node['args'][1:]!r:.100}, which a loss may not")
        if kind == "call_method" and target not in _METHODS:
            raise refuse(f"calls the method {target!r:.100}, which a loss may not")
        if kind in {"call_module", "get_attr"}:
            raise refuse(f"reads {target!r:.100}: a loss may use its inputs and numbers only")
        for name in _references([node["args"], node["kwargs"]]):
            if name not in known:
                raise refuse(f"{node['name']!r:.100} uses {name!r:.100} before it is there")
        known.add(node["name"])


def _reads_attribute(node: Mapping[str, Any]) -> bool:
    """Whether what is read stands in the graph itself, and in the table."""
    args = node["args"]
    return len(args) == 2 and isinstance(args[1], str) and args[1] in _ATTRIBUTES


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _references(item)]
    if isinstance(value, dict):
        if set(value) == {"ref"}:
            return [str(value["ref"])]
        return [name for item in value.values() for name in _references(item)]
    return []


def _run(node: Mapping[str, Any], known: Mapping[str, Any], inputs: Any) -> Any:
    if node["op"] == "placeholder":
        return next(inputs)
    args = [_value(argument, known) for argument in node["args"]]
    options = {name: _value(argument, known) for name, argument in node["kwargs"].items()}
    if node["op"] == "call_function":
        function = _FUNCTIONS[node["target"]]
        if function is operator.pow and not any(isinstance(item, Tensor) for item in args):
            function = math.pow  # whole numbers would grow without end
        value = function(*args, **options)
    else:
        value = getattr(args[0], node["target"])(*args[1:], **options)
    if isinstance(value, Tensor) and value.numel() > _MAX_ELEMENTS:
        raise ValueError(f"makes a tensor of {value.numel()} elements")
    if isinstance(value, Sequence) and len(value) > _MAX_NODES:
        raise ValueError(f"makes a list of {len(value)}")
    if isinstance(value, int) and abs(value) > 1 << 53:
        raise ValueError("makes a number that is too large")
    return value


def _value(argument: Any, known: Mapping[str, Any]) -> Any:
    """An argument of a node: a number, a list, or an object with one key that says what it is."""
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
    if kind in _CONSTANTS:
        return _CONSTANTS[kind][value]
    if kind == "device":
        return None  # everything is where the model is
    raise ValueError(f"has an argument of kind {kind!r:.40}")


#: Words that stand for constants of torch, by the kind of argument they are.
_CONSTANTS: Final = {
    kind: {name: getattr(torch, name) for name in names.split()}
    for kind, names in {
        "dtype": "float32 float64 float16 bfloat16 int64 int32 bool",
        "layout": "strided",
        "memory_format": "contiguous_format preserve_format",
    }.items()
}


class TracedSum:
    """A traced loss over all examples of a pass, one micro-batch after another."""

    def __init__(self, graph: TracedGraph) -> None:
        self._loss = TracedLoss(graph)
        self._metrics: dict[str, list[float]] = {}

    def sum(self, logp_N: Tensor, examples: Sequence[Example]) -> Tensor:
        """The loss of a micro-batch, whose positions stand one after another."""
        losses = []
        pieces = torch.split(logp_N, [example.length for example in examples])
        for logp, example in zip(pieces, examples, strict=True):
            value, metrics = self._loss(logp, example.inputs)
            losses.append(value)
            for name, number in metrics.items():
                self._metrics.setdefault(name, []).append(number)
        return torch.stack(losses).sum()

    @property
    def metrics(self) -> dict[str, float]:
        """Sums, or means over the examples, as their names say."""
        return {
            name: math.fsum(numbers) / (len(numbers) if name.endswith(":mean") else 1)
            for name, numbers in self._metrics.items()
        }
