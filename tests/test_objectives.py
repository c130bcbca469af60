"""Ready-made losses: hand values, gradients, and references from a sampling client."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from tinkex import objectives
from tinkex.errors import APIResponseValidationError, InvalidInputError
from tinkex.objectives import completion, with_reference, with_reference_async
from tinkex.types import Datum, ModelInput

from .client.helpers import SAMPLE, new_sampler, sampled


def datum(count: int, **fields: Any) -> Datum:
    tokens = list(range(1, count + 1))
    arrays = {name: np.asarray(value, np.float32) for name, value in fields.items()}
    return Datum(
        ModelInput.from_ints(tokens), {"target_tokens": [*tokens[1:], count + 1], **arrays}
    )


def leaves(*rows: Any) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]


CHOSEN = datum(3, weights=[0, 1, 1], reference_logprobs=[-9, -1, -2])
REJECTED = datum(2, weights=[0, 1], reference_logprobs=[-9, -2])
PAIR = [CHOSEN, REJECTED]
LOGPROBS = ([-5.0, -0.5, -1.5], [-5.0, -2.5])  # the chosen one gained 1.0, the other lost 0.5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_completion_has_weight_only_on_the_answer():
    made = completion([1, 2, 3], [4, 5])
    assert made.model_input.to_ints() == [1, 2, 3, 4]
    assert made.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert made.loss_fn_inputs["weights"].tolist() == [0, 0, 1, 1]
    with pytest.raises(InvalidInputError):
        completion([], [1])


def test_cross_entropy_equals_that_of_the_service():
    loss, metrics = objectives.cross_entropy(PAIR, leaves(*LOGPROBS))
    assert (loss.item(), metrics) == (4.5, {})
    unweighted, _ = objectives.cross_entropy([datum(2)], leaves([-1.0, -2.0]))
    assert unweighted.item() == 3


def test_weight_of_zero_masks_infinite_values():
    at = leaves([-math.inf, -0.5, -1.5])
    loss, _ = objectives.cross_entropy([CHOSEN], at)
    (gradient,) = torch.autograd.grad(loss, at)
    assert loss.item() == 2
    assert gradient.tolist() == [0, -1, -1]


def test_dpo():
    at = leaves(*LOGPROBS)
    loss, metrics = objectives.dpo(beta=0.2)(PAIR, at)
    assert loss.item() == pytest.approx(-math.log(sigmoid(0.2 * 1.5)))
    assert metrics == {
        "accuracy:mean": 1.0,
        "margin:mean": pytest.approx(0.3),
        "chosen:mean": pytest.approx(0.2),
        "rejected:mean": pytest.approx(-0.1),
    }
    chosen, rejected = torch.autograd.grad(loss, at)
    pull = 0.2 * sigmoid(-0.3)
    assert chosen.tolist() == pytest.approx([0, -pull, -pull])
    assert rejected.tolist() == pytest.approx([0, pull])
    smoothed, _ = objectives.dpo(0.2, label_smoothing=0.1)(PAIR, leaves(*LOGPROBS))
    expected = -0.9 * math.log(sigmoid(0.3)) - 0.1 * math.log(sigmoid(-0.3))
    assert smoothed.item() == pytest.approx(expected)


def test_pairs_are_averaged():
    one, _ = objectives.dpo()(PAIR, leaves(*LOGPROBS))
    swapped, metrics = objectives.dpo()(PAIR[::-1], leaves(*LOGPROBS[::-1]))
    both, _ = objectives.dpo()([*PAIR, *PAIR[::-1]], leaves(*LOGPROBS, *LOGPROBS[::-1]))
    assert both.item() == pytest.approx((one + swapped).item() / 2)
    assert metrics["accuracy:mean"] == 0


def test_simpo():
    loss, metrics = objectives.simpo(beta=2.0, gamma=0.5)(PAIR, leaves(*LOGPROBS))
    assert loss.item() == pytest.approx(-math.log(sigmoid(2 * (-1.0 + 2.5) - 0.5)))
    assert metrics["margin:mean"] == pytest.approx(3)


def test_orpo():
    loss, _ = objectives.orpo(beta=0.3)(PAIR, leaves(*LOGPROBS))
    odds = [mean - math.log(1 - math.exp(mean)) for mean in (-1.0, -2.5)]
    assert loss.item() == pytest.approx(1.0 - 0.3 * math.log(sigmoid(odds[0] - odds[1])))
    certain = leaves([-1.0, 0.0, 0.0], [-5.0, -2.5])
    loss, _ = objectives.orpo()(PAIR, certain)
    assert all(torch.isfinite(each).all() for each in torch.autograd.grad(loss, certain))


def test_reinforce():
    data = [datum(3, weights=[0, 1, 1], advantages=[7, 2, -1], reference_logprobs=[0, -1, -2])]
    loss, metrics = objectives.reinforce()(data, leaves([-5.0, -0.5, -1.5]))
    assert (loss.item(), metrics) == (1.0 - 1.5, {})
    at = leaves([-5.0, -0.5, -1.5])
    loss, metrics = objectives.reinforce(kl_coef=0.1)(data, at)
    assert loss.item() == pytest.approx(-0.5 + 0.1 * (0.125 + 0.125))
    assert metrics == {"kl:mean": pytest.approx(0.5)}
    (gradient,) = torch.autograd.grad(loss, at)
    assert gradient.tolist() == pytest.approx([0, -2 + 0.05, 1 + 0.05])


def test_kl_penalty_has_the_gradient_of_the_divergence():
    """The sum over all tokens, weighted by their probabilities, is the expectation over samples."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, generator=random).requires_grad_()
    reference = torch.randn(5, dtype=torch.float64, generator=random).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    data = [datum(5, weights=logp.exp().detach(), advantages=[0] * 5, reference_logprobs=reference)]
    pull, _ = objectives.reinforce(kl_coef=1.0)(data, [logits.log_softmax(-1)])
    (sampled_gradient,) = torch.autograd.grad(pull, logits)
    torch.testing.assert_close(sampled_gradient, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [objectives.dpo, objectives.simpo, objectives.orpo])
