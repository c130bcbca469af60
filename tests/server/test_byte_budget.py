"""Bytes of request bodies in memory are counted, and refused over a limit."""

from __future__ import annotations

import pytest

from tinkex.errors import RateLimitError
from tinkex.server.byte_budget import ByteBudget


def test_a_key_over_its_limit_is_refused_and_others_are_not():
    budget = ByteBudget(per_key=100, total=1000)
    first, second, other = budget.hold("ann"), budget.hold("ann"), budget.hold("bob")
    first.take(80)
    with pytest.raises(RateLimitError, match="max_inflight_bytes_per_key") as refused:
        second.take(30)
    assert refused.value.retry_after is not None
    other.take(100)
    first.release()
    second.take(30)
    assert budget.held == 130


def test_all_keys_together_are_bounded():
    budget = ByteBudget(per_key=100, total=150)
    budget.hold("ann").take(100)
    with pytest.raises(RateLimitError, match="max_inflight_bytes="):
        budget.hold("bob").take(51)
    budget.hold("bob").take(50)


def test_a_lone_request_of_any_size_is_admitted():
    budget = ByteBudget(per_key=100, total=150)
    large = budget.hold("ann")
    large.take(200)
    large.take(200)  # decompressed
    with pytest.raises(RateLimitError):
        budget.hold("bob").take(1)
    large.release()
    assert budget.held == 0


def test_an_announced_size_is_checked_but_not_counted():
    budget = ByteBudget(per_key=100, total=1000)
    budget.hold("ann").take(1)
    announced = budget.hold("ann")
    with pytest.raises(RateLimitError):
        announced.check(100)
    announced.check(99)
    assert budget.held == 1


def test_released_bytes_are_no_longer_counted():
    budget = ByteBudget(per_key=100, total=1000)
    for owner in map(str, range(10)):
        hold = budget.hold(owner)
        hold.take(10)
        hold.release()
        hold.release()
    assert budget.held == 0
    assert not budget._held_of


def test_a_size_that_is_known_later_replaces_the_reserved_one_without_a_check():
    budget = ByteBudget(per_key=100, total=1000)
    first, second = budget.hold("ann"), budget.hold("ann")
    first.take(60)
    second.take(40)
    second.settle(10)
    assert budget.held == 70
    second.settle(50)
    assert budget.held == 110
    second.release()
    assert budget.held == 60
