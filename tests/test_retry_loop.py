"""The one retry loop, its table of statuses, and the loop in blocking code."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from tinkex._retry import (
    Clock,
    Every,
    NotYetError,
    exponential,
    full_jitter,
    retrying,
    run_blocking,
)
from tinkex._statuses import facts_of

from .scripted import FakeClock

SOURCE = Path(__file__).parents[1] / "src" / "tinkex"


def test_every_status_has_one_row_of_facts():
    passing = {status for status in range(100, 600) if facts_of(status).may_pass}
    assert passing == {408, 409, 425, 429, *range(500, 600)}
    refused = {status for status in range(100, 600) if facts_of(status).user_fault}
    assert refused == set(range(400, 500)) - {408, 410, 429}
    doubted = {status: facts_of(status).poll_doubts for status in range(100, 600)}
    assert {status: count for status, count in doubted.items() if count} == {400: 3, 409: 5, 410: 5}
    assert not facts_of(None).may_pass


def test_exponential_never_overflows():
    assert [exponential(repeats, 0.5, 10) for repeats in (0, 1, 4, 5, 10**9)] == [0.5, 1, 8, 10, 10]


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.999])
def test_full_jitter_is_above_zero_and_at_most_the_wait(chance):
    assert 0 < full_jitter(4.0, chance) <= 4.0


def test_every_polls_until_the_result_is_ready_and_raises_other_errors():
    clock, answers = FakeClock(), [NotYetError(), NotYetError(), "ready"]

    async def once(attempt: int) -> str:
        answer = answers[attempt]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert asyncio.run(retrying(once, Every(5.0), clock)) == "ready"
    assert clock.slept == [5.0, 5.0]
    answers[0] = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        asyncio.run(retrying(once, Every(5.0), clock))


def test_the_loop_runs_in_blocking_code_without_an_event_loop():
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def once(attempt: int) -> int:
        if attempt < 3:
            raise NotYetError
        return attempt

    assert run_blocking(retrying(once, Every(2.0), Clock(sleep=sleep))) == 3
    assert waits == [2.0] * 3


def test_blocking_code_cannot_wait_for_an_event_loop():
    with pytest.raises(RuntimeError, match="event loop"):
        run_blocking(asyncio.sleep(1))


#: Modules with periodic work or waits that are not retries: heartbeats, telemetry rounds, budgets, progress bars.
PERIODIC = {
    "_client/heartbeat.py",
    "_client/session.py",
    "_client/auth.py",
    "_client/budget.py",
    "telemetry/reporter.py",
    "telemetry/progress.py",
    "recovery/autosave.py",
}


def test_no_other_loop_of_the_client_sleeps_between_tries():
    found = set()
    for folder in ("_client", "telemetry", "recovery", "_wire"):
        for file in (SOURCE / folder).rglob("*.py"):
            for loop in ast.walk(ast.parse(file.read_text())):
                if isinstance(loop, ast.While | ast.For | ast.AsyncFor) and _sleeps(loop):
                    found.add(str(file.relative_to(SOURCE)))
    assert found <= PERIODIC


def _sleeps(loop: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) == "sleep"
        for node in ast.walk(loop)
    )
