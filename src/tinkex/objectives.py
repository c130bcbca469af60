"""Ready-made losses for `forward_backward_custom`, and helpers that prepare their data.

    pairs = [completion(prompt, good), completion(prompt, bad)]
    pairs = objectives.with_reference(pairs, sampler)
    training.forward_backward_custom(pairs, objectives.dpo(beta=0.1))

All losses read `weights`, the weight of each position (1 everywhere if there are none). Preference losses read the
data in pairs: preferred completion, rejected completion, next pair. A reference is a list of logprobs from another
model, in the field `reference_logprobs`; `with_reference` puts it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from tinkex.errors import APIResponseValidationError, InvalidInputError
from tinkex.types import Datum, ModelInput, TensorData

if TYPE_CHECKING:
    import torch

__all__ = [
    "REFERENCE",
    "completion",
    "cross_entropy",
    "dpo",
    "orpo",
    "reinforce",
    "simpo",
    "with_reference",
    "with_reference_async",
]

#: The field of a datum with the logprobs of its targets under the reference model.
REFERENCE: Final = "reference_logprobs"

Result: TypeAlias = "tuple[torch.Tensor, dict[str, float]]"
Objective: TypeAlias = "Callable[[list[Datum], list[torch.Tensor]], Result]"


def completion(prompt: Sequence[int], answer: Sequence[int]) -> Datum:
    """A datum that trains `answer` after `prompt`: each position predicts the next token; only the answer has weight."""
    tokens = np.array([*prompt, *answer], np.int32)
    if not len(prompt) or not len(answer):
        raise InvalidInputError("prompt and answer need at least one token each", field="answer")
    counts = np.zeros(len(tokens) - 1, np.float32)
    counts[len(prompt) - 1 :] = 1
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": counts}
    )


# -- losses --------------------------------------------------------------------------------------


def cross_entropy(data: list[Datum], logprobs: list[torch.Tensor]) -> Result:
    """The service's own cross entropy, −Σ weight · logprob, to combine with regularizers."""
    return -_stacked([_counted(*each).sum() for each in _each(data, logprobs)]).sum(), {}


def dpo(beta: float = 0.1, label_smoothing: float = 0.0) -> Objective:
    """Direct preference optimisation (Rafailov et al., 2023).

    A completion's reward is β times the rise of its log-probability over the reference. The loss is the negative
    log-likelihood that the preferred completion has the larger reward. `label_smoothing` is the share of pairs assumed
    to be labelled the wrong way round.
    """

    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Result:
        gains = [
            _counted(datum, logp - _field(datum, index, REFERENCE, logp)).sum()
            for index, (datum, logp) in enumerate(_each(data, logprobs))
        ]
        chosen, rejected = _pairs(beta * _stacked(gains))
        margin = chosen - rejected
        right, wrong = _log_sigmoid(margin), _log_sigmoid(-margin)
        value = -((1 - label_smoothing) * right + label_smoothing * wrong).mean()
        return value, _preference_metrics(chosen, rejected)

    return loss


def simpo(beta: float = 2.0, gamma: float = 1.0) -> Objective:
    """Simple preference optimisation (Meng et al., 2024): no reference; rewards per token and a margin γ.

    A completion's reward is β times its mean logprob.
    """

    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Result:
        chosen, rejected = _pairs(beta * _means(data, logprobs))
        return -_log_sigmoid(chosen - rejected - gamma).mean(), _preference_metrics(
            chosen, rejected
        )

    return loss


def orpo(beta: float = 0.1) -> Objective:
    """Odds-ratio preference optimisation (Hong et al., 2024): supervised and preference training in one loss.

    The mean negative logprob of the preferred completion, plus β times −log sigmoid of the log odds ratio.
    """

    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Result:
        means = _means(data, logprobs).clamp_max(-1e-6)  # a probability of 1 has infinite odds
        chosen, rejected = _pairs(means - means.expm1().neg().log())
        learned, _ = _pairs(means)
        value = (-learned - beta * _log_sigmoid(chosen - rejected)).mean()
        return value, _preference_metrics(chosen, rejected)

    return loss


