"""How a pass is divided into shards, and that their sums do not depend on who computed them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.shards import MAX_SHARDS, SHARD_TOKENS, ShardSums, add_in_order, divide
from tinkex.engine.values import Example

BUDGET = 512


def examples(lengths):
    return [
        Example(np.zeros(length, np.int32), {"target_tokens": np.zeros(length)})
        for length in lengths
    ]


def joined(left, right):
    return f"({left}+{right})"


def summed(count, cuts):
    """The sum of shards as a text with brackets, computed by one engine between each two cuts."""
    bounds = [0, *sorted(cut % (count + 1) for cut in cuts), count]
    blocks = []
    for start, end in itertools.pairwise(bounds):
        sums = ShardSums[str]()
        for number in range(start, end):
            sums.add(number, str(number), joined)
        blocks += sums.blocks
    return add_in_order(reversed(blocks), joined)


@given(st.integers(1, 20), st.lists(st.integers(0, 20), max_size=6))
def test_order_of_additions_does_not_depend_on_the_engines(count, cuts):
    assert summed(count, cuts) == summed(count, [])


def test_order_of_additions_is_a_binary_tree():
    assert summed(6, []) == "(((0+1)+(2+3))+(4+5))"


def test_an_engine_sends_one_sum_for_a_whole_branch():
    sums = ShardSums[str]()
    for number in range(4, 8):
        sums.add(number, str(number), joined)
    assert [(block.start, block.size) for block in sums.blocks] == [(4, 4)]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=60))
def test_shards_hold_every_example_once_and_none_is_empty(lengths):
    shards = divide(examples(lengths), BUDGET)
    held = [index for shard in shards for batch in shard.batches for index in batch]
    assert sorted(held) == list(range(len(lengths)))
    assert all(shard.batches for shard in shards)
    assert len(shards) <= MAX_SHARDS


def test_small_pass_is_one_shard():
    assert len(divide(examples([100] * 5), BUDGET)) == 1
    assert len(divide(examples([SHARD_TOKENS // 2 - 1]), BUDGET)) == 1


@given(st.integers(2, 200))
def test_tokens_of_a_shard_are_within_one_micro_batch_of_the_average(count):
    sizes = [shard.tokens for shard in divide(examples([128] * count), BUDGET)]
    average = sum(sizes) / len(sizes)
    assert all(abs(size - average) <= BUDGET for size in sizes)
