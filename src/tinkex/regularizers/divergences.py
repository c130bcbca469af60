"""Penalties on distributions: entropy, and distances to a reference or a paired output.

A distribution is a row of log-probabilities along the last axis. In training, targets of shape (N, K) give rows of K
alternatives; if the targets are the whole vocabulary, these are exact entropies and divergences. With one target per
position, the sums run over the positions of a datum instead: each position adds the term of its own target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tinkex.errors import InvalidInputError
from tinkex.types import Datum

from .penalties import Penalty, Reduction, Values
from .protocol import Logprobs
from .tensors import as_list, field_of, flat, like, reduced, rows

__all__ = ["Consistency", "Entropy", "JensenShannon", "KLDivergence"]


@dataclass(frozen=True)
class Entropy(Penalty):
    """H = −Σ p·log p of each row; `minimize` sharpens the distribution, `maximize` (−H) spreads it.

    A `temperature` other than 1 renormalises log p / T first; `normalize` divides by the largest possible entropy.
    Both need rows that are distributions.
    """

    name: ClassVar[str] = "entropy"

    mode: Literal["minimize", "maximize"] = "minimize"
    reduction: Reduction = "mean"
    normalize: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise InvalidInputError(
                f"must be more than 0, not {self.temperature}", field="temperature"
            )

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        tensors = as_list(logprobs)
        if self.temperature != 1 or self.normalize:
            _check_alternatives(logprobs)
        if self.temperature != 1:
            tensors = [(tensor / self.temperature).log_softmax(-1) for tensor in tensors]
        terms = [_entropy_terms(tensor) for tensor in tensors]
        if self.normalize:
            terms = [term / math.log(term.shape[-1]) for term in terms]
        value = reduced(rows(terms), self.reduction)
        if self.mode == "maximize":
            value = -value
        metrics = {"entropy": value.detach(), "mode": self.mode, "temperature": self.temperature}
        return value, metrics


def _check_alternatives(logprobs: Logprobs) -> None:
    """Refuse rows that cannot be renormalised: fewer than two alternatives, or in training one target per position."""
    in_training = not isinstance(logprobs, torch.Tensor)
    for tensor in as_list(logprobs):
        if tensor.shape[-1] < 2 or (in_training and tensor.dim() < 2):
            raise InvalidInputError(
                "temperature and normalize need the logprobs of several alternatives per position: "
                "give target_tokens of shape (N, K)",
                field="logprobs",
            )


def _entropy_terms(logp: torch.Tensor) -> torch.Tensor:
    seen = logp > -50
    known = torch.where(seen, logp, 0.0)  # also keeps 0 · ∞ out of the gradient
    return torch.where(seen, -known.exp() * known, 0.0)


def _kl_terms(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """P · (log p − log q), with the difference clipped to ±100; 0 where p is close to 0."""
    seen = logp > math.log(1e-10)
    known = torch.where(seen, logp, 0.0)
    return torch.where(seen, known.exp() * (known - logq.clamp_min(-1e30)).clamp(-100, 100), 0.0)


def _symmetric_terms(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    return (_kl_terms(logp, logq) + _kl_terms(logq, logp)) / 2


def _js_terms(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    logp, logq = logp.clamp_min(-100), logq.clamp_min(-100)
    middle = torch.logaddexp(logp, logq) - math.log(2)
    return (logp.exp() * (logp - middle) + logq.exp() * (logq - middle)) / 2


@dataclass(frozen=True)
class _ToReference(Penalty):
    """Has a reference: given logprobs, a field of the data, or a function that computes them from the data."""

    reference_logprobs: Logprobs | None = None
    reference_field: str | None = None
    compute_reference: Callable[[Sequence[Datum]], Logprobs] | None = None
    reduction: Reduction = "mean"

    def _pairs(
        self, data: Sequence[Datum], logprobs: Logprobs
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        reference: Any
        if self.reference_logprobs is not None:
            reference, what = self.reference_logprobs, "reference_logprobs"
        elif self.reference_field is not None:
            what = f"loss_fn_inputs.{self.reference_field}"
            reference = field_of(data, logprobs, self.reference_field)
        elif self.compute_reference is not None:
            reference, what = self.compute_reference(data), "compute_reference"
        else:
            raise InvalidInputError(
                "give reference_logprobs, reference_field or compute_reference", field=self.name
            )
        tensors = as_list(logprobs)
        return list(zip(tensors, like(tensors, reference, what), strict=True))


@dataclass(frozen=True)
class KLDivergence(_ToReference):
    """KL(model‖reference) of each row; `reverse` swaps the two, `symmetric` averages both directions."""

    name: ClassVar[str] = "kl_divergence"

    direction: Literal["forward", "reverse"] = "forward"
    symmetric: bool = False

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        pairs = self._pairs(data, logprobs)
        if self.symmetric:
            terms = [_symmetric_terms(model, reference) for model, reference in pairs]
        elif self.direction == "forward":
            terms = [_kl_terms(model, reference) for model, reference in pairs]
        else:
            terms = [_kl_terms(reference, model) for model, reference in pairs]
        by_row = rows(terms)
        value = reduced(by_row, self.reduction)
        return value, {
            "kl_divergence": value.detach(),
            "kl_direction": self.direction,
            "kl_symmetric": self.symmetric,
            "kl_max": by_row.max().detach(),
            "kl_min": by_row.min().detach(),
        }


@dataclass(frozen=True)
class JensenShannon(_ToReference):
    """The mean of both distributions' divergences from their average: symmetric, and at most ln 2."""

    name: ClassVar[str] = "jensen_shannon"

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        by_row = rows([_js_terms(*pair) for pair in self._pairs(data, logprobs)])
        value = reduced(by_row, self.reduction)
        return value, {"jensen_shannon": value.detach()}


@dataclass(frozen=True)
class Consistency(Penalty):
    """The distance to a paired output in the data, such as the logprobs before an augmentation."""

    name: ClassVar[str] = "consistency"

    pair_field: str = "original_logprobs"
    metric: Literal["mse", "l1", "cosine", "kl"] = "mse"
    reduction: Reduction = "mean"

    def _values(self, data: Sequence[Datum], logprobs: Logprobs) -> Values:
        tensors = as_list(logprobs)
        found = field_of(data, logprobs, self.pair_field)
        others = like(tensors, found, f"loss_fn_inputs.{self.pair_field}")
        a, b = flat(tensors), flat(others)
        if self.metric == "kl":
            pairs = zip(tensors, others, strict=True)
            value = reduced(rows([_symmetric_terms(*pair) for pair in pairs]), self.reduction)
        elif self.metric == "cosine":
            length = torch.linalg.vector_norm
            value = 1 - (a @ b) / (length(a).clamp_min(1e-8) * length(b).clamp_min(1e-8))
        else:
            distance = (a - b).square() if self.metric == "mse" else (a - b).abs()
            value = reduced(distance, self.reduction)
        return value, {"consistency_metric": self.metric}
