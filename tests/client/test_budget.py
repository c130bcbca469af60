"""Limits on requests and bytes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._client.budget import (
    Budget,
    Lease,
    SampleBudget,
    backoff_after_429,
    sample_budget,
    slots,
)
from tinkex.config import Config

from ..scripted import FakeClock


async def settle() -> None:
    """Run the loop until every task is blocked or done."""
    for _ in range(5):
        await asyncio.sleep(0)


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await settle()
    return task


# -- one budget -----------------------------------------------------------------------------------


def test_budget_can_be_exceeded_by_one_request_and_next_waits():
    async def work() -> None:
        budget = Budget(1000)
        await budget.take(500)
        await budget.take(600)
        assert budget.balance == -100
        third = await started(budget.take(1))
        assert not third.done()
        budget.give_back(500)
        await third
        assert budget.balance == 399

    asyncio.run(work())


def test_a_request_larger_than_the_budget_passes():
    budget = Budget(10)
    assert budget.try_take(1_000_000)
    assert not budget.try_take(1)
    budget.give_back(1_000_000)
    assert budget.balance == 10


def test_balance_of_zero_admits_one_request():
    budget = Budget(10)
    assert budget.try_take(10)
    assert budget.try_take(1)
    assert not budget.try_take(1)


def test_waiters_are_served_in_order():
    async def work() -> None:
        budget, served = slots(1), []
        await budget.take(1)

        async def wait(number: int) -> None:
            await budget.take(1)
            served.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(5)]
        await settle()
        for _ in tasks:
            budget.give_back(1)
            await settle()
        assert served == [0, 1, 2, 3, 4]

    asyncio.run(work())


def test_later_request_does_not_overtake_waiter():
    async def work() -> None:
        budget = Budget(0)
        await budget.take(1)
        waiter = await started(budget.take(1))
        budget.give_back(1)  # grants the waiter before it runs again
        assert not budget.try_take(1)
        await waiter

    asyncio.run(work())


def test_one_return_serves_all_waiters_that_fit():
    async def work() -> None:
        budget = Budget(10)
        await budget.take(20)
        waiters = [await started(budget.take(6)) for _ in range(3)]
        budget.give_back(20)
        await settle()
        assert [waiter.done() for waiter in waiters] == [True, True, False]
        budget.give_back(6)
        await asyncio.gather(*waiters)

    asyncio.run(work())


@pytest.mark.parametrize("count", [1, 2, 10])
def test_slots_admit_exactly_their_number(count):
    room = slots(count)
    assert [room.try_take(1) for _ in range(count + 1)] == [True] * count + [False]


# -- cancellation ---------------------------------------------------------------------------------


def test_a_cancelled_waiter_leaves_the_queue():
    async def work() -> None:
        budget = slots(1)
        await budget.take(1)
        first, second = await started(budget.take(1)), await started(budget.take(1))
        first.cancel()
        await settle()
        assert first.cancelled()
        assert budget.waiting == 1
        budget.give_back(1)
        await second

    asyncio.run(work())


def test_waiter_cancelled_after_grant_returns_its_share():
    async def work() -> None:
        budget = slots(1)
        await budget.take(1)
        first, second = await started(budget.take(1)), await started(budget.take(1))
        budget.give_back(1)
        first.cancel()
        await settle()
        assert first.cancelled()
        await second
        budget.give_back(1)
        assert budget.balance == budget.size

    asyncio.run(work())


def test_waiter_cancelled_before_grant_is_skipped():
    async def work() -> None:
        budget = slots(1)
        await budget.take(1)
        first, second = await started(budget.take(1)), await started(budget.take(1))
        first.cancel()
        budget.give_back(1)
        await settle()
        assert first.cancelled()
        await second
        budget.give_back(1)
        assert budget.balance == budget.size

    asyncio.run(work())


OPERATIONS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 30)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("give back"), st.integers(0, 5)),
    st.tuples(st.just("run"), st.just(0)),
)


@given(st.integers(0, 20), st.lists(OPERATIONS, max_size=60))
def test_balance_always_returns_to_size(size, operations):
    async def work() -> None:
        budget = Budget(size)
        held: dict[int, int] = {}
        tasks: list[asyncio.Task[None]] = []

        async def take(number: int, cost: int) -> None:
            await budget.take(cost)
            held[number] = cost

        for kind, argument in operations:
            if kind == "take":
                tasks.append(asyncio.create_task(take(len(tasks), argument)))
            elif kind == "cancel" and argument < len(tasks):
                tasks[argument].cancel()
            elif kind == "give back" and argument in held:
                budget.give_back(held.pop(argument))
            elif kind == "run":
                await settle()
                assert budget.balance == size - sum(held.values())
                assert not budget.waiting or budget.balance < 0
        await settle()
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(out is None or isinstance(out, asyncio.CancelledError) for out in outcomes)
        for cost in held.values():
            budget.give_back(cost)
        assert (budget.balance, budget.waiting) == (size, 0)

    asyncio.run(work())


# -- leases ---------------------------------------------------------------------------------------


def test_lease_returns_everything_when_block_fails():
    async def work() -> None:
        count, room = slots(2), Budget(100)

        async def both() -> None:
            with Lease() as lease:
                await lease.take(count)
                await lease.take(room, 70)
                assert (count.balance, room.balance) == (0, 30)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await both()
        assert (count.balance, room.balance) == (1, 100)

    asyncio.run(work())


def test_lease_cancelled_while_waiting_returns_its_shares():
    async def work() -> None:
        count, room = slots(2), slots(1)
        await room.take(1)

        async def both() -> None:
            with Lease() as lease:
                await lease.take(count)
                await lease.take(room)

        task = await started(both())
        assert count.balance == 0
        task.cancel()
        await settle()
        assert task.cancelled()
        assert (count.balance, room.waiting) == (1, 0)

    asyncio.run(work())


# -- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1.0), (128 * 1024, 1.0), (128 * 1024 + 1, 5.0), (150_000, 5.0)]
)
def test_large_samples_back_off_longer(size, seconds):
    assert backoff_after_429(size) == seconds


async def leases(budget: SampleBudget, number: int, size: int) -> list[asyncio.Task[Lease]]:
    tasks = [asyncio.create_task(budget.lease(size)) for _ in range(number)]
    await settle()
    return tasks


async def drop(tasks: list[asyncio.Task[Lease]]) -> None:
    """Return granted leases and cancel the others."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Lease):
            outcome.__exit__(None, None, None)