def test_gradients_match_finite_differences(make):
    assert torch.autograd.gradcheck(lambda *at: make()(PAIR, list(at))[0], leaves(*LOGPROBS))


def test_error_names_the_missing_field():
    with pytest.raises(InvalidInputError, match=r"data\.0\.loss_fn_inputs\.reference_logprobs"):
        objectives.dpo()([datum(2), datum(2)], leaves([-1.0, -1.0], [-1.0, -1.0]))
    with pytest.raises(InvalidInputError, match="pairs"):
        objectives.simpo()([datum(2)], leaves([-1.0, -1.0]))


# -- references ----------------------------------------------------------------------------------


def prompt_logprobs(request):
    """Answer with the tokens of the prompt as their logprobs."""
    (chunk,) = request.json["prompt"]["chunks"]
    return sampled(7, prompt_logprobs=[None, *(-float(token) for token in chunk["tokens"][1:])])


def test_references_are_aligned_with_targets(server, service):
    server.on(SAMPLE, prompt_logprobs)
    sampler = new_sampler(service())
    data = [completion([1, 2], [3]), completion([4], [5, 6, 7])]
    for made in (
        with_reference(data, sampler),
        asyncio.run(with_reference_async(data, sampler)),
    ):
        found = [each.loss_fn_inputs["reference_logprobs"].tolist() for each in made]
        assert found == [[-2.0, -3.0], [-5.0, -6.0, -7.0]]
        assert made[0].loss_fn_inputs["weights"].tolist() == [0, 1]
    assert "reference_logprobs" not in data[0].loss_fn_inputs


def test_references_need_next_tokens_as_targets(server, service):
    sampler = new_sampler(service())
    shuffled = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [9, 3]})
    soft = Datum(ModelInput.from_ints([1]), {"target_tokens": np.array([[1, 2]])})
    for bad in (shuffled, soft, Datum(ModelInput.from_ints([1]))):
        with pytest.raises(InvalidInputError, match=r"data\.1\.loss_fn_inputs\.target_tokens"):
            with_reference([completion([1], [2]), bad], sampler)


def test_reference_of_wrong_length_is_a_response_error(server, service):
    server.on(SAMPLE, sampled(7, prompt_logprobs=[None, -1.0]))
    with pytest.raises(APIResponseValidationError, match="1 logprobs for a sequence of 3"):
        with_reference([completion([1, 2], [3])], new_sampler(service()))


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_negative_kl_coef_is_refused(wrong):
    with pytest.raises(InvalidInputError) as refused:
        objectives.reinforce(kl_coef=wrong)
    assert refused.value.field == "kl_coef"
