"""The products of `float_products.c`, called with tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

__all__ = ["FloatProducts"]


class FloatProducts:
    """Products of float32 rows and weights. The bits of a row do not depend on the other rows, nor on their number."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._product = compiled["tinkex_float_product"]
        self._product.argtypes = [
            *(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_long, c_long, c_int),
            *(c_void_p, c_void_p, c_long),
        ]
        self._product.restype = None

    @classmethod
    def of(cls, compiled: ctypes.CDLL) -> FloatProducts | None:
        """None if the processor has neither AVX-512 nor AVX2."""
        return cls(compiled) if hasattr(compiled, "tinkex_float_product") else None

    def forward(self, x_ND: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x W' + b`."""
        return self._run(x_ND, weight, bias, None, transposed=True)[0]

    def forward_beside(
        self, x_ND: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`x W' + b`, and the product of the same rows with another weight."""
        return self._run(x_ND, weight, bias, other, transposed=True)

    def back(self, g_ND: Tensor, weight: Tensor) -> Tensor:
        """`g W`."""
        return self._run(g_ND, weight, None, None, transposed=False)[0]

    def back_beside(self, g_ND: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """`g W`, and the product of the same rows with another weight."""
        return self._run(g_ND, weight, None, other, transposed=False)

    def _run(
        self,
        x_ND: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        other: Tensor | None,
        *,
        transposed: bool,
    ) -> tuple[Tensor, Tensor]:
        x_ND = x_ND.contiguous()
        rows, inputs = x_ND.shape
        side = 0 if transposed else 1
        y = torch.empty(rows, weight.shape[side])
        beside = y if other is None else torch.empty(rows, other.shape[side])
        self._product(
            torch.get_num_threads(),
            *(x_ND.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(y.data_ptr(), rows, y.shape[1], inputs, not transposed),
            *((None, None, 0) if other is None else _addresses(other, beside)),
        )
        return y, beside


def _addresses(other: Tensor, beside: Tensor) -> tuple[int, int, int]:
    return other.data_ptr(), beside.data_ptr(), beside.shape[1]
