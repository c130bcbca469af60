"""When an open page hears of changes: together, soon after a step, and not more often than it can be drawn."""

from __future__ import annotations

import asyncio

import pytest

from tinkex.errors import RateLimitError
from tinkex.server.dashboard.live import BEAT, MAX_LISTENERS, SPACING, WAITS, Listener, Live


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
    listener.take()
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
    assert listener.take() == {"run": {"state", "metrics"}}
    assert listener.take() == {}


def test_without_changes_there_is_a_beat(clock):
    listener = told(clock)
    assert listener.seconds_left() == pytest.approx(BEAT)


def test_a_new_step_is_sent_well_within_a_second():
    assert max(WAITS["metrics"], SPACING) < 0.8


async def _refused(pages):
    """How many of many pages that connect at the same time are refused."""
    live, stopping = Live(), asyncio.Event()
    asked = [live.listen("ann", None, dict, stopping) for _ in range(pages)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [each for each in answers if isinstance(each, RateLimitError)]
    for answer in answers:
        if answer not in refused:
            assert (await anext(answer)).startswith(b"event: hello")
            await answer.aclose()
    await live.listen("ann", None, dict, stopping)  # all others have left
    return len(refused)


def test_pages_that_connect_at_the_same_time_are_counted():
    assert asyncio.run(_refused(MAX_LISTENERS + 5)) == 5
