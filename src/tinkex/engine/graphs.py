"""Check the graphs of traced losses as plain data.

A graph is a list of nodes as `torch.fx` records them. Every operation must be in a table; an unknown one is refused
by name before anything runs. A node can refer only to earlier nodes, so a graph always terminates. Depth and number of
arguments are bounded: they are untrusted, and every later step walks through them.
"""

# ruff: noqa: SIM905 - long lists of names read better without quotes

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tinkex.errors import InvalidInputError

from .values import TracedGraph

__all__ = [
    "ATTRIBUTES",
    "CONSTANTS",
    "FUNCTIONAL",
    "LARGEST_NUMBER",
    "MATH",
    "METHODS",
    "OPERATOR",
    "TORCH",
    "check_graph",
    "last_uses",
    "reads_sizes",
]

MAX_NODES: Final = 2000
#: Levels of lists and objects in the arguments of a node.
MAX_DEPTH: Final = 8
#: Elements in all arguments of all nodes together.
MAX_ELEMENTS: Final = 20_000
MAX_TEXT: Final = 200
#: Larger integers are not exact as floats. Python's integers have no size limit, so one is needed.
LARGEST_NUMBER: Final = 1 << 53

TORCH: Final = """
    abs add bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_max clamp_min clip concat cos cosh cumsum diff
    div divide dot eq erf exp exp2 expm1 flatten floor fmax fmin full_like gather ge gt index_select isfinite isinf
    isnan le lerp log log10 log1p log2 log_softmax logaddexp logcumsumexp logical_and logical_not logical_or
    logical_xor logsumexp lt masked_fill masked_select max maximum mean median min minimum mul multiply nan_to_num ne
    neg negative norm ones_like pow prod quantile reciprocal relu remainder reshape round rsqrt sigmoid sign sin
    softmax sort sqrt square squeeze stack std sub subtract sum take_along_dim tanh topk transpose true_divide
    unsqueeze var where xlogy zeros_like
""".split()
FUNCTIONAL: Final = """
    binary_cross_entropy binary_cross_entropy_with_logits elu gelu hardtanh huber_loss kl_div l1_loss leaky_relu
    log_softmax logsigmoid mse_loss normalize relu sigmoid silu smooth_l1_loss softmax softplus softsign tanh
""".split()
OPERATOR: Final = """
    abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg not_ or_ pos pow sub truediv xor
""".split()
MATH: Final = (
    "ceil cos exp expm1 floor isfinite isinf isnan log log10 log1p log2 pow sin sqrt tanh".split()
)
_SIZES: Final = frozenset("dim numel size".split())
METHODS: Final = (
    frozenset(TORCH)
    | _SIZES
    | set(
        """
        all any bool contiguous detach double float half int long new_full permute t to type_as view
        """.split()
    )
)
#: Attributes of a tensor that a loss may read; fx records this as a call of `getattr`.
ATTRIBUTES: Final = frozenset("T device dtype mT ndim shape".split())
#: Names of torch constants, by kind of argument.
CONSTANTS: Final = {
    "dtype": "float32 float64 float16 bfloat16 int64 int32 bool".split(),
    "layout": ["strided"],
    "memory_format": ["contiguous_format", "preserve_format"],
}

#: Options that allocate memory which the cost measurement does not count.
_FORBIDDEN: Final = frozenset("out pin_memory".split())

_CALLABLE: Final = (
    {f"torch.{name}" for name in TORCH}
    | {f"torch.nn.functional.{name}" for name in FUNCTIONAL}
    | {f"operator.{name}" for name in OPERATOR}
    | {f"math.{name}" for name in MATH}
    | {"getattr"}
)


def check_graph(graph: TracedGraph) -> None:
    """Refuse a graph that does anything but arithmetic, or exceeds the limits above."""
    if len(graph.nodes) > MAX_NODES:
        raise _refused(f"has {len(graph.nodes)} nodes, more than {MAX_NODES}")
    placeholders = sum(node["op"] == "placeholder" for node in graph.nodes)
    if placeholders != len(graph.inputs):
        raise _refused(f"takes {placeholders} inputs, {len(graph.inputs)} are declared")
    if not graph.nodes or graph.nodes[-1]["op"] != "output" or not graph.nodes[-1]["args"]:
        raise _refused("must end with its output")
    known: set[str] = set()
    elements = 0
    for node in graph.nodes:
        _check_operation(node)
        for item, depth in _walk(node):
            elements += 1
            if elements > MAX_ELEMENTS:
                raise _refused(f"has more than {MAX_ELEMENTS} elements in its arguments")
            if depth > MAX_DEPTH:
                raise _refused(
                    f"nests its arguments deeper than {MAX_DEPTH} at {node['name']!r:.100}"
                )
            _check_argument(item, node, known)
        known.add(node["name"])


