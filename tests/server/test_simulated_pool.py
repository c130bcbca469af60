"""Large pools in simulated time: engines stay busy, keys get equal shares, and bad placements are corrected."""

from __future__ import annotations

import pytest

from .simulated_pool import SimulatedPool

SECONDS = 100.0


def measured(engines: int, models: int, keys: int, place, **options) -> SimulatedPool:
    pool = SimulatedPool(engines)
    names = list(pool.loads)
    for number in range(models):
        pool.add(number % keys, names[place(number) % engines], step=2.0, thinks=0.05, **options)
    pool.run(20.0)  # until the placement has settled
    pool.begin_measuring()
    pool.run(20.0 + SECONDS)
    return pool


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda number: number, id="evenly"),
        pytest.param(lambda number: 0, id="all on one engine", marks=pytest.mark.heavy),
    ],
)
def test_64_engines_are_busy_and_50_keys_get_equal_shares(place):
    pool = measured(64, 200, 50, place)
    assert pool.busy > 0.95
    assert pool.spread < 0.05


def test_key_with_many_models_gets_no_more_than_one_with_few():
    pool = SimulatedPool(4)
    names = list(pool.loads)
    for number in range(20):  # the first key has 14 models, the others 3 each
        pool.add(
            max(0, number - 14) // 3 + (number >= 14), names[number % 4], step=2.0, thinks=0.05
        )
    pool.run(20.0)
    pool.begin_measuring()
    pool.run(20.0 + 3 * SECONDS)
    assert pool.busy > 0.95
    assert pool.spread < 0.05


def test_models_seldom_move_while_their_homes_are_balanced():
    pool = measured(4, 16, 4, lambda number: number // 4 + number)
    assert pool.moves < 0.15 * sum(pool.used().values()) / 2.0


def test_keys_with_one_model_each_share_engines_that_have_unequal_numbers_of_them():
    pool = SimulatedPool(2)
    for key in range(5):  # three on the first engine, two on the second
        pool.add(key, list(pool.loads)[key % 2], step=1.0, thinks=0.01)
    pool.run(20.0)
    pool.begin_measuring()
    pool.run(20.0 + 3 * SECONDS)
    assert pool.busy > 0.95
    assert pool.spread < 0.05
