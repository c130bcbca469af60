"""The products of activations and frozen weights, with the adapters of the rows: the fastest that this machine has.

`native.NativeProducts` are the fastest where this machine can compile them. Of PyTorch's own, oneDNN's product beats the
one behind `torch.nn.functional.linear` in float32 on processors of AMD: by 1.6 times for one row, by 1.2 times for 64.
Products have no gradient; training computes the gradients itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AdaptedRows", "Factors", "PairGradients", "TorchProducts", "linear"]


def _has_onednn() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


_ONEDNN: Final = _has_onednn()
#: Weights with fewer elements are left to `functional.linear`: other calls cost more than a small product saves.
_LARGE: Final = 1 << 18


@dataclass(eq=False)
class Factors:
    """The factors of an adapter for one projection, in the type of its rows.

    `a` is columns × inputs, with an even number of columns. `b` is outputs × columns and contains the adapter's scale.
    `spans` says which columns are not zero: each is the end of a range of outputs, and the first and last column for it.
    """

    a: Tensor
    b: Tensor
    spans: tuple[tuple[int, int, int], ...]
    #: What native products prepare for these factors, once.
    prepared: tuple[Any, ...] | None = None


class PairGradients(NamedTuple):
    """The gradients of one pair in float32; `rows` are its outputs in the fused B, `columns` its columns."""

    rows: slice
    columns: slice
    a: Tensor
    b: Tensor


class AdaptedRows:
    """Which rows of a batch use which factors; rows of one adapter are adjacent."""

    def __init__(self, groups: Sequence[tuple[slice, Factors]]) -> None:
        self.groups = groups
        #: What native products prepare for these rows, to be used again by the next step.
        self.prepared: object = None


class TorchProducts:
    """Products by PyTorch, for every device and type."""

    #: Whether products of float32 rows also read weights that are bfloat16, with the result of float32 weights.
    reads_half = False

    def linear(
        self,
        x_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`x W' + b`, rounded to the type of the rows, then converted to `dtype`."""
        return linear(x_ND, weight, bias).to(dtype or x_ND.dtype)

    def back(self, g_ND: Tensor, weight: Tensor) -> Tensor:
        """`g W`: the gradient of the rows of `linear`, given that of its result in the type of the rows."""
        return linear(g_ND, weight.t())

    def add_linear(self, y: Tensor, x_ND: Tensor, weight: Tensor) -> Tensor:
        """`y + x W'`, in place."""
        return y.addmm_(x_ND, weight.t())

    def add_back(self, y: Tensor, g_ND: Tensor, weight: Tensor) -> Tensor:
        """`y + g W`, in place."""
        return y.addmm_(g_ND, weight)

    def adapted(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, rows: AdaptedRows
    ) -> Tensor:
        """`x W' + b + x A' B'` with the factors of each row."""
        y = self.linear(x_ND, weight, bias)
        for where, factors in rows.groups:
            self.add_linear(y[where], linear(x_ND[where], factors.a), factors.b)
        return y

    def adapted_and_inner(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors
    ) -> tuple[Tensor, Tensor]:
        """The same with one adapter for all rows, and `x A'`, which the backward pass needs."""
        inner = linear(x_ND, factors.a)
        return self.add_linear(self.linear(x_ND, weight, bias), inner, factors.b), inner

    def adapted_back(self, g_ND: Tensor, weight: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """The gradients of the rows, `g W + g B A`, and of the rows between the factors, `g B`."""
        inner_g = self.inner_back(g_ND, factors)
        return self.add_back(self.back(g_ND, weight), inner_g, factors.a), inner_g

    def inner_back(self, g_ND: Tensor, factors: Factors) -> Tensor:
        """`g B`: the gradients of the rows between the factors."""
        return self.back(g_ND, factors.b)

    def add_gradients(
        self,
        g_ND: Tensor,
        x_ND: Tensor,
        inner: Tensor,
        inner_g: Tensor,
        scale: float,
        pairs: Sequence[PairGradients],
    ) -> None:
        """Add the gradients of the factors, `(g B)' x` and `scale · g' (x A')`, to those of the pairs."""
        a_g, b_g = inner_g.t() @ x_ND, (inner.t() @ g_ND).t().mul_(scale)
        for rows, columns, a, b in pairs:
            a.add_(a_g[columns])
            b.add_(b_g[rows, columns])


def linear(x_ND: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W' + b` in the type of the weight, without gradients.

    With a large weight, rows do not affect each other's bits; only a single row may differ from the same row among
    others in the last bit. The choice depends on the weight alone, so every engine makes the same.
    """
    small = weight.numel() < _LARGE
    if small or not _ONEDNN or x_ND.device.type != "cpu" or weight.dtype != torch.float32:
        return functional.linear(x_ND, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_ND, weight, bias, "none", [], "")
    return product
