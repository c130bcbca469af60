"""Measure the cost of a traced loss before it runs, and run it over the examples of a pass.

A graph first runs on torch's meta device: tensors have shapes but no data. This run counts the memory that would be
allocated, forward and backward, and the elements that would be computed. A pass starts only if all of its examples
are within the limits.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinkex.errors import InvalidInputError

from .graphs import reads_sizes
from .traced import TracedLoss
from .values import Array, Example, LossLimits, TracedGraph

__all__ = ["TracedSum"]

#: Cost of calling an operation, expressed as computed elements.
_CALL: Final = 4000
#: Limit of torch operations in one run, forward and backward: one node can run a loop of many.
_MAX_CALLS: Final = 20_000
#: Cost per element of operations that cost more than one.
_WEIGHTS: Final = {"aten::sort": 16, "aten::topk": 8, "aten::median": 8, "aten::cumsum": 2}
_PRODUCTS: Final = {
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::dot",
    "aten::mv",
}
_CACHED: Final = 4096

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class _TooMuchError(Exception):
    """The run on the meta device exceeded a limit."""


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that operations on meta tensors would allocate and the elements they would compute."""

    def __init__(self, limits: LossLimits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limits = limits
        self._live = 0
        self._calls = 0
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        self.work = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        outputs = [item for item in tree_leaves(output) if isinstance(item, Tensor)]
        sizes = [tensor.numel() for tensor in (*inputs, *outputs)]
        name = func._schema.name
        elements = max(sizes, default=0) * _WEIGHTS.get(name, 1)
        if name in _PRODUCTS:  # count the multiplications
            left = inputs[-2]
            elements = max(elements, left.numel() * inputs[-1].shape[-1])
        self._calls += 1
        self.work += elements + _CALL
        for tensor in outputs:
            self._allocate(tensor.untyped_storage())
        if self._calls > _MAX_CALLS:
            raise _TooMuchError(f"takes more than {_MAX_CALLS} operations for one example")
        if self.work > self._limits.max_loss_work:
            raise too_much_work(self._limits)
        return output

    def guess_backward(self) -> None:
        """Count the backward run as twice the forward run, because it cannot be measured."""
        self.work *= 3
        self._hold(2 * self.peak)

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        """Count a storage while it is alive; views share one storage."""
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def free(_: object) -> None:
            self._live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, free)
        self._hold(size)

    def _hold(self, size: int) -> None:
        self._live += size
        self.peak = max(self.peak, self._live)
        if self.peak > self._limits.max_loss_bytes:
            raise _TooMuchError(
                f"needs more than {self._limits.max_loss_bytes} bytes for one example; "
                "the limit is the service's setting max_loss_bytes"
            )


def too_much_work(limits: LossLimits) -> _TooMuchError:
    return _TooMuchError(
        f"computes more than {limits.max_loss_work} elements in a pass; "
        "the limit is the service's setting max_loss_work"
    )


