"""From hidden states to the logprobs of targets, with gradients, for some positions at a time.

Logits have the type of the products. If an adapter of the unembedding adds to them they are float32, as its factors are:
as in the decoder, so that both compute the same logits.

Shapes: N positions, D hidden, V vocabulary, K targets per position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import TorchKernels
from .lora import Pair
from .products import TorchProducts

__all__ = ["target_logprobs", "unembedded"]


def unembedded(
    hidden_ND: Tensor,
    weight: Tensor,
    pair: Pair | None,
    scale: float,
    products: TorchProducts,
    dtype: torch.dtype,
) -> Tensor:
    """Logits of float32 hidden states; float32 with an adapter, otherwise in the `dtype` of the products."""
    a, b = (None, None) if pair is None else (pair.a, pair.b)
    logits: Tensor = _Unembedded.apply(hidden_ND, weight, a, b, scale, products, dtype)  # type: ignore[no-untyped-call]
    return logits


class _Unembedded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        scale: float,
        products: TorchProducts,
        dtype: torch.dtype,
    ) -> Tensor:
        inner = None
        if a is None or b is None:
            logits = products.linear(hidden_ND.to(dtype), weight)
        else:
            logits = products.linear(hidden_ND.to(dtype), weight, dtype=torch.float32)
            inner = products.linear(hidden_ND, a).mul_(scale)
            products.add_linear(logits, inner, b)
        ctx.save_for_backward(hidden_ND, weight, a, b, inner)
        ctx.scale, ctx.products, ctx.dtype = scale, products, dtype
        return logits

    @staticmethod
    def backward(ctx: Any, g_NV: Tensor) -> Any:
        hidden_ND, weight, a, b, inner = ctx.saved_tensors
        products: TorchProducts = ctx.products
        hidden_g = products.back(g_NV.to(ctx.dtype), weight).float()
        if a is None:
            return hidden_g, None, None, None, None, None, None
        inner_g = products.back(g_NV, b).mul_(ctx.scale)
        products.add_back(hidden_g, inner_g, a)
        a_g = products.back(inner_g.t().contiguous(), hidden_ND)
        b_g = products.back(inner.t().contiguous(), g_NV).t()
        return hidden_g, None, a_g, b_g, None, None, None


def target_logprobs(logits_NV: Tensor, targets_NK: Tensor, kernels: TorchKernels) -> Tensor:
    """Logprobs of the targets in float32. The backward pass overwrites the logits with their gradient."""
    logprobs: Tensor = _TargetLogprobs.apply(logits_NV, targets_NK, kernels)  # type: ignore[no-untyped-call]
    return logprobs


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_NK: Tensor, kernels: TorchKernels) -> Tensor:
        total_N1 = kernels.log_sum_exp(logits_NV)
        ctx.save_for_backward(logits_NV, total_N1, targets_NK)
        ctx.kernels = kernels
        return logits_NV.gather(-1, targets_NK).float() - total_N1

    @staticmethod
    def backward(ctx: Any, g_NK: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, total_N1, targets_NK = ctx.saved_tensors
        ctx.kernels.logits_back(logits_NV, total_N1, targets_NK, g_NK)
        return logits_NV, None, None
