"""The ready-made penalties: hand values, options, and gradients against finite differences."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.errors import InvalidInputError
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    JensenShannon,
    KLDivergence,
    Orthogonality,
    OutputMagnitude,
)
from tinkex.types import Datum, ModelInput

LN4 = math.log(4)


def datum(**fields: Any) -> Datum:
    arrays = {name: np.asarray(value, np.float32) for name, value in fields.items()}
    return Datum(ModelInput.from_ints([1]), arrays)


def logs(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def value(penalty: Any, logprobs: Any, *data: Datum, **options: Any) -> float:
    return float(penalty.compute(list(data), logprobs, options)[0].detach())


def metrics(penalty: Any, logprobs: Any, *data: Datum) -> dict[str, Any]:
    found = penalty.compute(list(data), logprobs)[1]
    return {
        name: each.tolist() if isinstance(each, torch.Tensor) else each
        for name, each in found.items()
    }


UNIFORM = logs([0.25] * 4)
SHARP = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]], dtype=torch.float64)
X = torch.tensor([1.0, 2.0, 3.0])


# -- magnitudes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [L1, L2, ElasticNet])
@pytest.mark.parametrize("wrong", [-1.0, -1e-9, float("nan"), float("inf")])
def test_a_negative_lambda_is_refused(penalty, wrong):
    with pytest.raises(InvalidInputError) as refused:
        penalty(lambda_=wrong)
    assert refused.value.field == "lambda"
    with pytest.raises(InvalidInputError):
        penalty().compute([], X, {"lambda": wrong})


def test_l1():
    x = torch.tensor([-1.0, 2.0, -3.0])
    assert value(L1(), x) == 6
    assert value(L1(reduction="mean", lambda_=0.5), x) == 1
    assert metrics(L1(lambda_=2), x) == {"l1_raw": 6, "l1_mean": 2}
    assert value(L1(target="probs"), logs(0.5, 0.25)) == pytest.approx(0.75)
    assert value(L1(target="field:mask"), x, datum(mask=[1, -1]), datum()) == 2


def test_l2():
    assert value(L2(), X) == 14
    assert value(L2(reduction="mean", lambda_=3), X) == 14
    assert value(L2(center="mean"), X) == 2
    assert metrics(L2(center="mean"), X)["center"] == 2
    assert value(L2(center=1.0), X) == 5
    assert value(L2(center=1.0, clip=1.5), X) == 1 + 1.5**2
    assert metrics(L2(center=1.0), X) == {
        "l2_raw": 5,
        "l2_mean": pytest.approx(14 / 3),
        "center": 1,
    }
    assert metrics(L2(), X)["center"] == "none"


def test_elastic_net():
    assert value(ElasticNet(), X) == 0.5 * 6 + 0.5 * 14
    assert value(ElasticNet(l1_ratio=0.25, reduction="mean", lambda_=2), X) == pytest.approx(
        2 * (0.25 * 2 + 0.75 * 14 / 3)
    )
    assert metrics(ElasticNet(), X) == {"elastic_net": 10, "l1_ratio": 0.5}


def test_output_magnitude():
    x = torch.tensor([3.0, 4.0])
    assert value(OutputMagnitude(measure="norm", wanted=2), x) == 9
    assert value(OutputMagnitude(wanted=0), x) == pytest.approx(12.5)
    assert metrics(OutputMagnitude(measure="norm"), x) == {"output_magnitude": 5}


# -- distributions -------------------------------------------------------------------------------


def test_entropy():
    assert value(Entropy(), UNIFORM) == pytest.approx(LN4)
    assert value(Entropy(mode="maximize"), UNIFORM) == pytest.approx(-LN4)
    assert value(Entropy(normalize=True), UNIFORM) == pytest.approx(1)
    assert value(Entropy(), SHARP) == 0
    both = torch.cat([UNIFORM, SHARP])
    assert value(Entropy(), both) == pytest.approx(LN4 / 2)
    assert value(Entropy(reduction="sum"), both) == pytest.approx(LN4)
    rows = Entropy(reduction="none").compute([], both)[0]
    torch.testing.assert_close(rows, torch.tensor([LN4, 0], dtype=torch.float64))
    assert metrics(Entropy(mode="maximize"), UNIFORM) == {
        "entropy": pytest.approx(-LN4),
        "mode": "maximize",
        "temperature": 1.0,
    }


def test_temperature_is_applied_before_the_entropy():
    row = logs([0.7, 0.2, 0.1])
    cooled = (row / 0.5).log_softmax(-1)
    assert value(Entropy(temperature=0.5), row) == pytest.approx(value(Entropy(), cooled))
    assert value(Entropy(temperature=0.5), row) < value(Entropy(), row)
    assert value(Entropy(temperature=2), row) > value(Entropy(), row)


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"normalize": True}])
def test_renormalising_needs_several_alternatives(options):
    for alone in ([logs(0.5, 0.5)], logs([0.5], [0.5])):
        with pytest.raises(InvalidInputError, match=r"\(N, K\)"):
            value(Entropy(**options), alone)


P, Q = logs([0.5, 0.25, 0.25], [0.1, 0.2, 0.7]), logs([0.2, 0.2, 0.6], [0.3, 0.3, 0.4])


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def test_kl_divergence():
    assert value(KLDivergence(reference_logprobs=P), P) == 0
    forward, reverse = kl(P, Q), kl(Q, P)
    to_q = KLDivergence(reference_logprobs=Q)
    assert value(to_q, P) == pytest.approx(forward.mean().item())
    assert value(to_q, P, reduction="sum") == pytest.approx(forward.sum().item())
    assert value(to_q, P, direction="reverse") == pytest.approx(reverse.mean().item())
    symmetric = (forward + reverse).mean().item() / 2
    assert value(to_q, P, symmetric=True, direction="reverse") == pytest.approx(symmetric)
    torch.testing.assert_close(to_q.compute([], P, {"reduction": "none"})[0], forward)
    assert metrics(to_q, P) == {
        "kl_divergence": pytest.approx(forward.mean().item()),
        "kl_direction": "forward",
        "kl_symmetric": False,
        "kl_max": pytest.approx(forward.max().item()),
        "kl_min": pytest.approx(forward.min().item()),
    }


def test_a_reference_may_come_with_the_data_or_from_a_function():
    expected = pytest.approx(kl(P, Q).mean().item(), rel=1e-5)
    brought = datum(reference=Q)
    assert value(KLDivergence(reference_field="reference"), P, brought) == expected
    assert value(KLDivergence(compute_reference=lambda data: Q), P, brought) == expected
    with pytest.raises(InvalidInputError, match="reference_logprobs, reference_field"):
        value(KLDivergence(), P)


def test_kl_ignores_tiny_probabilities_and_clips_differences():
    impossible = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    fair = logs([0.5, 0.5])
    assert value(KLDivergence(reference_logprobs=fair), impossible) == pytest.approx(math.log(2))
    assert value(KLDivergence(reference_logprobs=impossible), fair) == pytest.approx(
        0.5 * 100 + 0.5 * math.log(0.5)
    )


def test_jensen_shannon_is_symmetric_and_bounded():
    there = value(JensenShannon(reference_logprobs=Q), P)
    assert there == pytest.approx(value(JensenShannon(reference_logprobs=P), Q))
    middle = ((P.exp() + Q.exp()) / 2).log()
    assert there == pytest.approx(((kl(P, middle) + kl(Q, middle)) / 2).mean().item())
    apart = torch.tensor([[0.0, -math.inf]]), torch.tensor([[-math.inf, 0.0]])
    assert value(JensenShannon(reference_logprobs=apart[1]), apart[0]) == pytest.approx(math.log(2))
    assert value(JensenShannon(reference_logprobs=P), P) == pytest.approx(0)


def test_consistency():
    a, pair = torch.tensor([1.0, 2.0]), datum(original_logprobs=[3.0, 5.0])
    assert value(Consistency(), a, pair) == 6.5
    assert value(Consistency(reduction="sum"), a, pair) == 13
    assert value(Consistency(metric="l1"), a, pair) == 2.5
    cosine = 1 - 13 / math.sqrt(5 * 34)
    assert value(Consistency(metric="cosine"), a, pair) == pytest.approx(cosine, abs=1e-6)
    other = datum(other=Q)
    symmetric = ((kl(P, Q) + kl(Q, P)) / 2).mean().item()
    assert value(Consistency("other", "kl"), P, other) == pytest.approx(symmetric, rel=1e-5)
    assert metrics(Consistency(), a, pair) == {"consistency_metric": "mse"}


# -- geometry ------------------------------------------------------------------------------------


def test_orthogonality():
    assert value(Orthogonality(), torch.eye(3)) == 0
    assert value(Orthogonality(mode="hard"), torch.eye(3)) == 0
    same = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    assert value(Orthogonality(), same) == 2
    assert value(Orthogonality(normalize=False), same) == 32
    assert value(Orthogonality(mode="hard", normalize=False), same) == 32 + 2 * 9
    assert value(Orthogonality(mode="spectral", normalize=False), same) == 32 + 36


def test_the_rows_of_orthogonality_may_be_positions_or_alternatives():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    by_position = x.permute(1, 0, 2).reshape(3, 8)
    by_alternative = x.permute(2, 0, 1).reshape(4, 6)
    plain = Orthogonality()
    assert value(plain, x) == pytest.approx(value(plain, x.reshape(6, 4)))
    assert value(plain, x, axis="sequence") == pytest.approx(value(plain, by_position))
    assert value(plain, x, axis="vocabulary") == pytest.approx(value(plain, by_alternative))
    assert value(plain, x[0], axis="sequence") == pytest.approx(value(plain, x[0]))
    assert value(plain, x[0], axis="vocabulary") == pytest.approx(value(plain, x[0].T))
    assert value(plain, list(x), axis="sequence") == pytest.approx(value(plain, by_position))


def test_gradient_penalty():
    def squares(data: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return x.square().sum(), {}

    x = torch.tensor([3.0, 4.0])
    assert value(GradientPenalty(squares), x) == 81
    assert value(GradientPenalty(squares, target_norm=4.0), x) == 36
    between = GradientPenalty(squares, "interpolated", 0.0, epsilon=0.5)
    assert value(between, x, datum(reference_logprobs=[1.0, 0.0])) == pytest.approx(4**2 + 4**2)
    drawn = GradientPenalty(lambda data, x: x.square().sum(), "interpolated", 0.0)
    assert 0 <= value(drawn, x, datum(reference_logprobs=[0.0, 0.0])) < 100
    assert value(GradientPenalty(lambda data, x: x[0].sum(), "output"), [X, X]) == pytest.approx(
        (math.sqrt(3) - 1) ** 2
    )
    with pytest.raises(InvalidInputError, match="loss_fn"):
        value(GradientPenalty(), x)


# -- gradients -----------------------------------------------------------------------------------


def cubes(data: Any, logprobs: Any) -> torch.Tensor:
    parts = [logprobs] if isinstance(logprobs, torch.Tensor) else logprobs
    return torch.stack([part.pow(3).sum() for part in parts]).sum()


PENALTIES = [
    L1(),
    L1(target="probs", reduction="mean", lambda_=0.3),
    L2(),
    L2(center="mean", reduction="mean"),
    L2(center=-1.0, clip=0.7),
    ElasticNet(l1_ratio=0.3),
    OutputMagnitude(),
    OutputMagnitude(measure="norm", wanted=0.3),
    Entropy(),
    Entropy(mode="maximize", reduction="sum", normalize=True, temperature=0.7),
    KLDivergence(reference_field="other"),
    KLDivergence(reference_field="other", direction="reverse", reduction="sum"),
    KLDivergence(reference_field="other", symmetric=True),
    JensenShannon(reference_field="other"),
    Consistency("other"),
    Consistency("other", "l1", "sum"),
    Consistency("other", "cosine"),
    Consistency("other", "kl"),
    Orthogonality(),
    Orthogonality(mode="hard", axis="sequence", normalize=False),
    Orthogonality(mode="spectral", axis="vocabulary"),
    GradientPenalty(cubes),
    GradientPenalty(cubes, "interpolated", 2.0, "other", epsilon=0.3),
]


def named(penalty: Any) -> str:
    """A test id that is the same in every process: without addresses of functions."""
    return re.sub(r"<function (\w+) at \w+>", r"\1", repr(penalty))


@pytest.mark.parametrize("penalty", PENALTIES, ids=named)
def test_gradient_matches_finite_differences(penalty):
    random = torch.Generator().manual_seed(1)
    first, second, one, other = (
        torch.randn(3, 4, dtype=torch.float64, generator=random).log_softmax(-1) for _ in range(4)
    )
    data = [datum(other=one), datum(other=other)]
    alone = first.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: penalty.compute(data, x)[0], [alone])
    leaves = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: penalty.compute(data, list(x))[0], leaves)
    found = torch.autograd.grad(penalty.compute(data, leaves)[0], leaves)
    assert all(gradient.abs().max() > 0 for gradient in found)


@pytest.mark.parametrize("penalty", PENALTIES, ids=named)
def test_list_with_one_tensor_equals_the_tensor(penalty):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    data = [datum(other=UNIFORM.expand(3, 4))]
    assert value(penalty, [x], *data) == pytest.approx(value(penalty, x, *data))


@pytest.mark.parametrize(
    "penalty", [each for each in PENALTIES if not isinstance(each, Orthogonality)], ids=named
)
def test_data_can_have_different_lengths(penalty):
    x = [torch.full((rows, 4), -1.4) for rows in (2, 5)]
    data = [datum(other=UNIFORM.expand(rows, 4)) for rows in (2, 5)]
    assert math.isfinite(value(penalty, x, *data))


@pytest.mark.parametrize("penalty", [Entropy(), KLDivergence(reference_logprobs=[UNIFORM])])
def test_gradient_at_zero_probability_is_finite(penalty):
    leaf = SHARP.clone().requires_grad_()
    loss, _ = penalty.compute([], [leaf])
    (gradient,) = torch.autograd.grad(loss, [leaf])
    assert torch.isfinite(gradient).all()


# -- bad input -----------------------------------------------------------------------------------


def made(kind: Any, **options: Any) -> Any:
    return kind(**options)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: made(L1, target="weights"), "target"),
        (lambda: made(L1, reduction="none"), "reduction"),
        (lambda: made(L2, clip=0), "clip"),
        (lambda: made(L2, center="median"), "center"),
        (lambda: made(ElasticNet, l1_ratio=1.5), "l1_ratio"),
        (lambda: made(Entropy, mode="up"), "mode"),
        (lambda: made(Entropy, temperature=0), "temperature"),
        (lambda: made(KLDivergence, direction="both"), "direction"),
        (lambda: made(Orthogonality, axis="columns"), "axis"),
        (lambda: value(L1(), X, strength=2), "options"),
        (lambda: value(L1(target="field:mask"), X, datum()), "data.0.loss_fn_inputs.mask"),
        (lambda: value(Consistency(), X), "data"),
        (lambda: value(KLDivergence(reference_logprobs=P), P[:1]), "reference_logprobs"),
        (lambda: value(KLDivergence(reference_logprobs=[P]), [P, P]), "reference_logprobs"),
        (lambda: value(Orthogonality(), [X, X[:2]]), "logprobs"),
        (lambda: value(Orthogonality(axis="sequence"), [P, P[:1]]), "logprobs"),
        (lambda: value(Orthogonality(axis="sequence"), X), "logprobs"),
    ],
)
def test_error_names_the_invalid_option(make, field):
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert caught.value.field == field


def test_options_of_a_spec_have_priority_and_lambda_needs_no_underscore():
    assert value(L1(lambda_=2.0), X, **{"lambda": 3.0, "reduction": "mean"}) == 6