def reinforce(kl_coef: float = 0.0) -> Objective:
    """Policy gradient on tokens sampled from the current weights: −Σ advantage · logprob, plus a KL penalty.

    Advantages are in the field `advantages`. The penalty is `kl_coef` · Σ ½(logprob − reference)²: on samples of the
    policy its expected gradient is that of KL(policy‖reference); the gradient of the plain difference is not.
    Prompts must have a weight of 0, or the penalty acts on them too.
    """
    if not 0 <= kl_coef < math.inf:  # a negative penalty has no minimum
        raise InvalidInputError(f"must be 0 or more, not {kl_coef}", field="kl_coef")

    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Result:
        value, away, tokens = [], 0.0, 0.0
        for index, (datum, logp) in enumerate(_each(data, logprobs)):
            value.append(-_counted(datum, logp * _field(datum, index, "advantages", logp)).sum())
            tokens += float(_weights(datum, logp).sum())
            if kl_coef:
                distance = logp - _field(datum, index, REFERENCE, logp)
                value.append(kl_coef * _counted(datum, distance.square() / 2).sum())
                away += float(_counted(datum, distance.detach()).sum())
        metrics = {"kl:mean": away / tokens if tokens else 0.0} if kl_coef else {}
        return _stacked(value).sum(), metrics

    return loss


def _each(
    data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> list[tuple[Datum, torch.Tensor]]:
    return list(zip(data, logprobs, strict=True))


def _weights(datum: Datum, logp: torch.Tensor) -> torch.Tensor:
    given = datum.loss_fn_inputs.get("weights")
    return logp.new_ones(logp.shape) if given is None else given.to_torch().to(logp)


def _counted(datum: Datum, values: torch.Tensor) -> torch.Tensor:
    """Values times weights; 0 where the weight is 0, even if the value is infinite or NaN."""
    weights = _weights(datum, values)
    return values.where(weights != 0, 0.0) * weights


def _field(datum: Datum, index: int, key: str, logp: torch.Tensor) -> torch.Tensor:
    given = datum.loss_fn_inputs.get(key)
    if given is None:
        raise InvalidInputError("is missing", field=f"data.{index}.loss_fn_inputs.{key}")
    return given.to_torch().to(logp).reshape(logp.shape)


def _means(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    return _stacked(
        [
            _counted(datum, logp).sum() / _weights(datum, logp).sum()
            for datum, logp in _each(data, logprobs)
        ]
    )


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(values)


def _log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)


def _pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if len(values) % 2:
        raise InvalidInputError(
            f"preference losses need data in pairs, not {len(values)} datums", field="data"
        )
    return values[0::2], values[1::2]


def _preference_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, float]:
    margin = (chosen - rejected).detach()
    return {
        "accuracy:mean": float((margin > 0).to(margin).mean()),
        "margin:mean": float(margin.mean()),
        "chosen:mean": float(chosen.detach().mean()),
        "rejected:mean": float(rejected.detach().mean()),
    }


# -- references ----------------------------------------------------------------------------------


class _Sampler(Protocol):
    def compute_logprobs(self, prompt: ModelInput) -> Any: ...


def with_reference(data: Sequence[Datum], sampler: _Sampler) -> list[Datum]:
    """The data with the logprobs of their targets under a sampling client's weights.

    All requests are sent at once. Targets must be the next tokens of their inputs.
    """
    futures = [sampler.compute_logprobs(_sequence(*each)) for each in enumerate(data)]
    return [
        _with_logprobs(datum, future.result()) for datum, future in zip(data, futures, strict=True)
    ]


async def with_reference_async(data: Sequence[Datum], sampler: _Sampler) -> list[Datum]:
    futures = [sampler.compute_logprobs(_sequence(*each)) for each in enumerate(data)]
    return [
        _with_logprobs(datum, await future) for datum, future in zip(data, futures, strict=True)
    ]


def _sequence(index: int, datum: Datum) -> ModelInput:
    """The whole sequence: a datum's inputs are all tokens but the last, its targets all but the first."""
    where = f"data.{index}.loss_fn_inputs.target_tokens"
    if "target_tokens" not in datum.loss_fn_inputs:
        raise InvalidInputError("is missing", field=where)
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    inputs = datum.model_input.to_numpy()
    if targets.shape != inputs.shape or not np.array_equal(targets[:-1], inputs[1:]):
        raise InvalidInputError(
            "a reference needs targets that are the next tokens of their input",
            field=where,
        )
    return datum.model_input.append_int(int(targets[-1]))


def _with_logprobs(datum: Datum, logprobs: Sequence[float | None]) -> Datum:
    known = [value for value in logprobs[1:] if value is not None]  # the first token has no logprob
    if len(known) != datum.model_input.length:
        raise APIResponseValidationError(
            message=f"The service returned {len(known)} logprobs for a sequence of "
            f"{datum.model_input.length + 1} tokens."
        )
    inputs = {**datum.loss_fn_inputs, REFERENCE: TensorData.from_numpy(np.array(known, np.float32))}
    return replace(datum, loss_fn_inputs=inputs)