class TracedSum:
    """A traced loss over all examples of a pass, one micro-batch after another."""

    def __init__(self, graph: TracedGraph, limits: LossLimits) -> None:
        self._loss = TracedLoss(graph)
        self._limits = limits
        self._metrics: dict[str, list[float]] = {}

    # -- before the pass ----------------------------------------------------------------------

    def check(self, examples: Sequence[Example], *, backward: bool) -> None:
        """Refuse a pass with missing inputs or above a limit, before it runs."""
        work = 0
        costs = _Costs(self._loss, self._limits, backward=backward)
        for index, example in enumerate(examples):
            self._loss.check_inputs(example.inputs)
            try:
                work += costs.of(_shapes(self._loss, example.inputs))
                if work > self._limits.max_loss_work:
                    raise too_much_work(self._limits)
            except _TooMuchError as error:
                raise self._loss.refused(f"{error} (at data.{index})") from None

    # -- during the pass ----------------------------------------------------------------------

    def sum(self, logp_N: Tensor, examples: Sequence[Example]) -> Tensor:
        """Sum the loss over a micro-batch; `logp_N` holds the positions of all examples one after another.

        Each example's gradient is computed before the next example runs, so only one needs memory at a time.
        """
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        backward = logp_N.requires_grad
        pieces = torch.split(logp_N.detach(), [example.length for example in examples])
        for piece, example in zip(pieces, examples, strict=True):
            logp = piece.requires_grad_(backward)
            value, metrics = self._loss(logp, example.inputs)
            if backward:
                gradients += torch.autograd.grad(value, logp)
            losses.append(value.detach())
            for name, number in metrics.items():
                self._metrics.setdefault(name, []).append(number)
        total = torch.stack(losses).sum()
        if not backward:
            return total
        joined: Tensor = _WithGradient.apply(logp_N, total, torch.cat(gradients))  # type: ignore[no-untyped-call]
        return joined

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics over all examples: the mean if the name ends with `:mean`, else the sum."""
        return {
            name: math.fsum(numbers) / (len(numbers) if name.endswith(":mean") else 1)
            for name, numbers in self._metrics.items()
        }


class _WithGradient(torch.autograd.Function):
    """A value whose gradient is already computed."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * g.to(gradient.dtype), None, None


# -- the cost of one example ---------------------------------------------------------------------

#: Measured work by loss and shapes. All passes of the process share it: training repeats the same shapes.
_known: Final[OrderedDict[Any, int]] = OrderedDict()
#: Recorded instead of work for rounded-up shapes that exceed a limit or fail; then the exact shapes decide.
_REFUSED: Final = -1


class _Costs:
    """The work of a loss for examples of given shapes; measured once for each."""

    def __init__(self, loss: TracedLoss, limits: LossLimits, *, backward: bool) -> None:
        self._loss, self._limits, self._backward = loss, limits, backward
        self._exact = reads_sizes(loss.graph)
        content = json.dumps([list(loss.graph.inputs), list(loss.graph.nodes)], default=str)
        self._key = hashlib.sha256(content.encode()).digest(), limits, backward

    def of(self, shapes: Shapes) -> int:
        """Return the work; raise if it exceeds a limit or the shapes do not fit the loss."""
        if not self._exact:
            # More data means more work here, so measuring the rounded-up shapes is enough, and these are few.
            rounded = tuple((tuple(map(_rounded, shape)), dtype) for shape, dtype in shapes)
            work = self._recall(rounded)
            if work is None:
                try:
                    work = self._measure(rounded)
                except (_TooMuchError, InvalidInputError):
                    work = _REFUSED
                self._remember(rounded, work)
            if work != _REFUSED:
                return work
        work = self._recall(shapes)
        if work is None or work == _REFUSED:
            work = self._measure(shapes)
            self._remember(shapes, work)
        return work

    def _recall(self, shapes: Shapes) -> int | None:
        key = self._key, shapes
        if key not in _known:
            return None
        _known.move_to_end(key)
        return _known[key]

    def _remember(self, shapes: Shapes, work: int) -> None:
        _known[self._key, shapes] = work
        while len(_known) > _CACHED:
            _known.popitem(last=False)

    def _measure(self, shapes: Shapes) -> int:
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        meter = _Meter(self._limits)
        with torch.set_grad_enabled(self._backward), meter:
            tensors[0].requires_grad_(self._backward)
            value, _ = self._loss.run(tensors)
            if self._backward:
                try:
                    value.backward()  # type: ignore[no-untyped-call]
                except RuntimeError:  # the gradient of an operation needs data
                    meter.guess_backward()
        return meter.work


def _rounded(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _shapes(loss: TracedLoss, inputs: Mapping[str, Array]) -> Shapes:
    """Shapes and types of the inputs that a loss reads; logprobs have the shape of the targets."""
    read = [inputs[name] for name, _ in loss.graph.inputs[1:]]
    logprobs = inputs["target_tokens"].shape, torch.float32
    return logprobs, *((array.shape, _dtype(array)) for array in read)


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
