"""When an open page hears of changes: together, soon after a step, and not more often than it can be drawn."""

from __future__ import annotations

import pytest

from tinkex.server.dashboard.live import BEAT, SPACING, STEADY, WAITS, Listener


@pytest.fixture
def clock():
    return Clock()


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def told(clock):
    """A listener that has just been told something."""
    listener = Listener(clock)
    listener.take(1)
    return listener


def test_a_step_after_a_pause_is_told_almost_at_once(clock):
    listener = told(clock)
    clock.pass_time(SPACING)
    listener.note("run", "metrics")
    assert listener.seconds_left() == pytest.approx(WAITS["metrics"])


def test_a_step_right_after_an_event_waits_for_the_spacing_and_no_longer(clock):
    listener = told(clock)
    listener.note("run", "metrics")
    clock.pass_time(SPACING / 2)
    listener.note("run", "metrics")  # the next step does not move it
    assert listener.seconds_left() == pytest.approx(SPACING / 2)
    clock.pass_time(SPACING / 2)
    assert listener.seconds_left() <= 0


def test_a_change_of_state_is_sent_with_the_metrics_of_its_step(clock):
    listener = told(clock)
    clock.pass_time(SPACING)
    listener.note("run", "state")
    assert listener.seconds_left() == pytest.approx(WAITS["state"])
    clock.pass_time(WAITS["state"] / 2)
    listener.note("run", "metrics")
    assert listener.seconds_left() == pytest.approx(WAITS["metrics"])
    assert listener.take(1) == {"run": {"state", "metrics"}}
    assert listener.take(1) == {}


def test_between_two_steps_of_a_run_its_state_is_not_sent_alone(clock):
    listener = told(clock)
    listener.note("run", "metrics")
    listener.take(1)
    listener.note("run", "state")  # the requests of the next step
    assert listener.seconds_left() == pytest.approx(STEADY)
    clock.pass_time(2.0)
    listener.note("run", "metrics")
    assert listener.seconds_left() == pytest.approx(WAITS["metrics"])
    assert listener.take(1) == {"run": {"state", "metrics"}}


def test_the_state_of_another_run_does_not_wait_for_the_steps_of_this_one(clock):
    listener = told(clock)
    listener.note("run", "metrics")
    listener.take(1)
    listener.note("run", "state")
    listener.note("other", "state")
    assert listener.seconds_left() == pytest.approx(WAITS["state"])


def test_the_state_of_a_run_that_stopped_making_steps_is_sent_soon(clock):
    listener = told(clock)
    listener.note("run", "metrics")
    listener.take(1)
    clock.pass_time(STEADY)
    listener.note("run", "state")
    assert listener.seconds_left() == pytest.approx(WAITS["state"])


def test_without_changes_there_is_a_beat(clock):
    listener = told(clock)
    assert listener.seconds_left() == pytest.approx(BEAT)


def test_a_new_step_is_sent_well_within_a_second():
    assert max(WAITS["metrics"], SPACING) < 0.8


def test_runs_beyond_the_most_of_one_event_are_due_with_the_next(clock):
    listener = told(clock)
    for run_id in ("one", "two", "three"):
        listener.note(run_id, "metrics")
    clock.pass_time(SPACING)
    assert listener.take(2) == {"one": {"metrics"}, "two": {"metrics"}}
    assert listener.seconds_left() == pytest.approx(SPACING)
    assert listener.take(2) == {"three": {"metrics"}}
    assert listener.seconds_left() == pytest.approx(BEAT)
