"""The protocol's losses: plain sums over tokens and examples.

Every loss is a function of `logp`, the logprob of each target under the current weights, and of constants in the
example. Positions are flat: N counts all positions of all examples of a micro-batch, one after another; K is the
number of targets per position (1 unless targets are soft).

A zero weight must give exactly zero even if a ratio is infinite, so positions are masked with `where`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from .checks import Loss

__all__ = ["TERMS", "loss_sum"]

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def _cross_entropy(logp: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -logp


def _importance_sampling(logp: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -_ratio(logp, inputs) * inputs["advantages"]


def _ppo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio, advantages = _ratio(logp, inputs), inputs["advantages"]
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def _cispo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -_ratio(logp, inputs).detach().clamp(low, high) * logp * inputs["advantages"]


def _dro(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    distance = logp - inputs["logprobs"]
    return -(logp * inputs["advantages"] - 0.5 * config["beta"] * distance.square())


def _gspo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """GSPO-token: every token uses the ratio of its whole sequence."""
    mask = inputs["sequence_ratio_mask"] != 0
    distance = torch.where(mask, logp.detach() - inputs["logprobs"], 0.0)
    example = inputs["example"].long()
    count = int(example.max()) + 1 if example.numel() else 0
    zeros = distance.new_zeros(count)
    total = zeros.index_add(0, example, distance)
    # An example whose weights are all zero must not contribute: an infinite ratio times a zero gradient is NaN.
    counted = zeros.index_add(0, example, (inputs["weights"] != 0).to(distance.dtype)) > 0
    total = torch.where(counted, total, 0.0)
    length = zeros.index_add(0, example, mask.to(distance.dtype)).clamp_min(1)
    sequence_ratio = (total / length).exp()[example]
    ratio = sequence_ratio * (logp - logp.detach()).exp()
    advantages = inputs["advantages"]
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return (logp - inputs["logprobs"]).exp()


#: The loss at each position, before weights. `checks.LOSSES` holds the inputs and settings of each loss.
TERMS: Final[Mapping[str, Callable[[Tensor, Inputs, Config], Tensor]]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def loss_sum(loss: Loss, logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Weighted sum of the loss over all positions."""
    weights = inputs["weights"]
    counted = weights != 0
    if not loss.whole_sequences:
        # Masking only the result is not enough: an infinite value behind the mask makes the gradient NaN.
        logp = torch.where(counted, logp, 0.0)
        inputs = {
            **inputs,
            **{name: torch.where(counted, inputs[name], 0.0) for name in loss.required},
        }
    return torch.where(counted, TERMS[loss.name](logp, inputs, config) * weights, 0.0).sum()