def granted(tasks: list[asyncio.Task[Lease]]) -> int:
    return sum(task.done() for task in tasks)


def test_samples_are_limited_by_number():
    async def work() -> None:
        budget = SampleBudget(FakeClock(), count=3)
        tasks = await leases(budget, 5, 1)
        assert granted(tasks) == 3
        with await tasks[0]:
            pass
        await settle()
        assert granted(tasks) == 4
        await drop(tasks)

    asyncio.run(work())


def test_limit_of_one_sends_samples_one_by_one():
    async def work() -> None:
        budget, at_once, most = SampleBudget(FakeClock(), count=1), 0, 0

        async def send() -> None:
            nonlocal at_once, most
            with await budget.lease(1):
                at_once += 1
                most = max(most, at_once)
                await settle()
                at_once -= 1

        await asyncio.gather(*[send() for _ in range(5)])
        assert most == 1

    asyncio.run(work())


def test_samples_are_limited_by_bytes():
    async def work() -> None:
        tasks = await leases(SampleBudget(FakeClock(), size=1000), 4, 600)
        assert granted(tasks) == 2
        await drop(tasks)

    asyncio.run(work())


def test_budgets_are_independent():
    async def work() -> None:
        clock = FakeClock()
        busy, free = SampleBudget(clock, count=1), SampleBudget(clock, count=1)
        busy.back_off(5.0)
        assert not free.recently_backed_off
        await drop(await leases(free, 1, 1))
        assert clock.slept == []

    asyncio.run(work())


def test_backoff_delays_samples_until_it_ends():
    async def work() -> None:
        clock = FakeClock(long=0.5)  # the test must end every wait itself
        budget = SampleBudget(clock)
        budget.back_off(1.0)
        tasks = await leases(budget, 3, 1)
        assert granted(tasks) == 0
        clock.advance(0.5)
        budget.back_off(1.0)  # another 429 in the meantime
        clock.advance(0.5)
        await settle()
        assert granted(tasks) == 0
        clock.advance(0.5)
        await settle()
        assert granted(tasks) == 3
        await drop(tasks)

    asyncio.run(work())


