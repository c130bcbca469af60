"""Products in C with the adapters of the rows: `products.c`, `float_products.c` and `adapters.c`, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.products import AdaptedRows, Factors, PairGradients, TorchProducts

from .float_products import Adapters, FloatProducts

__all__ = ["NativeProducts"]

#: Rows that are packed side by side: `LANES` in `products.c`.
_LANES: Final = 16
#: Columns of A, and outputs of B, that are packed side by side: `COLUMNS` and `OUTPUTS` in `adapters.c`.
_COLUMNS: Final = 16
_OUTPUTS: Final = 32


class NativeProducts(TorchProducts):
    """Products in C in both types, if the processor has the instructions.

    The bits of a row do not depend on the other rows, nor on their number.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._adapt = compiled["tinkex_adapt"]
        self._adapt.argtypes = [
            *(c_int, c_void_p, c_void_p, c_long, c_long, c_void_p, c_long, c_void_p, c_long),
        ]
        self._adapt.restype = None
        self._add_gradients = compiled["tinkex_factor_gradients"]
        self._add_gradients.argtypes = [
            *(c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_float),
            *(c_long, c_long, c_long, c_long, c_void_p, c_long),
        ]
        self._add_gradients.restype = None
        self._float = FloatProducts.of(compiled)
        self.reads_half = self._float is not None
        self._has_products = hasattr(compiled, "tinkex_product")
        if self._has_products:
            self._product = compiled["tinkex_product"]
            self._product.argtypes = [
                *(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
                *(c_long, c_long, c_long, c_void_p, c_long, c_void_p),
            ]
            self._product.restype = None
            self._half_back = compiled["tinkex_adapted_back"]
            self._half_back.argtypes = [
                *(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_long),
                *(c_long, c_long, c_long, c_long),
            ]
            self._half_back.restype = None
        #: Whether gradients of bfloat16 rows are added in C too.
        self.adds_half_gradients = self._has_products

    def linear(
        self,
        x_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if self._float is not None and _is_float(x_ND, weight):
            return self._float.forward(x_ND, weight, bias)
        if not self._serves(x_ND, weight):
            return super().linear(x_ND, weight, bias, dtype=dtype)
        return self._run(x_ND, weight, bias, dtype, _NONE)

    def back(self, g_ND: Tensor, weight: Tensor) -> Tensor:
        if self._float is not None and _is_float(g_ND, weight):
            return self._float.back(g_ND, weight)
        return super().back(g_ND, weight)

    def add_linear(self, y: Tensor, x_ND: Tensor, weight: Tensor) -> Tensor:
        if self._float is None or not (_is_float(x_ND, weight) and y.is_contiguous()):
            return super().add_linear(y, x_ND, weight)
        self._float.add(y, x_ND, weight)
        return y

    def add_back(self, y: Tensor, g_ND: Tensor, weight: Tensor) -> Tensor:
        if self._float is None or not (_is_float(g_ND, weight) and y.is_contiguous()):
            return super().add_back(y, g_ND, weight)
        self._float.add_back(y, g_ND, weight)
        return y

    def adapted_back(self, g_ND: Tensor, weight: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        if self._float is not None and _is_float(g_ND, weight):
            x_g, inner_g = self._float.back_beside(g_ND, weight, factors.b)
            return self.add_back(x_g, inner_g, factors.a), inner_g
        if not self._serves(g_ND, weight):
            return super().adapted_back(g_ND, weight, factors)
        x_g = self.back(g_ND, weight)  # PyTorch's
        return x_g, self._half_inner_back(g_ND, factors, x_g)

    def inner_back(self, g_ND: Tensor, factors: Factors) -> Tensor:
        if self._has_products and g_ND.dtype == factors.b.dtype == torch.bfloat16:
            return self._half_inner_back(g_ND, factors, g_ND.new_empty(len(g_ND), 0))
        return super().inner_back(g_ND, factors)

    def add_gradients(
        self,
        g_ND: Tensor,
        x_ND: Tensor,
        inner: Tensor,
        inner_g: Tensor,
        scale: float,
        pairs: Sequence[PairGradients],
    ) -> None:
        if x_ND.dtype == torch.bfloat16 and not self.adds_half_gradients:
            return super().add_gradients(g_ND, x_ND, inner, inner_g, scale, pairs)
        rows = [each.contiguous() for each in (g_ND, x_ND, inner, inner_g)]
        numbers = [number for pair in pairs for number in _numbers(pair)]
        self._add_gradients(
            *(torch.get_num_threads(), x_ND.dtype == torch.bfloat16),
            *(each.data_ptr() for each in rows),
            *(scale, len(x_ND), g_ND.shape[1], x_ND.shape[1], inner.shape[1]),
            *((c_long * len(numbers))(*numbers), len(pairs)),
        )
        return None

    def adapted(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, rows: AdaptedRows
    ) -> Tensor:
        if x_ND.dtype == torch.float32:
            if not isinstance(rows.prepared, _PackedGroups):
                rows.prepared = _PackedGroups(rows.groups, len(x_ND))
            if self._float is not None and _is_float(x_ND, weight):
                return self._float.adapted(x_ND, weight, bias, rows.prepared.adapters)
            return self._add(x_ND, self.linear(x_ND, weight, bias), rows.prepared.adapters)
        if not self._serves(x_ND, weight):
            return super().adapted(x_ND, weight, bias, rows)
        if not isinstance(rows.prepared, _Groups):
            rows.prepared = _Groups(rows.groups, x_ND.shape[0])
        return self._run(x_ND, weight, bias, None, rows.prepared)

    def adapted_and_inner(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors
    ) -> tuple[Tensor, Tensor]:
        if self._float is not None and _is_float(x_ND, weight):
            y, inner = self._float.forward_beside(x_ND, weight, bias, factors.a)
            return self.add_linear(y, inner, factors.b), inner
        if not self._serves(x_ND, weight):
            return super().adapted_and_inner(x_ND, weight, bias, factors)
        inner = x_ND.new_empty(x_ND.shape[0], factors.a.shape[0])
        groups = _Groups([(slice(None), factors)], x_ND.shape[0], inner)
        return self._run(x_ND, weight, bias, None, groups), inner

    def _run(
        self,
        x_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        groups: _Groups,
    ) -> Tensor:
        rows, inputs = x_ND.shape
        outputs = weight.shape[0]
        x_ND = x_ND.contiguous()
        y = torch.empty(rows, outputs, dtype=dtype or torch.bfloat16)
        pairs = -(-rows // _LANES) * _LANES * (inputs + groups.widest) // 2
        # One cache line more, because the pairs are aligned to a cache line.
        space = torch.empty(pairs + 16, dtype=torch.int32)
        self._product(
            torch.get_num_threads(),
            *(x_ND.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(y.data_ptr(), dtype is torch.float32, rows, outputs, inputs),
            *(groups.start, groups.count, -(-space.data_ptr() // 64) * 64),
        )
        return y

    def _half_inner_back(self, g_ND: Tensor, factors: Factors, x_g: Tensor) -> Tensor:
        """`g B`; `g B A` is added to `x_g`."""
        g_ND, columns = g_ND.contiguous(), factors.a.shape[0]
        inner_g = g_ND.new_zeros(len(g_ND), columns)  # the last column may belong to no pair
        spans = [number for span in factors.spans for number in span]
        self._half_back(
            *(torch.get_num_threads(), g_ND.data_ptr(), x_g.data_ptr(), inner_g.data_ptr()),
            *(factors.a.data_ptr(), factors.b.data_ptr()),
            *((c_long * len(spans))(*spans), len(factors.spans)),
            *(*g_ND.shape, x_g.shape[1], columns),
        )
        return inner_g

    def _add(self, x_ND: Tensor, y: Tensor, adapters: Adapters) -> Tensor:
        x_ND = x_ND.contiguous()
        self._adapt(
            torch.get_num_threads(),
            *(x_ND.data_ptr(), y.data_ptr(), y.shape[1], x_ND.shape[1], *adapters),
        )
        return y

    def _serves(self, x_ND: Tensor, weight: Tensor) -> bool:
        pairs = x_ND.dtype == weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        return self._has_products and pairs and weight.is_contiguous()


def _is_float(rows: Tensor, weight: Tensor) -> bool:
    """Whether `float_products.c` can compute a product."""
    served = weight.dtype in (torch.float32, torch.bfloat16)
    return rows.dtype == torch.float32 and served and weight.is_contiguous()


def _numbers(pair: PairGradients) -> tuple[int, ...]:
    """A `Pair` in `gradients.c`."""
    rows, columns, a, b = pair
    assert a.is_contiguous()
    assert b.is_contiguous()
    return (
        *(columns.start, columns.stop - columns.start, rows.start, rows.stop - rows.start),
        *(a.data_ptr(), b.data_ptr()),
    )


class _Groups:
    """Rows with their factors, as the array of `Group` in `products.c`: seven numbers each."""

    def __init__(
        self, groups: Sequence[tuple[slice, Factors]], count: int, inner: Tensor | None = None
    ) -> None:
        self.count, self.widest = len(groups), 0
        numbers = []
        for where, factors in groups:
            begin, end, _ = where.indices(count)
            columns = factors.a.shape[0]
            if factors.prepared is None:
                factors.prepared = _addresses(factors, together=inner is None)
            address = 0 if inner is None else inner.data_ptr()
            numbers.append((begin, end, columns, *factors.prepared[:3], address))
            self.widest = max(self.widest, columns)
        self._numbers = np.array(numbers, np.int64)
        self.start = self._numbers.ctypes.data


def _addresses(factors: Factors, *, together: bool) -> tuple[Any, ...]:
    """Where A is, spans and where they are, and what must stay in memory.

    The parts of B are copied if they shall be `together` in memory: that pays for factors that are used again, a
    sampler's, not for those of a micro-batch.
    """
    parts = [factors.b[rows, part] for rows, part in _spans(factors)]
    if together:
        parts = [part.contiguous() for part in parts]
    spans = np.array(
        [
            (rows.stop, part.start, part.stop, own.stride(0), own.data_ptr())
            for (rows, part), own in zip(_spans(factors), parts, strict=True)
        ],
        np.int64,
    )
    return factors.a.data_ptr(), len(spans), spans.ctypes.data, spans, parts


def _spans(factors: Factors) -> list[tuple[slice, slice]]:
    """Rows of B, and their columns in whole pairs."""
    found, begin = [], 0
    for end, first, last in factors.spans:
        found.append((slice(begin, end), slice(first - first % 2, last + last % 2)))
        begin = end
    return found


class _PackedGroups:
    """Rows with their float32 factors, as the array of `Group` in `adapters.c`: six numbers each."""

    def __init__(self, groups: Sequence[tuple[slice, Factors]], count: int) -> None:
        widest, numbers = 0, []
        for where, factors in groups:
            begin, end, _ = where.indices(count)
            if factors.prepared is None:
                factors.prepared = _packed(factors)
            panels = factors.prepared[0]
            numbers.append((begin, end, *factors.prepared[:4]))
            widest = max(widest, panels * _COLUMNS)
        self._numbers = np.array(numbers, np.int64)
        self._inner = torch.empty(count, widest)
        start, inner = self._numbers.ctypes.data, self._inner.data_ptr()
        self.adapters: Adapters = (start, len(groups), inner, widest)


def _packed(factors: Factors) -> tuple[Any, ...]:
    """Panels and spans, where the packed A and the spans are, and what must stay in memory."""
    a = _panels(factors.a, _COLUMNS)
    parts, spans, begin = [], [], 0
    for end, first, last in factors.spans:
        part = _panels(factors.b[begin:end, first:last], _OUTPUTS)
        parts.append(part)
        spans.append((end, first, last - first, part.data_ptr()))
        begin = end
    numbers = np.array(spans, np.int64)
    return len(a), len(spans), a.data_ptr(), numbers.ctypes.data, numbers, a, parts


def _panels(factor: Tensor, wide: int) -> Tensor:
    """The rows of a factor, `wide` side by side; missing rows are zero."""
    count, length = factor.shape
    full = factor.new_zeros(-(-count // wide) * wide, length)
    full[:count] = factor
    return full.view(-1, wide, length).transpose(1, 2).contiguous()


_NONE: Final = _Groups((), 0)
