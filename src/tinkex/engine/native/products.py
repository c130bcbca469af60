"""The products of `products.c`, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.products import AdaptedRows, Factors, TorchProducts

__all__ = ["NativeProducts", "products_of"]

#: Rows that are packed side by side: `LANES` in `products.c`.
_LANES: Final = 16


def products_of(compiled: ctypes.CDLL) -> TorchProducts:
    """The products of the compiled library; those of PyTorch if the processor lacks the instructions."""
    return NativeProducts(compiled) if hasattr(compiled, "tinkex_product") else TorchProducts()


class NativeProducts(TorchProducts):
    """Products in C for bfloat16 weights; the others are those of PyTorch.

    The bits of a row do not depend on the other rows, nor on their number.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
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
        if not _serves(weight):
            return super().linear(x_ND, weight, bias, dtype=dtype)
        return self._run(x_ND, weight, bias, dtype, _NONE)

    def adapted(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, rows: AdaptedRows
    ) -> Tensor:
        if not _serves(weight):
            return super().adapted(x_ND, weight, bias, rows)
        if not isinstance(rows.prepared, _Groups):
            rows.prepared = _Groups(rows.groups, x_ND.shape[0])
        return self._run(x_ND, weight, bias, None, rows.prepared)

    def adapted_and_inner(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors
    ) -> tuple[Tensor, Tensor]:
        if not _serves(weight):
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


def _serves(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and weight.is_contiguous()


class _Groups:
    """Rows with their factors, as the array of `Group` in `products.c`: eight numbers each."""

    def __init__(
        self, groups: Sequence[tuple[slice, Factors]], count: int, inner: Tensor | None = None
    ) -> None:
        self.count, self.widest = len(groups), 0
        numbers = []
        for where, factors in groups:
            begin, end, _ = where.indices(count)
            if factors.prepared is None:
                factors.prepared = _addresses(factors)
            numbers.append(
                (begin, end, *factors.prepared[:5], 0 if inner is None else inner.data_ptr())
            )
            self.widest = max(self.widest, factors.prepared[0])
        self._numbers = np.array(numbers, np.int64)
        self.start = self._numbers.ctypes.data


def _addresses(factors: Factors) -> tuple[Any, ...]:
    """Columns, spans, where A, B and the spans are, and what must stay in memory."""
    spans = np.array(factors.spans, np.int64)
    a, b = factors.a.data_ptr(), factors.b.data_ptr()
    return factors.a.shape[0], len(spans), a, b, spans.ctypes.data, spans


_NONE: Final = _Groups((), 0)
