"""When a call is retried, and after which wait."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._client.retry import (
    HTTPRetryPolicy,
    RetryConfig,
    SampleRetryPolicy,
    retry_delay,
    retryable_status,
)
from tinkex._retry import Clock, Tried, retrying
from tinkex._wire.failures import error_from_response
from tinkex.config import DEFAULT_RETRY_WINDOW
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    BadRequestError,
    ClientClosedError,
    DecodeError,
    GoneError,
    HTTPRequest,
    InternalServerError,
    InvalidInputError,
    RequestFailedError,
    TinkerError,
)

from ..scripted import FakeClock

NOW = 1_700_000_000.0
RETRYABLE = (408, 409, 429, 500, 502, 503, 504, 529, 599)
FINAL = (400, 401, 403, 404, 405, 410, 413, 415, 418, 422)
chances = st.floats(0, 1, exclude_max=True)


def failure(status: int, body: bytes = b'{"detail": "no"}', **headers: str) -> TinkerError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return error_from_response(status, named, body, HTTPRequest("POST", "/x"), now=NOW)


def wait(
    error: Exception,
    attempt: int = 0,
    elapsed: float = 0.0,
    chance: float = 0.0,
    policy: Any = None,
) -> float | None:
    seconds: float | None = (policy or HTTPRetryPolicy()).wait_before_retry(
        error, Tried(attempt, elapsed, chance=chance)
    )
    return seconds


# -- which errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", RETRYABLE)
def test_temporary_status_is_retried(status):
    assert retryable_status(status)
    assert wait(failure(status)) == 0.5


@pytest.mark.parametrize("status", FINAL)
def test_permanent_status_is_not_retried(status):
    assert not retryable_status(status)
    assert wait(failure(status)) is None


@pytest.mark.parametrize("error", [APIConnectionError(), APITimeoutError()])
def test_request_without_answer_is_retried(error):
    assert wait(error) == 0.5


@pytest.mark.parametrize(
    "error",
    [
        RequestFailedError("no", "r-1", "server"),
        APIResponseValidationError(),
        DecodeError("no"),
        ClientClosedError("closed"),
        InvalidInputError("no"),
    ],
)
def test_error_unrelated_to_connection_is_not_retried(error):
    assert wait(error) is None


@pytest.mark.parametrize("most", [0, 1, 10])
def test_call_is_retried_max_retries_times(most):
    policy = HTTPRetryPolicy(most)
    waits = [wait(failure(503), attempt, policy=policy) for attempt in range(most + 1)]
    assert None not in waits[:-1]
    assert waits[-1] is None


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_x_should_retry_true_forces_retry(word):
    assert wait(failure(400, x_should_retry=word)) == 0.5
    assert wait(failure(404, x_should_retry=word), 10) is None


@pytest.mark.parametrize("word", ["false", "False", "FALSE"])
@pytest.mark.parametrize("body", [b"", b'{"detail": "no"}'])
def test_x_should_retry_false_prevents_retry(word, body):
    for status in (400, 409, 500):
        assert wait(failure(status, body, x_should_retry=word)) is None


def test_other_values_of_x_should_retry_are_ignored():
    assert wait(failure(500, x_should_retry="maybe")) == 0.5
    assert wait(failure(404, x_should_retry="1")) is None


def test_in_dispatch_window_x_should_retry_false_stops_and_true_adds_no_retries():
    policy = HTTPRetryPolicy(2, DEFAULT_RETRY_WINDOW)
    assert wait(failure(503, x_should_retry="false"), 2, 1.0, policy=policy) is None
    assert wait(failure(404, x_should_retry="true"), 2, 1.0, policy=policy) is None


# -- delays ---------------------------------------------------------------------------------------


@given(st.integers(0, 5000), chances)
def test_delay_is_75_to_100_percent_of_capped_exponential(attempt, chance):
    full = min(0.5 * 2.0 ** min(attempt, 100), 10.0)
    assert 0.75 * full <= retry_delay(attempt, chance=chance) <= full
    if attempt < 10:
        assert wait(failure(503), attempt, chance=chance) == retry_delay(attempt, chance=chance)


def test_delays_start_at_half_a_second_and_are_capped_at_ten():
    assert retry_delay(0, chance=0.0) == 0.5
    assert retry_delay(0, chance=1.0) == 0.375
    assert [retry_delay(attempt, chance=0.0) for attempt in (1, 4, 5, 20)] == [1, 8, 10, 10]


@pytest.mark.parametrize("status", RETRYABLE)
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry_after_ms": "1500"}, 1.5),
        ({"retry_after_ms": "2.5"}, 0.0025),
        ({"retry_after": "7"}, 7.0),
        ({"retry_after": "1.25"}, 1.25),
        ({"retry_after": "60"}, 60.0),
        ({"retry_after": formatdate(NOW + 20, usegmt=True)}, 20.0),
        ({"retry_after_ms": "1500", "retry_after": "30"}, 1.5),
        ({"retry_after_ms": "soon", "retry_after": "30"}, 30.0),
    ],
)
def test_retry_after_sets_the_wait(status, headers, seconds):
    error = failure(status, **headers)
    assert wait(error) == seconds
    assert error.retry_after == seconds


@pytest.mark.parametrize(
    "asked",
    ["61", "-1", "0", "nan", "inf", "soon", "", formatdate(NOW + 90), formatdate(NOW - 5)],
)
def test_invalid_retry_after_is_ignored(asked):
    assert wait(failure(503, retry_after=asked), 1) == 1.0


def test_error_keeps_retry_after_even_if_too_long_to_wait():
    error = failure(429, retry_after="120")
    assert error.retry_after == 120.0
    assert error.retry_after_ms == 120_000


# -- billing errors -------------------------------------------------------------------------------


def test_billing_error_is_retried_within_billing_window():
    policy = HTTPRetryPolicy(0, billing_window=20.0)
    waits = [wait(failure(402), n, 5.0 * n, policy=policy) for n in range(5)]
    assert waits == [5.0, 5.0, 5.0, 5.0, None]


def test_billing_window_defaults_to_one_hour():
    assert wait(failure(402), 700, 3595.0) == 5.0
    assert wait(failure(402), 700, 3596.0) is None


def test_billing_error_is_final_with_empty_billing_window():
    assert wait(failure(402), policy=HTTPRetryPolicy(billing_window=0.0)) is None


# -- 400 with empty body --------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{}", b"  \r\n", b'""'])
def test_blank_400_is_retried_three_times_without_wait(body):
    assert [wait(failure(400, body), attempt) for attempt in range(4)] == [0.0, 0.0, 0.0, None]


def test_blank_400_is_retried_at_most_max_retries_times():
    assert wait(failure(400, b""), 1, policy=HTTPRetryPolicy(1)) is None


def test_blank_400_with_x_should_retry_uses_normal_delays():
    assert wait(failure(400, b"", x_should_retry="true"), 5) == 10.0


# -- the dispatch window --------------------------------------------------------------------------


def test_dispatch_is_retried_until_window_ends_after_max_retries():
    policy = HTTPRetryPolicy(10, DEFAULT_RETRY_WINDOW)
    error = APIConnectionError()
    waits = [wait(error, attempt, 60.0, policy=policy) for attempt in range(10, 18)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert wait(error, 0, 0.0, policy=HTTPRetryPolicy(0, DEFAULT_RETRY_WINDOW)) == 1.0
    assert wait(error, 18, 290.0, policy=policy) == 10.0
    assert wait(error, 19, 300.0, policy=policy) is None


def test_retry_after_applies_in_dispatch_window():
    policy = HTTPRetryPolicy(0, DEFAULT_RETRY_WINDOW)
    assert wait(failure(503, retry_after="3"), 0, 0.0, policy=policy) == 3.0
    assert wait(failure(503, retry_after="45"), 9, 280.0, policy=policy) == 20.0


def test_dispatch_window_is_five_minutes_and_only_for_temporary_errors():
    assert DEFAULT_RETRY_WINDOW == 300.0
    assert wait(failure(404), 10, 1.0, policy=HTTPRetryPolicy(10, DEFAULT_RETRY_WINDOW)) is None


# -- retry loop -----------------------------------------------------------------------------------


def run(failures: list[BaseException], policy: Any = None, **options: Any) -> tuple[Any, FakeClock]:
    """Fail with the listed errors, then return the number of the successful attempt."""
    clock = FakeClock(long=1e9)

    async def once(attempt: int) -> int:
        if attempt < len(failures):
            raise failures[attempt]
        return attempt

    deadline = options.pop("within", None)
    if deadline is not None:
        deadline += clock.now
    work = retrying(once, policy or HTTPRetryPolicy(), clock, deadline=deadline, **options)
    try:
        return asyncio.run(work), clock
    except TinkerError as error:
        return error, clock


def test_call_is_retried_until_it_succeeds():
    result, clock = run([failure(503), failure(429, retry_after="3"), APIConnectionError()])
    assert result == 3
    assert clock.slept == [0.5, 3.0, 2.0]


def test_last_error_is_raised_unchanged():
    last = failure(503)
    result, _ = run([failure(500), failure(500), last], HTTPRetryPolicy(2))
    assert result is last


def test_no_wait_starts_that_would_cross_deadline():
    second = failure(503)
    result, clock = run([failure(503), second, failure(503)], within=1.5)
    assert result is second
    assert clock.slept == [0.5]


def test_listener_is_called_before_every_wait():
    heard: list[tuple[int, float, float]] = []
    first = failure(503)

    def listen(error: TinkerError, tried: Tried, wait: float) -> None:
        assert tried.attempt or error is first
        heard.append((tried.attempt, tried.elapsed, wait))

    run([first, failure(503), failure(503)], on_wait=listen)
    assert heard == [(0, 0.0, 0.5), (1, 0.5, 1.0), (2, 1.5, 2.0)]


@pytest.mark.parametrize("error", [ValueError("a bug"), asyncio.CancelledError()])
def test_foreign_error_is_never_retried(error):
    async def once(_: int) -> None:
        raise error

    clock = FakeClock()
    with pytest.raises(type(error)):
        asyncio.run(retrying(once, HTTPRetryPolicy(), clock))
    assert clock.slept == []


def test_real_clock_uses_machine_time():
    clock = Clock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1_700_000_000
    assert 0 <= clock.random() < 1


# -- sampling -------------------------------------------------------------------------------------


def sample_wait(error: Exception, attempt: int = 0, chance: float = 0.5, **options: Any) -> Any:
    return wait(error, attempt, 0.0, chance, SampleRetryPolicy(RetryConfig(**options)))


def test_retry_config_defaults_match_documentation():
    config = RetryConfig()
    assert (config.max_connections, config.max_retries) == (1000, None)
    assert (config.progress_timeout, config.jitter_factor) == (7200, 0.25)
    assert (config.retry_delay_base, config.retry_delay_max) == (0.5, 10.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("progress_timeout", 0),
        ("progress_timeout", float("nan")),
        ("retry_delay_base", 0.0),
        ("retry_delay_base", -1.0),
        ("retry_delay_max", 0.1),
        ("retry_delay_max", float("nan")),
        ("jitter_factor", -0.1),
        ("jitter_factor", 1.5),
        ("jitter_factor", float("nan")),
        ("max_connections", 0),
        ("max_connections", True),
        ("max_retries", -1),
        ("max_retries", True),
        ("enable_retry_logic", "yes"),
        ("enable_stuck_detection", 1),
        ("jitter_factor", "0.1"),
        ("max_retries", "3"),
        ("max_retries", 1.5),
        ("max_connections", 1.5),
        ("progress_timeout", "5"),
        ("retry_delay_base", True),
    ],
)
def test_invalid_retry_config_is_refused(field, value):
    with pytest.raises(InvalidInputError) as refused:
        RetryConfig(**{field: value})
    assert refused.value.field == field


def test_retry_config_limits_may_be_none():
    config = RetryConfig(max_connections=None, max_retries=0, jitter_factor=0, retry_delay_max=0.5)
    assert config.max_connections is None


@pytest.mark.parametrize("error", [APITimeoutError(), APIConnectionError(), failure(410)])
def test_sample_is_retried_after_lost_connection_or_lost_result(error):
    assert sample_wait(error, 10_000) == 10.0


@pytest.mark.parametrize("status", RETRYABLE)
def test_sample_is_retried_after_temporary_status(status):
    assert sample_wait(failure(status)) == 0.5


@pytest.mark.parametrize(
    "error", [failure(400), failure(404), RequestFailedError("no"), InvalidInputError("no")]
)
def test_refused_sample_is_not_retried(error):
    assert sample_wait(error) is None


def test_sample_retries_can_be_limited_or_disabled():
    assert sample_wait(failure(503), 1, max_retries=2) == 1.0
    assert sample_wait(failure(503), 2, max_retries=2) is None
    assert sample_wait(failure(503), enable_retry_logic=False) is None


def test_sample_waits_while_account_is_unpaid():
    policy = SampleRetryPolicy(RetryConfig(enable_retry_logic=False, max_retries=0), 3600.0)
    assert wait(failure(402), 719, 3595.0, policy=policy) == 5.0
    assert wait(failure(402), 720, 3596.0, policy=policy) is None


def test_retry_config_fields_can_be_assigned():
    config = RetryConfig()
    config.progress_timeout = 60
    assert config == RetryConfig(progress_timeout=60)
    assert hash(config) == hash(RetryConfig(progress_timeout=60))


class ForeignError(Exception):
    pass


def test_foreign_exceptions_can_be_declared_retryable():
    assert sample_wait(ForeignError(), retryable_exceptions=(ForeignError,)) == 0.5
    assert sample_wait(ForeignError()) is None
    assert HTTPRetryPolicy().wait_before_retry(ForeignError(), Tried(0)) is None


def test_more_api_errors_can_be_declared_retryable():
    chosen = (BadRequestError,)
    assert sample_wait(failure(400), retryable_exceptions=chosen) == 0.5
    assert sample_wait(GoneError("gone"), retryable_exceptions=chosen) is None
    assert sample_wait(InternalServerError("no"), retryable_exceptions=()) == 0.5


@given(st.integers(0, 5000), chances, st.floats(0, 1), st.floats(0.01, 100), st.floats(1, 100))
def test_sample_wait_is_capped_exponential_with_jitter(attempt, chance, jitter, base, factor):
    most = base * factor
    waited = sample_wait(
        APIConnectionError(),
        attempt,
        chance,
        retry_delay_base=base,
        retry_delay_max=most,
        jitter_factor=jitter,
    )
    full = min(base * 2.0 ** min(attempt, 32), most)
    assert 0 <= waited <= most
    rounding = full * 1e-9
    assert full * (1 - jitter) - rounding <= waited <= full * (1 + jitter) + rounding
