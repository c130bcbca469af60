"""The retry loop for the caller's own functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import tinkex
from tinkex.errors import APIConnectionError, BadRequestError, InternalServerError
from tinkex.telemetry import attach, detach
from tinkex.telemetry.events import RetryAttemptRetry, RetryEvent

QUICK = tinkex.RetryConfig(max_retries=2, retry_delay_base=0.2, jitter_factor=0)


def failing(*errors: Exception) -> Callable[[], str]:
    """A function that raises each of the errors once, then succeeds."""
    left = list(errors)

    def flaky() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return flaky


def test_a_flaky_function_is_called_until_it_succeeds(clock):
    flaky = failing(APIConnectionError(), InternalServerError("down"))
    assert tinkex.with_retry(flaky, QUICK, clock=clock).result(10) == "done"
    assert clock.slept == [0.2, 0.4]


def test_a_coroutine_function_is_retried_too_and_the_future_can_be_awaited(clock):
    flaky = failing(APIConnectionError())

    async def work() -> str:
        await asyncio.sleep(0)
        return flaky()

    async def main() -> str:
        return await tinkex.with_retry(work, QUICK, clock=clock)

    assert asyncio.run(main()) == "done"
    assert clock.slept == [0.2]


@pytest.mark.parametrize("error", [BadRequestError("no"), ZeroDivisionError()])
def test_permanent_error_is_raised_at_once(clock, error):
    with pytest.raises(type(error)) as raised:
        tinkex.with_retry(failing(error), QUICK, clock=clock).result(10)
    assert raised.value is error
    assert clock.slept == []


def test_other_exceptions_may_be_made_retryable(clock):
    config = tinkex.RetryConfig(jitter_factor=0, retryable_exceptions=(ZeroDivisionError,))
    flaky = failing(ZeroDivisionError())
    assert tinkex.with_retry(flaky, config, clock=clock).result(10) == "done"


def test_the_last_error_is_raised_when_retries_are_used_up(clock):
    errors = [InternalServerError(str(number)) for number in range(5)]
    with pytest.raises(InternalServerError) as raised:
        tinkex.with_retry(failing(*errors), QUICK, clock=clock).result(10)
    assert raised.value is errors[2]


def test_waits_stay_within_progress_timeout(clock):
    config = tinkex.RetryConfig(progress_timeout=1, retry_delay_base=0.4, jitter_factor=0)
    with pytest.raises(InternalServerError):
        tinkex.with_retry(failing(*[InternalServerError("down")] * 9), config, clock=clock).result(
            10
        )
    assert clock.slept == [0.4]


def test_attempt_events_carry_given_metadata(clock, quiet_bus):
    told: list[Any] = []
    number = attach(told.append, RetryEvent)
    flaky = failing(APIConnectionError())
    tinkex.with_retry(flaky, QUICK, telemetry_metadata={"phase": "push"}, clock=clock).result(10)
    detach(number)
    names = [event.name.removeprefix("tinkex.retry.attempt.") for event in told]
    assert names == ["start", "retry", "start", "stop"]
    assert isinstance(told[1], RetryAttemptRetry)
    assert {event.metadata["phase"] for event in told} == {"push"}
    assert {event.operation for event in told} == {"flaky"}
