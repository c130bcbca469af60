"""The losses of the protocol: plain sums over tokens and examples.

Every loss is a function of `logp`, the logprob of each target under the current weights, and of constants that
came with the example. Positions are flat: N is all positions of all examples of a micro-batch, one after
another; K is the number of targets per position (1 unless targets are soft).

A zero weight must give exactly zero even where a ratio is infinite, so weights mask with `where` instead of
multiplying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from tinkex.errors import InvalidInputError

__all__ = ["LOSSES", "Loss", "check_loss", "loss_sum"]

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
    """The ratio of the whole sequence, carried to each token (GSPO-token)."""
    mask = inputs["sequence_ratio_mask"] != 0
    distance = torch.where(mask, logp.detach() - inputs["logprobs"], 0.0)
    example = inputs["example"].long()
    count = int(example.max()) + 1 if example.numel() else 0
    zeros = distance.new_zeros(count)
    total = zeros.index_add(0, example, distance)
    length = zeros.index_add(0, example, mask.to(distance.dtype)).clamp_min(1)
    sequence_ratio = (total / length).exp()[example]
    ratio = sequence_ratio * (logp - logp.detach()).exp()
    advantages = inputs["advantages"]
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return (logp - inputs["logprobs"]).exp()


@dataclass(frozen=True)
class Loss:
    """A loss, the inputs it cannot do without, and its settings with their defaults.

    `whole_sequences` marks one whose terms are not independent of each other: it needs all positions of an
    example at once.
    """

    terms: Callable[[Tensor, Inputs, Config], Tensor]
    required: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    soft_targets: bool = False
    whole_sequences: bool = False


_RL: Final = ("logprobs", "advantages")

LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(_cross_entropy, soft_targets=True),
    "importance_sampling": Loss(_importance_sampling, _RL),
    "ppo": Loss(_ppo, _RL, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(_cispo, _RL, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, _RL, {"beta": 0.05}),
    "gspo": Loss(
        _gspo,
        (*_RL, "sequence_ratio_mask"),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        whole_sequences=True,
    ),
}


def check_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """The loss called `name` and its complete settings; what it does not know is refused by name."""
    loss = LOSSES.get(name)
    if loss is None:
        raise InvalidInputError(
            f"unknown loss {name!r:.80}; this service has {', '.join(LOSSES)}", field="loss_fn"
        )
    settings = dict(loss.defaults)
    for key, value in config.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise InvalidInputError(
                f"{name} has no setting {key!r:.80}; it has {known}", field="loss_fn_config"
            )
        if isinstance(value, str):
            raise InvalidInputError(f"{key} must be a number", field="loss_fn_config")
        settings[key] = float(value)
    return loss, settings


def loss_sum(loss: Loss, logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """The sum of the loss over all positions, each times its weight."""
    weights = inputs.get("weights")
    if weights is None:
        return loss.terms(logp, inputs, config).sum()
    counted = weights != 0
    if not loss.whole_sequences:
        # Masking the result is not enough: an infinity behind the mask comes back as a NaN gradient.
        logp = torch.where(counted, logp, 0.0)
        inputs = {
            **inputs,
            **{name: torch.where(counted, inputs[name], 0.0) for name in loss.required},
        }
    return torch.where(counted, loss.terms(logp, inputs, config) * weights, 0.0).sum()
