"""Functions on threads that can be abandoned."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from textwrap import dedent

import pytest

from tinkex.errors import InvalidInputError
from tinkex.regularizers.executor import Executor, start

from ..late import only_late


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set at the end of the test; a function that waits for it does not return before."""
    event = threading.Event()
    yield event
    event.set()


def results(executor, *works):
    return [outcome.result for outcome in executor.run(works)]


@pytest.mark.parametrize("parallel", [True, False])
def test_outcomes_come_in_the_order_of_the_functions(parallel):
    executor = Executor(parallel=parallel, max_concurrency=2)
    assert results(executor, *(lambda n=n: n * n for n in range(7))) == [n * n for n in range(7)]
    assert results(executor) == []


def test_functions_run_in_parallel():
    together = threading.Barrier(3)
    executor = Executor(timeout=10, max_concurrency=3)
    assert sorted(results(executor, *[together.wait] * 3)) == [0, 1, 2]


def test_no_more_than_the_limit_run_at_once():
    lock, pairs = threading.Lock(), threading.Barrier(2)
    running, most = 0, 0

    def count() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait(10)  # both worker threads are busy now
        with lock:
            running -= 1

    list(Executor(max_concurrency=2).run([count] * 8))
    assert most == 2


def test_an_error_is_an_outcome():
    def fail() -> None:
        raise KeyError("mine")

    first, second = Executor().run([fail, lambda: 2])
    assert isinstance(first.error, KeyError)
    assert second.result == 2


@pytest.mark.parametrize("parallel", [True, False])
def test_function_that_never_returns_times_out(over, parallel, monkeypatch):
    only_late(monkeypatch, 0)
    executor = Executor(parallel=parallel, timeout=0.05, max_concurrency=2)
    late, good = executor.run([over.wait, lambda: 1])
    assert (late.result, late.error, good.result) == (None, None, 1)


def test_abandoned_function_does_not_use_a_slot(over, monkeypatch):
    only_late(monkeypatch, 0, 2)
    executor = Executor(timeout=0.05, max_concurrency=1)
    assert results(executor, over.wait, lambda: 1, over.wait, lambda: 2) == [None, 1, None, 2]


def test_no_function_starts_after_the_caller_stops_iterating():
    begun: list[int] = []
    outcomes = Executor(parallel=False).run([partial(begun.append, n) for n in range(3)])
    next(outcomes)
    outcomes.close()
    assert begun == [0]


def test_function_runs_in_the_context_of_the_caller():
    variable: ContextVar[str] = ContextVar("variable", default="nothing")
    variable.set("mine")
    assert results(Executor(), variable.get, variable.get) == ["mine", "mine"]
    assert start(variable.get).result(10) == "mine"


def test_a_thread_that_never_returns_does_not_hold_up_the_end_of_the_program():
    script = """
        import threading
        from tinkex.regularizers.executor import Executor
        never = threading.Event().wait
        print([outcome.result for outcome in Executor(timeout=0.01).run([never] * 3)])
    """
    command = [sys.executable, "-c", dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[None, None, None]\n"


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1.0}, {"max_concurrency": 0}])
def test_invalid_limits_are_refused(options):
    with pytest.raises(InvalidInputError) as caught:
        Executor(**options)
    assert [caught.value.field] == list(options)