def _check_operation(node: Mapping[str, Any]) -> None:
    kind, target, args = node["op"], node["target"], node["args"]
    if len(node["name"]) > MAX_TEXT:
        raise _refused(f"has a node with a name of more than {MAX_TEXT} characters")
    if kind == "call_function" and target not in _CALLABLE:
        raise _refused(f"calls {target!r:.100}, which is not allowed in a loss")
    if target == "getattr" and not (
        len(args) == 2 and isinstance(args[1], str) and args[1] in ATTRIBUTES
    ):
        raise _refused(f"reads {args[1:]!r:.100}, which is not allowed in a loss")
    if kind == "call_method" and (target not in METHODS or not args):
        raise _refused(f"calls the method {target!r:.100}, which is not allowed in a loss")
    for name in _FORBIDDEN.intersection(node["kwargs"]):
        raise _refused(f"passes {name!r} at {node['name']!r:.100}, which is not allowed in a loss")
    if kind in {"call_module", "get_attr"}:
        raise _refused(f"reads {target!r:.100}: a loss may use only its inputs and numbers")


def _check_argument(item: Any, node: Mapping[str, Any], known: set[str]) -> None:
    at = f"at {node['name']!r:.100}"
    if isinstance(item, str) and len(item) > MAX_TEXT:
        raise _refused(f"has a text of more than {MAX_TEXT} characters {at}")
    if isinstance(item, int) and abs(item) > LARGEST_NUMBER:
        raise _refused(f"has a number above {LARGEST_NUMBER} {at}")
    if not isinstance(item, dict):
        return
    kind, value = next(iter(item.items()), ("", None))
    if kind == "ref" and isinstance(value, str) and len(item) == 1:
        if value not in known:
            raise _refused(f"{node['name']!r:.100} uses {value!r:.100} before it is defined")
    elif not (len(item) == 1 and _is_marked(kind, value)):
        raise _refused(f"has an argument of the unknown kind {kind!r:.40} {at}")


def _is_marked(kind: str, value: Any) -> bool:
    """Whether an object with one key encodes a kind of argument that JSON cannot express."""
    if kind == "tuple":
        return isinstance(value, list)
    if kind == "dict":
        return isinstance(value, dict)
    if kind == "slice":
        return isinstance(value, list) and 1 <= len(value) <= 3
    if kind == "float":
        # A tuple, not a set: the value may be a list, which is not hashable.
        return value in ("nan", "inf", "-inf")
    return kind in {"ellipsis", "device"} or value in CONSTANTS.get(kind, ())


def _walk(node: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield all arguments of a node and their nested elements, with their depth; uses no recursion."""
    waiting = [(item, 1) for item in [*node["args"], *node["kwargs"].values()]]
    while waiting:
        item, depth = waiting.pop()
        yield item, depth
        if isinstance(item, list):
            waiting += [(each, depth + 1) for each in item]
        elif isinstance(item, dict) and len(item) == 1:
            ((kind, value),) = item.items()
            # Only these kinds have nested elements.
            held = value.values() if kind == "dict" and isinstance(value, dict) else value
            if kind in {"tuple", "slice", "dict"} and not isinstance(
                held, str | int | float | None
            ):
                waiting += [(each, depth + 1) for each in held]


def last_uses(graph: TracedGraph) -> list[list[str]]:
    """For each node, the names of the values that no later node uses."""
    dying: list[list[str]] = [[] for _ in graph.nodes]
    seen: set[str] = set()
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        named = {
            item["ref"] for item, _ in _walk(node) if isinstance(item, dict) and "ref" in item
        } | {node["name"]}
        dying[position] = sorted(named - seen)
        seen |= named
    return dying


def reads_sizes(graph: TracedGraph) -> bool:
    """Whether a graph may compute with the sizes of its tensors: then less data can mean more work."""
    return any(
        (node["op"] == "call_method" and node["target"] in _SIZES)
        or (node["target"] == "getattr" and node["args"][1] in {"ndim", "shape"})
        for node in graph.nodes
    )


def _refused(complaint: str) -> InvalidInputError:
    return InvalidInputError(complaint, field="graph")
