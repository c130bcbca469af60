"""When an engine counts as stuck."""

from __future__ import annotations

from math import inf

import pytest

from tinkex.engine.progress import IDLE, SAMPLING, UNTIMED
from tinkex.server.watch import Watch


def looks(watch: Watch, progress, count: int, *, waiting: bool = True, start: float = 0.0) -> bool:
    """Look this many times at the same progress, at the watch's interval; return the last answer."""
    overdue = False
    for number in range(count):
        overdue = watch.look(progress, waiting=waiting, now=start + number * watch.interval)
    return overdue


@pytest.mark.parametrize("work", [7, SAMPLING])
def test_work_that_does_not_change_for_the_deadline_is_stuck(work):
    watch = Watch(10.0)
    assert not looks(watch, (1, work), 11)
    assert watch.silent == 10.0
    assert looks(watch, (1, work), 1, start=11.0)


def test_progress_restarts_the_deadline():
    watch = Watch(10.0)
    assert not any(
        watch.look((number // 9, 7), waiting=True, now=float(number)) for number in range(100)
    )


def test_an_idle_engine_that_ignores_a_call_is_stuck():
    assert looks(Watch(10.0), (1, IDLE), 12)
    assert not looks(Watch(10.0), (1, IDLE), 100, waiting=False)


def test_waiting_counts_from_the_first_look_with_a_waiting_call():
    watch = Watch(10.0)
    looks(watch, (1, IDLE), 100, waiting=False)
    assert not looks(watch, (1, IDLE), 10, start=100.0)


def test_work_without_a_deadline_is_never_stuck():
    assert not looks(Watch(10.0), (1, UNTIMED), 1000)
    assert not looks(Watch(inf), (1, 7), 1000)


def test_a_pause_of_the_whole_machine_does_not_count_as_stuck():
    watch = Watch(10.0)
    watch.look((1, 7), waiting=True, now=0.0)
    assert not watch.look((1, 7), waiting=True, now=3600.0)
    assert watch.silent == 2.0
