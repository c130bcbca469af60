"""The products of `float_products.c`, called with tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

__all__ = ["Adapters", "FloatProducts"]

#: Of the adapters of a batch: where the groups of rows are, how many, where the rows between the factors are, and their width.
Adapters = tuple[int | None, int, int | None, int]


class FloatProducts:
    """Products of float32 rows and weights. The bits of a row do not depend on the other rows, nor on their number."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._product = compiled["tinkex_float_product"]
        self._product.argtypes = [
            *(c_int, c_void_p, c_void_p, c_int, c_void_p),
            *(c_void_p, c_long, c_long, c_long, c_int, c_int),
            *(c_void_p, c_void_p, c_long, c_void_p, c_long, c_void_p, c_long),
        ]
        self._product.restype = None

    @classmethod
    def of(cls, compiled: ctypes.CDLL) -> FloatProducts | None:
        """None if the processor has neither AVX-512 nor AVX2."""
        return cls(compiled) if hasattr(compiled, "tinkex_float_product") else None

    def forward(self, x_ND: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x W' + b`."""
        return self._run(x_ND, weight, bias, transposed=True)[0]

    def adapted(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters
    ) -> Tensor:
        """`x W' + b + x A' B'` with the adapters of the rows."""
        return self._run(x_ND, weight, bias, adapters=adapters, transposed=True)[0]

    def forward_beside(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`x W' + b`, and the product of the same rows with another weight."""
        return self._run(x_ND, weight, bias, other=other, transposed=True)

    def back(self, g_ND: Tensor, weight: Tensor) -> Tensor:
        """`g W`."""
        return self._run(g_ND, weight, transposed=False)[0]

    def back_beside(self, g_ND: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """`g W`, and the product of the same rows with another weight."""
        return self._run(g_ND, weight, other=other, transposed=False)

    def add(self, y: Tensor, x_ND: Tensor, weight: Tensor) -> None:
        """`y + x W'`, in place."""
        self._run(x_ND, weight, sum_of=y, transposed=True)

    def add_back(self, y: Tensor, g_ND: Tensor, weight: Tensor) -> None:
        """`y + g W`, in place."""
        self._run(g_ND, weight, sum_of=y, transposed=False)

    def _run(
        self,
        x_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        sum_of: Tensor | None = None,
        other: Tensor | None = None,
        adapters: Adapters = (None, 0, None, 0),
        transposed: bool,
    ) -> tuple[Tensor, Tensor]:
        x_ND = x_ND.contiguous()
        rows, inputs = x_ND.shape
        side = 0 if transposed else 1
        y = torch.empty(rows, weight.shape[side]) if sum_of is None else sum_of
        assert y.is_contiguous()
        assert weight.is_contiguous()
        beside = y if other is None else torch.empty(rows, other.shape[side])
        self._product(
            torch.get_num_threads(),
            *(x_ND.data_ptr(), weight.data_ptr(), weight.dtype == torch.bfloat16),
            None if bias is None else bias.data_ptr(),
            *(y.data_ptr(), rows, y.shape[1], inputs, not transposed, sum_of is not None),
            *((None, None, 0) if other is None else _addresses(other, beside)),
            *adapters,
        )
        return y, beside


def _addresses(other: Tensor, beside: Tensor) -> tuple[int, int, int]:
    return other.data_ptr(), beside.data_ptr(), beside.shape[1]
