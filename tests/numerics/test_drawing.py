"""Drawing in two levels, compared with one cumulative sum over the whole vocabulary in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine import drawing
from tinkex.engine.values import SampleJob

SIZES = [1, 2, 255, 256, 257, 264, 1000, 50_257]
ALMOST_ONE = 1 - 2**-53


class Given:
    """A random generator that returns given numbers."""

    def __init__(self, *fractions: float) -> None:
        self._fractions = list(fractions)

    def random(self) -> float:
        return self._fractions.pop(0)


def job(**options: Any) -> SampleJob:
    return SampleJob("s", np.zeros(1, np.int32), **options)


def logits_of(rows, size, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, size, generator=generator)


def choose(logits_BV, jobs, fractions):
    """Draw tokens without changing the logits."""
    randoms: list[Any] = [Given(fraction) for fraction in fractions]
    return drawing.choose(logits_BV.clone(), jobs, randoms)[:2]


def kept(chances_V, top_k=-1, top_p=1.0):
    """Mask of the tokens that the filters keep; found by sorting all tokens."""
    order = np.argsort(-chances_V, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    ordered = chances_V[order]
    if top_p < 1:
        before = np.concatenate([[0.0], ordered.cumsum()[:-1]])
        order = order[(before < top_p * ordered.sum()) | (np.arange(len(order)) == 0)]
    mask = np.zeros(len(chances_V), bool)
    mask[order] = True
    return mask


def check_draws(logits_BV, options, fractions):
    """Check that each fraction falls into the range of the drawn token, with a tolerance at its ends."""
    tokens, logprobs = choose(logits_BV, [job(**options)] * len(logits_BV), fractions)
    scaled = logits_BV.double() / options.get("temperature", 1.0)
    expected = scaled.log_softmax(-1).numpy()
    filters = {name: options[name] for name in ("top_k", "top_p") if name in options}
    for row, (token, fraction) in enumerate(zip(tokens, fractions, strict=True)):
        chances = np.exp(expected[row])
        chances[~kept(chances, **filters)] = 0.0
        ends = chances.cumsum() / chances.sum()
        start = ends[token - 1] if token else 0.0
        assert start - 1e-6 <= fraction <= ends[token] + 1e-6
        assert chances[token] > 0
        assert logprobs[row] == pytest.approx(expected[row, token], rel=1e-6, abs=2e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 30.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 200},
        {"top_p": 0.0},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_k": 40, "top_p": 0.8, "temperature": 1.5},
    ],
)
def test_drawn_token_matches_the_cumulative_probability(size, options):
    fractions = [0.0, ALMOST_ONE, *np.random.default_rng(1).random(14)]
    check_draws(logits_of(16, size), options, fractions)


def test_logprobs_are_exact_over_a_large_vocabulary():
    logits = logits_of(16, 130_000)
    tokens, logprobs = choose(logits, [job()] * 16, np.random.default_rng(2).random(16))
    expected = logits.double().log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"top_k": 290}, {"top_p": 1 - 1e-16}])
@pytest.mark.parametrize("only", [[0], [299], [255, 256], [3, 255], [256, 290]])
def test_token_with_zero_probability_is_never_drawn(only, options):
    logits = torch.full((64, 300), -torch.inf)
    logits[:, only] = logits_of(64, len(only))
    fractions = [0.0, ALMOST_ONE, 1.0, *np.random.default_rng(3).random(61)]
    tokens, logprobs = choose(logits, [job(**options)] * 64, fractions)
    assert set(tokens) == set(only)
    assert np.isfinite(logprobs).all()
    assert max(logprobs) <= 0


def test_top_k_and_top_p_keep_the_smallest_set_of_tokens():
    chances = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    grid = np.linspace(0, ALMOST_ONE, 200)
    for options, expected in (
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # 0.7 of the 0.85 that the three tokens hold
        ({"top_k": 2**70, "top_p": 1.0}, {0, 1, 2, 3, 4}),
    ):
        tokens, _ = choose(chances.log().expand(200, 5), [job(**options)] * 200, grid)
        assert set(tokens) == expected
        assert tokens == sorted(tokens)  # filters keep the order of the vocabulary


@pytest.mark.parametrize("size", [300, 50_257])
@pytest.mark.parametrize(
    "options", [{"top_k": 4}, {"top_p": 0.0399}, {"top_k": 50, "top_p": 0.0799}]
)
def test_filters_keep_the_first_of_equally_likely_tokens(size, options):
    """Otherwise the same seed could draw other tokens under a constraint that allows them all."""
    logits = torch.full((64, size), -torch.inf)
    logits[:, -100:] = 0.0
    fractions = np.linspace(0, ALMOST_ONE, 64)
    tokens, _ = choose(logits, [job(**options)] * 64, fractions)
    assert set(tokens) == set(range(size - 100, size - 96))


def test_draw_does_not_depend_on_other_rows():
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 2.0},
        {"temperature": 0.0, "top_k": 2},
    ]
    jobs, logits = [job(**one) for one in options], logits_of(6, 700)
    fractions = np.random.default_rng(4).random(6)
    tokens, logprobs = choose(logits, jobs, fractions)
    for row in range(6):
        alone = choose(logits[row : row + 1], jobs[row : row + 1], fractions[row : row + 1])
        assert alone == ([tokens[row]], [logprobs[row]])
    assert [tokens[1], tokens[5]] == logits[[1, 5]].argmax(-1).tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_non_finite_logits_still_give_a_token(options):
    tokens, logprobs = choose(torch.full((2, 300), torch.nan), [job(**options)] * 2, [0.5, 0.5])
    assert all(0 <= token < 300 for token in tokens)
    assert np.isnan(logprobs).all()
