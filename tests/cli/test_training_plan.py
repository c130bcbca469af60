from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.training_plan import (
    batches,
    evaluations,
    held_out,
    is_evaluated,
    learning_rate,
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def rates(schedule, steps=10, warmup=0):
    return [
        learning_rate(step, steps, peak=1.0, schedule=schedule, warmup=warmup)
        for step in range(steps)
    ]


def test_a_constant_rate_is_constant():
    assert rates("constant") == [1.0] * 10


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_rate_falls_from_its_peak_and_never_reaches_zero(schedule):
    found = rates(schedule)
    assert found[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(found))
    assert found[-1] > 0


def test_linear_and_cosine_are_half_way_in_the_middle():
    assert rates("linear")[5] == pytest.approx(0.5)
    assert rates("cosine")[5] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_rate_warms_up_to_its_peak(schedule):
    assert rates(schedule, warmup=3)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert all(rate > 0 for rate in rates(schedule, steps=3, warmup=5))


def plan(lengths, **options):
    options = {
        "seed": 0,
        "batch_size": 4,
        "token_budget": None,
        "epochs": 1,
        "steps": None,
    } | options
    return batches(lengths, **options)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 60))
def test_every_epoch_has_every_example_once(lengths, epochs, budget):
    for token_budget in (None, budget):
        planned = plan(lengths, epochs=epochs, token_budget=token_budget)
        seen = [index for batch in planned for index in batch]
        for epoch in range(epochs):
            part = seen[epoch * len(lengths) : (epoch + 1) * len(lengths)]
            assert sorted(part) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 60))
def test_a_budget_of_tokens_is_kept_unless_one_example_is_larger(lengths, budget):
    for batch in plan(lengths, token_budget=budget):
        assert batch
        assert sum(lengths[index] for index in batch) <= budget or len(batch) == 1


def test_steps_say_how_many_there_are():
    assert len(plan([5] * 10, steps=7)) == 7
    assert len(plan([5] * 10, steps=1, epochs=9)) == 1


def test_the_order_is_that_of_the_seed():
    assert plan([5] * 30) == plan([5] * 30)
    assert plan([5] * 30) != plan([5] * 30, seed=1)
    first, second = plan([5] * 30, batch_size=30, epochs=2)
    assert first != second


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [(100, 0.1, 10), (3, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0), (9, 0, 0)],
)
def test_some_are_held_out_but_never_all(count, fraction, expected):
    chosen = held_out(count, fraction, 0)
    assert len(chosen) == expected
    assert chosen <= set(range(count))
    assert chosen == held_out(count, fraction, 0)


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(6, 0, [0, 6]), (6, 2, [0, 2, 4, 6]), (5, 2, [0, 2, 4, 5]), (1, 9, [0, 1])],
)
def test_evaluations_run_at_start_end_and_every_given_steps(steps, every, expected):
    assert [step for step in range(steps + 1) if is_evaluated(step, steps, every)] == expected
    assert evaluations(0, steps, every) == len(expected)
    # A resumed run does not evaluate its starting checkpoint again.
    for done in range(1, steps):
        assert evaluations(done, steps, every) == len([step for step in expected if step > done])