def test_a_shorter_backoff_does_not_end_a_longer_one():
    clock = FakeClock()
    budget = SampleBudget(clock)
    budget.back_off(5.0)
    budget.back_off(1.0)
    assert budget.backing_off == 5.0


def test_after_backoff_at_most_ten_samples_are_sent_at_once():
    async def work() -> None:
        clock = FakeClock()
        budget = SampleBudget(clock)
        budget.back_off(1.0)
        clock.advance(1.0)
        tasks = await leases(budget, 15, 1)
        assert granted(tasks) == 10
        with await tasks[0]:
            pass
        await settle()
        assert granted(tasks) == 11
        await drop(tasks)

    asyncio.run(work())


def test_after_backoff_each_byte_costs_twenty():
    async def work() -> None:
        clock = FakeClock()
        budget = SampleBudget(clock, size=1000)
        budget.back_off(1.0)
        clock.advance(1.0)
        tasks = await leases(budget, 4, 30)  # 600 each
        assert granted(tasks) == 2
        await drop(tasks)

    asyncio.run(work())


def test_ten_seconds_after_backoff_limits_are_normal():
    async def work() -> None:
        clock = FakeClock()
        budget = SampleBudget(clock, size=1000)
        budget.back_off(1.0)
        clock.advance(10.9)
        assert budget.recently_backed_off
        clock.advance(0.1)
        assert not budget.recently_backed_off
        tasks = await leases(budget, 30, 30)
        assert granted(tasks) == 30
        await drop(tasks)

    asyncio.run(work())


def test_waiting_sample_pays_price_at_admission():
    async def work() -> None:
        clock = FakeClock()
        budget = SampleBudget(clock, count=1, size=1000)
        first = await budget.lease(1)
        second = await started(budget.lease(50))
        budget.back_off(1.0)
        clock.advance(1.0)
        with first:
            pass
        with await second:
            assert budget._bytes.balance == 0  # 50 bytes at a cost of 20 each

    asyncio.run(work())


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_sample_returns_its_lease_when_it(end):
    async def work() -> None:
        budget = SampleBudget(FakeClock(), count=1, size=10)

        async def send() -> None:
            with await budget.lease(100):
                await settle()
                if end == "fails":
                    raise ZeroDivisionError
                await asyncio.Event().wait()

        task = await started(send())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await drop(await leases(budget, 1, 100))
        assert (budget._count.balance, budget._bytes.balance) == (0, 10)

    asyncio.run(work())


def test_sample_cancelled_during_backoff_holds_nothing():
    async def work() -> None:
        clock = FakeClock(long=0.5)
        budget = SampleBudget(clock, count=5, size=10)
        budget.back_off(1.0)
        tasks = await leases(budget, 2, 1)
        await drop(tasks)
        assert all(task.cancelled() for task in tasks)
        balances = (budget._count.balance, budget._throttled.balance, budget._bytes.balance)
        assert balances == (4, 9, 10)

    asyncio.run(work())


# -- limits from the settings ----------------------------------------------------------------------


def config(**options: Any) -> Config:
    return Config(**{"base_url": "http://a:1", "api_key": "tml-a", **options})


def test_limits_of_samples_can_be_set():
    async def work() -> None:
        set_low = config(dispatch_concurrency=1, throttled_dispatch_concurrency=1)
        budget = sample_budget(set_low, FakeClock(), 1000)
        first = await budget.lease(1)
        second = await started(budget.lease(1))
        assert not second.done()
        first.__exit__(None, None, None)
        (await second).__exit__(None, None, None)

    asyncio.run(work())


@pytest.mark.parametrize(("chosen", "size"), [(None, 1000), (7, 7)])
def test_byte_budget_defaults_to_limit_of_service(chosen, size):
    budget = sample_budget(config(dispatch_byte_budget=chosen), FakeClock(), 1000)
    assert budget._bytes.size == size


def test_limits_are_shared_with_shared_limits_same_address_and_key():
    clock = FakeClock()
    shared = {"shared_limits": True}
    one = sample_budget(config(**shared), clock, 1000)
    assert sample_budget(config(**shared, base_url="http://A:1/path"), clock, 1000) is one
    for other in (
        config(),
        config(**shared, api_key="tml-b"),
        config(**shared, base_url="http://b:1"),
    ):
        assert sample_budget(other, clock, 1000) is not one
    one.back_off(5)
    assert sample_budget(config(**shared), clock, 1000).backing_off > 0
