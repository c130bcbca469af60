"""The kernels of `kernels.c`, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from tinkex.config import read_env
from tinkex.engine.kernels import TorchKernels

from .attention import NativeAttention
from .library import library
from .products import NativeProducts

__all__ = ["NativeKernels", "kernels_for"]

_Call = Callable[..., None]
_Type = type[ctypes.c_void_p | ctypes.c_long | ctypes.c_int | ctypes.c_float]
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_BEGIN: Final = [_INT, _INT]  # threads, half
_SIZES: Final = [_LONG, _LONG]  # rows, width


def kernels_for(
    device: torch.device, dtype: torch.dtype, *, native: bool | None = None
) -> TorchKernels:
    """The kernels for products of a type: native ones on a CPU if this machine compiles them and `native` allows it.

    Without `native`, the environment variable TINKEX_KERNELS decides.
    """
    allowed = read_env("TINKEX_KERNELS") != TorchKernels.name if native is None else native
    served = allowed and device.type == "cpu" and dtype in {torch.float32, torch.bfloat16}
    compiled = library() if served else None
    return TorchKernels() if compiled is None else NativeKernels(compiled)


class NativeKernels(TorchKernels):
    """Kernels in C for tensors of a CPU; operations that have none are those of PyTorch."""

    name = "native"

    def __init__(self, compiled: ctypes.CDLL) -> None:
        def function(name: str, *arguments: _Type) -> _Call:
            found = compiled[f"tinkex_{name}"]
            found.argtypes, found.restype = [*_BEGIN, *arguments, *_SIZES], None
            return found

        self.products = NativeProducts(compiled)
        self.attention = NativeAttention(compiled)
        pointers = [_POINTER] * 8
        self._norm = function("norm", *pointers[:4], _FLOAT, _POINTER, _INT)
        self._norm_back = function("norm_back", *pointers[:4], _FLOAT, _POINTER)
        self._gated = function("gated", *pointers[:2])
        self._gated_back = function("gated_back", *pointers[:4])
        self._log_sum_exp = function("log_sum_exp", *pointers[:2])
        self._logits_back = function("logits_back", *pointers[:4], _LONG)

    def norm(
        self, x_ND: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        x_ND = x_ND.contiguous()
        out = torch.empty_like(x_ND, dtype=dtype)
        self._norm(
            *_begin(out),
            _at(x_ND),
            None,
            None,
            _at(weight),
            eps,
            _at(out),
            _half(out),
            *_size(x_ND),
        )
        return out

    def add(self, x_ND: Tensor, delta_ND: Tensor) -> Tensor:
        total = torch.empty_like(x_ND)
        self._norm(
            *_begin(delta_ND),
            *(_at(x_ND), _at(delta_ND), _at(total), None, 0.0, None, 0),
            *_size(x_ND),
        )
        return total

    def add_norm(
        self, x_ND: Tensor, delta_ND: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, out = torch.empty_like(x_ND), torch.empty_like(delta_ND)
        self._norm(
            *_begin(delta_ND),
            *(_at(x_ND), _at(delta_ND), _at(total), _at(weight), eps, _at(out), _half(out)),
            *_size(x_ND),
        )
        return total, out

    def add_norm_back(
        self, g_ND: Tensor, x_ND: Tensor, normed_g_ND: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        rounded = torch.empty_like(normed_g_ND) if _half(normed_g_ND) else g_ND
        self._norm_back(
            *_begin(normed_g_ND),
            *(_at(g_ND), _at(x_ND), _at(normed_g_ND), _at(weight), eps, _at(rounded)),
            *_size(x_ND),
        )
        return rounded

    def gated(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._gated(*_begin(gate_up), _at(gate_up), _at(out), *_size(out))
        return out

    def gated_back(self, gate_up: Tensor, g_NI: Tensor) -> tuple[Tensor, Tensor]:
        gradient, out = torch.empty_like(gate_up), torch.empty_like(g_NI)
        self._gated_back(
            *_begin(gate_up), *(_at(gate_up), _at(g_NI), _at(gradient), _at(out)), *_size(out)
        )
        return gradient, out

    def log_sum_exp(self, logits_NV: Tensor) -> Tensor:
        total = logits_NV.new_empty(len(logits_NV), 1, dtype=torch.float32)
        self._log_sum_exp(*_begin(logits_NV), _at(logits_NV), _at(total), *_size(logits_NV))
        return total

    def logits_back(
        self, logits_NV: Tensor, total_N1: Tensor, targets_NK: Tensor, g_NK: Tensor
    ) -> None:
        targets_NK, g_NK = targets_NK.contiguous(), g_NK.contiguous()
        self._logits_back(
            *_begin(logits_NV),
            *(_at(logits_NV), _at(total_N1), _at(targets_NK), _at(g_NK), g_NK.shape[1]),
            *_size(logits_NV),
        )


def _begin(products: Tensor) -> tuple[int, int]:
    """The arguments that all functions begin with: threads, and whether the products are bfloat16."""
    return torch.get_num_threads(), _half(products)


def _half(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _size(tensor: Tensor) -> tuple[int, int]:
    width = tensor.shape[-1]
    return tensor.numel() // width, width
