"""Where work goes in a pool: by load, by what an engine has, and by tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.interface import IN_LINE, Spot
from tinkex.engine.shards import Shard
from tinkex.engine.values import SampleJob
from tinkex.server.routing import (
    BLOCK,
    TOKENS_PER_ENGINE,
    Line,
    Load,
    Prefixes,
    assign,
    block_keys,
    find_spot,
    new_tokens,
    sampling_cost,
)


def job(prompt, **options):
    return SampleJob("s", np.asarray(prompt, np.int32), **options)


def shards(*tokens):
    return [Shard([[number]], size) for number, size in enumerate(tokens)]


# -- prompts --------------------------------------------------------------------------------------


def test_prefix_is_found_up_to_the_first_block_that_differs():
    known, prompt = Prefixes(), np.arange(5 * BLOCK)
    known.add(block_keys("a", prompt))
    other = prompt.copy()
    other[3 * BLOCK + 1] += 1
    assert known.longest(block_keys("a", prompt)) == 5 * BLOCK
    assert known.longest(block_keys("a", other)) == 3 * BLOCK


def test_prefix_read_with_one_adapter_does_not_count_for_another():
    known, prompt = Prefixes(), np.arange(4 * BLOCK)
    known.add(block_keys("a", prompt))
    assert known.longest(block_keys("b", prompt)) == 0


def test_end_of_a_prompt_is_evicted_before_its_start():
    known, prompt = Prefixes(limit=3), np.arange(4 * BLOCK)
    known.add(block_keys("a", prompt))
    assert known.longest(block_keys("a", prompt)) == 3 * BLOCK


# -- samples --------------------------------------------------------------------------------------


def test_job_goes_where_its_prompt_was_read_unless_that_engine_is_much_busier():
    prompt = np.arange(10 * BLOCK)
    keys = block_keys("a", prompt)
    near, idle = Load(), Load()
    near.prefixes.add(keys)
    asked = job(prompt, max_tokens=10)
    near.tokens = 50
    assert sampling_cost(near, asked, keys, has_adapter=True) < sampling_cost(
        idle, asked, keys, has_adapter=True
    )
    near.tokens = 500
    assert sampling_cost(near, asked, keys, has_adapter=True) > sampling_cost(
        idle, asked, keys, has_adapter=True
    )


def test_engine_without_the_adapter_or_with_training_costs_more():
    asked, plain, training = job([1, 2]), Load(tokens=10), Load(tokens=10, line=Line(1))
    cost = sampling_cost(plain, asked, [], has_adapter=True)
    assert sampling_cost(plain, asked, [], has_adapter=False) > cost
    assert sampling_cost(training, asked, [], has_adapter=True) > cost


def test_load_of_a_job_counts_its_samples():
    assert new_tokens(job([1] * 10, max_tokens=7, num_samples=3)) == pytest.approx(23)


# -- passes ---------------------------------------------------------------------------------------


def test_small_pass_is_not_divided():
    assert assign(shards(300, 300, 300), 4) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [[0, 1, 2], [3, 4], [5, 6, 7]]),
        (8, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (99, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_equal_shards_are_divided_evenly(engines, expected):
    assert assign(shards(*[TOKENS_PER_ENGINE] * 8), engines) == expected


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 9))
def test_every_shard_is_computed_once_and_in_order(tokens, engines):
    parts = assign(shards(*tokens), engines)
    assert [number for part in parts for number in part] == list(range(len(tokens)))
    assert len(parts) <= engines


# -- lines ----------------------------------------------------------------------------------------


def test_seconds_waiting_in_the_queue_are_not_counted():
    line = Line()
    for _ in range(2):
        line.join()
    assert line.leave(0.0, 2.0) == 2.0
    line.join()
    assert line.leave(0.0, 5.0) == 3.0
    assert line.leave(4.0, 5.5) == 0.5
    assert line.length == 0


def waiting(length: int, usual: float = 1.0) -> Load:
    return Load(line=Line(length, usual))


def test_model_stays_at_home_while_the_queue_is_short():
    assert find_spot(("home", waiting(1)), ("other", waiting(0)), 0.1) == Spot("home")


def test_model_may_move_to_a_shorter_queue():
    full = "home", waiting(IN_LINE)
    idle = find_spot(full, ("other", waiting(0)), 0.1)
    used = find_spot(full, ("other", waiting(1)), 0.1)
    assert idle is not None
    assert used is not None
    assert (idle.engine, idle.moves, idle.idle) == ("other", True, True)
    assert (used.engine, used.moves, used.idle) == ("other", True, False)
    assert find_spot(full, ("other", waiting(IN_LINE)), 0.1) is None
    assert find_spot(full, None, 0.1) is None


def test_model_does_not_move_if_waiting_is_shorter_than_moving():
    assert find_spot(("home", waiting(2, 0.1)), ("other", waiting(0)), 0.2) is None
