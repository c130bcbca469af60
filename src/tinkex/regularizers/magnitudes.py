"""Penalties on magnitude: L1, L2, elastic net, and the distance of a magnitude from a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum

from .penalties import Penalty, Values
from .protocol import Logprobs
from .tensors import as_list, field_of, flat, reduced

__all__ = ["L1", "L2", "ElasticNet", "OutputMagnitude"]


@dataclass(frozen=True)
class _OfTarget(Penalty):
    """Applies to `logprobs`, to `probs`, or with `field:<key>` to a field of the data, which has no gradient."""

    target: str = "logprobs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in {"logprobs", "probs"} and not self.target.startswith("field:"):
            raise InvalidInputError(
                f"must be logprobs, probs or field:<key>, not {self.target!r}", field="target"
            )

    def _target(self, data: Sequence[Datum], logprobs: Logprobs) -> torch.Tensor:
        tensors = as_list(logprobs)
        if self.target.startswith("field:"):
            found = field_of(data, logprobs, self.target.removeprefix("field:"))
            return flat(found).to(tensors[0])
        return flat(tensors).exp() if self.target == "probs" else flat(tensors)


@dataclass(frozen=True)
class _Scaled(_OfTarget):
    """Multiplied by λ. A negative λ would turn the penalty into a reward without limit."""

    reduction: Literal["sum", "mean"] = "sum"
    lambda_: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lambda_ < math.inf:
            raise InvalidInputError(f"must be 0 or more, not {self.lambda_}", field="lambda")


@dataclass(frozen=True)
class L1(_Scaled):
    """λ · Σ|x|, or the mean: pulls values to exactly zero."""

    name: ClassVar[str] = "l1_sparsity"

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        size = self._target(data, logprobs).abs()
        raw = reduced(size, self.reduction)
        return self.lambda_ * raw, {"l1_raw": raw.detach(), "l1_mean": size.mean().detach()}


@dataclass(frozen=True)
class L2(_Scaled):
    """λ · Σy², or the mean, where y = x − center, clipped to ±clip: pulls values towards the centre."""

    name: ClassVar[str] = "l2_weight_decay"

    clip: float | None = None
    center: float | Literal["mean"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise InvalidInputError(f"must be more than 0, not {self.clip}", field="clip")
        if isinstance(self.center, str) and self.center != "mean":
            raise InvalidInputError(
                f"must be mean, a number or None, not {self.center!r}", field="center"
            )

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        x = self._target(data, logprobs)
        center = x.mean() if self.center == "mean" else self.center
        y = x if center is None else x - center
        if self.clip is not None:
            y = y.clamp(-self.clip, self.clip)
        raw = reduced(y.square(), self.reduction)
        metrics = {
            "l2_raw": raw.detach(),
            "l2_mean": x.square().mean().detach(),
            "center": "none"
            if center is None
            else float(center.detach() if isinstance(center, torch.Tensor) else center),
        }
        return self.lambda_ * raw, metrics


@dataclass(frozen=True)
class ElasticNet(_Scaled):
    """λ · (ρ · L1 + (1 − ρ) · L2) with ρ the `l1_ratio`."""

    name: ClassVar[str] = "elastic_net"

    l1_ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.l1_ratio <= 1:
            raise InvalidInputError(f"must lie in [0, 1], not {self.l1_ratio}", field="l1_ratio")

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        x = self._target(data, logprobs)
        mixed = self.l1_ratio * x.abs() + (1 - self.l1_ratio) * x.square()
        loss = self.lambda_ * reduced(mixed, self.reduction)
        return loss, {"elastic_net": loss.detach(), "l1_ratio": self.l1_ratio}


@dataclass(frozen=True)
class OutputMagnitude(_OfTarget):
    """(magnitude − wanted)², where the magnitude is the root mean square, or with `norm` the Euclidean norm."""

    name: ClassVar[str] = "output_magnitude"

    measure: Literal["rms", "norm"] = "rms"
    wanted: float = 1.0

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        x = self._target(data, logprobs)
        magnitude = torch.linalg.vector_norm(x)  # torch defines the gradient at zero as 0
        if self.measure == "rms":
            magnitude = magnitude / x.numel() ** 0.5
        return (magnitude - self.wanted).square(), {"output_magnitude": magnitude.detach()}
