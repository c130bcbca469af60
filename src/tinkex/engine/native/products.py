"""Products in C with the adapters of the rows: `products.c`, `float_products.c` and `adapters.c`, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.products import LARGE, AdaptedRows, Factors, TorchProducts

from .float_products import FloatProducts

__all__ = ["NativeProducts"]

#: Rows that are packed side by side: `LANES` in `products.c`.
_LANES: Final = 16
#: Columns of A, and outputs of B, that are packed side by side: `LANES` and `WIDE * LANES` in `adapters.c`.
_COLUMNS: Final = 16
_OUTPUTS: Final = 32


class NativeProducts(TorchProducts):
    """Products in C in both types, if the processor has the instructions; small float32 ones are PyTorch's.

    The bits of a row do not depend on the other rows, nor on their number.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._adapt = compiled["tinkex_adapt"]
        self._adapt.argtypes = [
            *(c_int, c_void_p, c_void_p, c_long, c_long, c_void_p, c_long, c_void_p, c_long),
        ]
        self._adapt.restype = None
        self._float = FloatProducts.of(compiled)
        self._has_products = hasattr(compiled, "tinkex_product")
        if self._has_products:
            self._product = compiled["tinkex_product"]
            self._product.argtypes = [
                *(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
                *(c_long, c_long, c_long, c_void_p, c_long, c_void_p),
            ]
            self._product.restype = None

    def linear(
        self,
        x_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if self._float is not None and _is_large_float(weight):
            return self._float.forward(x_ND, weight, bias)
        if not self._serves(weight):
            return super().linear(x_ND, weight, bias, dtype=dtype)
        return self._run(x_ND, weight, bias, dtype, _NONE)

    def back(self, g_ND: Tensor, weight: Tensor) -> Tensor:
        if self._float is not None and _is_large_float(weight):
            return self._float.back(g_ND, weight)
        return super().back(g_ND, weight)

    def adapted_back(self, g_ND: Tensor, weight: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        if self._float is not None and _is_large_float(weight):
            x_g, inner_g = self._float.back_beside(g_ND, weight, factors.b)
            return x_g.addmm_(inner_g, factors.a), inner_g
        return super().adapted_back(g_ND, weight, factors)

    def adapted(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, rows: AdaptedRows
    ) -> Tensor:
        if weight.dtype == torch.float32:
            return self._add_adapters(x_ND, self.linear(x_ND, weight, bias), rows)
        if not self._serves(weight):
            return super().adapted(x_ND, weight, bias, rows)
        if not isinstance(rows.prepared, _Groups):
            rows.prepared = _Groups(rows.groups, x_ND.shape[0])
        return self._run(x_ND, weight, bias, None, rows.prepared)

    def adapted_and_inner(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors
    ) -> tuple[Tensor, Tensor]:
        if self._float is not None and _is_large_float(weight):
            y, inner = self._float.forward_beside(x_ND, weight, bias, factors.a)
            return y.addmm_(inner, factors.b.t()), inner
        if not self._serves(weight):
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

    def _add_adapters(self, x_ND: Tensor, y: Tensor, rows: AdaptedRows) -> Tensor:
        x_ND = x_ND.contiguous()
        if not isinstance(rows.prepared, _PackedGroups):
            rows.prepared = _PackedGroups(rows.groups, len(x_ND))
        groups = rows.prepared
        self._adapt(
            torch.get_num_threads(),
            *(x_ND.data_ptr(), y.data_ptr(), y.shape[1], x_ND.shape[1]),
            *(groups.start, groups.count, groups.inner, groups.widest),
        )
        return y

    def _serves(self, weight: Tensor) -> bool:
        pairs = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        return self._has_products and pairs and weight.is_contiguous()


def _is_large_float(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.numel() >= LARGE and weight.is_contiguous()


class _Groups:
    """Rows with their factors, as the array of `Group` in `products.c`: eight numbers each."""

    def __init__(
        self, groups: Sequence[tuple[slice, Factors]], count: int, inner: Tensor | None = None
    ) -> None:
        self.count, self.widest = len(groups), 0
        numbers = []
        for where, factors in groups:
            begin, end, _ = where.indices(count)
            columns = factors.a.shape[0]
            if factors.prepared is None:
                # Packing pays for factors that are used again: a sampler's, not those of a micro-batch.
                factors.prepared = (
                    _addresses(factors) if inner is not None else _packed_pairs(factors)
                )
            address = 0 if inner is None else inner.data_ptr()
            numbers.append((begin, end, columns, *factors.prepared[:4], address))
            self.widest = max(self.widest, columns)
        self._numbers = np.array(numbers, np.int64)
        self.start = self._numbers.ctypes.data


def _addresses(factors: Factors) -> tuple[Any, ...]:
    """Not packed, where A is, spans and where they are, and what must stay in memory."""
    return (
        0,
        *_with_spans(factors, factors.a, [factors.b[rows, part] for rows, part in _spans(factors)]),
    )


def _packed_pairs(factors: Factors) -> tuple[Any, ...]:
    """The same for packed factors: they are read from end to end."""
    a = _panels(factors.a.view(torch.float32), _COLUMNS)  # pairs of bfloat16 as one number
    parts = [factors.b[rows, part].contiguous() for rows, part in _spans(factors)]
    return (1, *_with_spans(factors, a, parts))


def _with_spans(factors: Factors, a: Tensor, parts: list[Tensor]) -> tuple[Any, ...]:
    spans = np.array(
        [
            (rows.stop, part.start, part.stop, own.stride(0), own.data_ptr())
            for (rows, part), own in zip(_spans(factors), parts, strict=True)
        ],
        np.int64,
    )
    return a.data_ptr(), len(spans), spans.ctypes.data, spans, a, parts


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
        self.count, self.widest = len(groups), 0
        numbers = []
        for where, factors in groups:
            begin, end, _ = where.indices(count)
            if factors.prepared is None:
                factors.prepared = _packed(factors)
            panels = factors.prepared[0]
            numbers.append((begin, end, *factors.prepared[:4]))
            self.widest = max(self.widest, panels * _COLUMNS)
        self._numbers = np.array(numbers, np.int64)
        self._inner = torch.empty(count, self.widest)
        self.start, self.inner = self._numbers.ctypes.data, self._inner.data_ptr()


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
