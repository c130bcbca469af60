"""From hidden states to the logprobs of targets, with gradients, for some positions at a time.

The product has the type of the frozen weight, everything after it is float32, and so are the factors of an adapter of
the unembedding: as in the decoder, so that both compute the same logits.

Shapes: N positions, D hidden, V vocabulary, K targets per position.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .lora import Pair
from .products import linear

__all__ = ["target_logprobs", "unembedded"]

#: Rows of logits that are worked on at once: 32 rows of 49k logits are 6 MB and stay in a CPU's cache.
_ROWS: Final = 32


def unembedded(hidden_ND: Tensor, weight: Tensor, pair: Pair | None, scale: float) -> Tensor:
    """Logits of float32 hidden states, in float32."""
    a, b = (None, None) if pair is None else (pair.a, pair.b)
    logits: Tensor = _Unembedded.apply(hidden_ND, weight, a, b, scale)  # type: ignore[no-untyped-call]
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
    ) -> Tensor:
        logits = linear(hidden_ND.to(weight.dtype), weight).float()
        inner = None
        if a is not None and b is not None:
            inner = linear(hidden_ND, a).mul_(scale)
            logits.addmm_(inner, b.t())
        ctx.save_for_backward(hidden_ND, weight, a, b, inner)
        ctx.scale = scale
        return logits

    @staticmethod
    def backward(ctx: Any, g_NV: Tensor) -> Any:
        hidden_ND, weight, a, b, inner = ctx.saved_tensors
        hidden_g = linear(g_NV.to(weight.dtype), weight.t()).float()
        if a is None:
            return hidden_g, None, None, None, None
        inner_g = linear(g_NV, b.t()).mul_(ctx.scale)
        hidden_g.addmm_(inner_g, a)
        return hidden_g, None, inner_g.t() @ hidden_ND, g_NV.t() @ inner, None


def target_logprobs(logits_NV: Tensor, targets_NK: Tensor) -> Tensor:
    """Logprobs of the targets. The backward pass overwrites the logits with their gradient, to save memory."""
    logprobs: Tensor = _TargetLogprobs.apply(logits_NV, targets_NK)  # type: ignore[no-untyped-call]
    return logprobs


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_NK: Tensor) -> Tensor:
        total = torch.cat(
            [rows.logsumexp(-1, keepdim=True) for rows in torch.split(logits_NV, _ROWS)]
        )
        ctx.save_for_backward(logits_NV, total, targets_NK)
        return logits_NV.gather(-1, targets_NK) - total

    @staticmethod
    def backward(ctx: Any, g_NK: Tensor) -> tuple[Tensor, None]:
        logits_NV, total, targets_NK = ctx.saved_tensors
        minus = -g_NK.sum(-1, keepdim=True)
        for start in range(0, len(logits_NV), _ROWS):
            rows = slice(start, start + _ROWS)
            logits_NV[rows].sub_(total[rows]).exp_().mul_(minus[rows])
        return logits_NV.scatter_add_(-1, targets_NK, g_NK), None
