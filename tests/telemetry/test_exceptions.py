"""Whose fault an exception is, and reporting it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tinkex
from tinkex.errors import RequestErrorCategory
from tinkex.telemetry import capture_exceptions, with_telemetry
from tinkex.telemetry.exceptions import concerns_tinkex, user_error_in, without_keys


class Recorder:
    """A reporter that records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, BaseException, str]] = []

    def log_exception(self, error: BaseException, severity: str) -> bool:
        self.told.append(("exception", error, severity))
        return True

    def log_fatal_exception(self, error: BaseException, severity: str) -> bool:
        self.told.append(("fatal", error, severity))
        return True


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


class Foreign(Exception):
    """An error of another library, with attributes that the test chooses."""

    def __init__(self, **facts: Any) -> None:
        super().__init__("foreign")
        self.__dict__.update(facts)


# -- whose fault ---------------------------------------------------------------------------------

USERS = [
    tinkex.BadRequestError("bad"),
    tinkex.NotFoundError("none"),
    tinkex.InvalidInputError("bad", field="prompt"),
    tinkex.RequestFailedError("no", category=RequestErrorCategory.User),
    Foreign(status_code=422),
    Foreign(category="User"),
]
OTHERS = [
    tinkex.RateLimitError("later"),
    tinkex.InternalServerError("oops"),
    tinkex.APITimeoutError(),
    tinkex.RequestFailedError("no", category=RequestErrorCategory.Server),
    Foreign(status_code=408),
    Foreign(status_code=429),
    Foreign(status_code="400"),
    Foreign(category="server"),
    ZeroDivisionError(),
]


@pytest.mark.parametrize("error", USERS, ids=lambda error: type(error).__name__)
def test_user_errors_are_recognised(error):
    assert user_error_in(error) is error


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_are_not_user_errors(error):
    assert user_error_in(error) is None


def test_causes_are_searched_before_contexts():
    mistake = tinkex.BadRequestError("bad")
    assert user_error_in(raised(RuntimeError(), mistake)) is mistake
    assert user_error_in(raised(RuntimeError(), raised(KeyError(), mistake))) is mistake
    assert user_error_in(Foreign(reason=mistake)) is mistake
    later = RuntimeError("while handling it")
    later.__context__ = mistake
    assert user_error_in(later) is mistake
    later.__cause__ = nearer = tinkex.ConflictError("nearer")
    assert user_error_in(later) is nearer


def test_cyclic_exception_chain_ends():
    first, second = RuntimeError(), KeyError()
    first.__cause__, second.__context__ = second, first
    assert user_error_in(first) is None


def test_exceptions_through_tinkex_are_recognised_by_their_frames():
    with pytest.raises(tinkex.InvalidInputError) as ours:
        tinkex.ModelInput.from_text(3, None)  # type: ignore[arg-type]
    assert concerns_tinkex(ours.value)
    assert concerns_tinkex(raised(RuntimeError(), ours.value))
    assert not concerns_tinkex(raised(ZeroDivisionError()))


def test_keys_are_removed_from_texts():
    assert without_keys("api_key='tml-abc_1.2', html-x") == "api_key='[REDACTED]', html-x"
    assert without_keys("token eyJhbGciOi.JIUzI") == "token [REDACTED]"


# -- catching ------------------------------------------------------------------------------------


def test_a_block_reports_and_raises():
    recorder = Recorder()
    error = RuntimeError("broken")
    with pytest.raises(RuntimeError), capture_exceptions(recorder):  # type: ignore[arg-type]
        raise error
    assert recorder.told == [("exception", error, "ERROR")]


def test_a_decorated_function_reports_and_raises():
    recorder = Recorder()

    @with_telemetry(recorder, fatal=True, severity="CRITICAL")  # type: ignore[arg-type]
    def work(number: int, *, by: int = 0) -> float:
        """Divide."""
        return number / by

    assert work(4, by=2) == 2
    assert work.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        work(4)
    assert [(kind, severity) for kind, _, severity in recorder.told] == [("fatal", "CRITICAL")]


def test_a_decorated_coroutine_reports_and_raises():
    recorder = Recorder()

    @capture_exceptions(recorder)  # type: ignore[arg-type]
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        if number < 0:
            raise RuntimeError("broken")
        return number

    assert asyncio.run(work(3)) == 3
    with pytest.raises(RuntimeError):
        asyncio.run(work(-1))
    assert [kind for kind, _, _ in recorder.told] == ["exception"]


def test_without_reporter_or_error_nothing_happens():
    with capture_exceptions(None):
        pass
    with pytest.raises(RuntimeError), capture_exceptions(None, fatal=True):
        raise RuntimeError


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_exits_and_interrupts_are_not_reported(error):
    recorder = Recorder()
    with pytest.raises(type(error)), capture_exceptions(recorder):  # type: ignore[arg-type]
        raise error
    assert recorder.told == []
