"""When an open page hears of changes: together, soon after a step, and not more often than it can be drawn."""

from __future__ import annotations

import asyncio
from itertools import chain

import orjson
import pytest

from tinkex.server.dashboard import live as live_module
from tinkex.server.dashboard.growth import MOST_ROWS, MOST_VALUES, Growth, growth_of
from tinkex.server.dashboard.live import BEAT, SPACING, STEADY, WAITS, Listener, Live
from tinkex.server.dashboard.store import MetricPoint, Written


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


def taken(listener, most=1):
    """What is sent now: by run, what changed."""
    return {run: change.what for run, change in listener.take(most).items()}


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
    assert taken(listener) == {"run": {"state", "metrics"}}
    assert taken(listener) == {}


def test_between_two_steps_of_a_run_its_state_is_not_sent_alone(clock):
    listener = told(clock)
    listener.note("run", "metrics")
    listener.take(1)
    listener.note("run", "state")  # the requests of the next step
    assert listener.seconds_left() == pytest.approx(STEADY)
    clock.pass_time(2.0)
    listener.note("run", "metrics")
    assert listener.seconds_left() == pytest.approx(WAITS["metrics"])
    assert taken(listener) == {"run": {"state", "metrics"}}


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


def test_a_new_step_is_sent_within_a_second_with_time_left_to_draw_it():
    assert max(WAITS["metrics"], SPACING) <= 0.8


def test_of_two_fast_steps_the_first_waits_for_the_second(clock):
    listener = told(clock)
    clock.pass_time(SPACING)
    interval, sent_after = SPACING - 0.1, []
    for step in range(6):
        listener.note("run", "metrics")
        waits = min(listener.seconds_left(), interval)
        clock.pass_time(waits)
        if waits < interval:  # it is sent before the next step
            listener.take(1)
            sent_after.append(step)
        clock.pass_time(interval - waits)
    assert sent_after == [0, 2, 4]


def test_a_step_never_waits_longer_than_the_spacing(clock):
    listener = told(clock)
    for _ in range(100):
        clock.pass_time(0.05)
        if listener.seconds_left() <= 0:
            listener.take(1)
        listener.note("run", "metrics")
        assert listener.seconds_left() <= SPACING


def test_a_step_after_slow_ones_does_not_wait_for_another(clock):
    listener = told(clock)
    for _ in range(3):
        clock.pass_time(SPACING + 0.1)
        listener.note("run", "metrics")
        assert listener.seconds_left() == pytest.approx(WAITS["metrics"])
        listener.take(1)


def test_runs_beyond_the_most_of_one_event_are_due_with_the_next(clock):
    listener = told(clock)
    for run_id in ("one", "two", "three"):
        listener.note(run_id, "metrics")
    clock.pass_time(SPACING)
    assert taken(listener, 2) == {"one": {"metrics"}, "two": {"metrics"}}
    assert listener.seconds_left() == pytest.approx(SPACING)
    assert taken(listener, 2) == {"three": {"metrics"}}
    assert listener.seconds_left() == pytest.approx(BEAT)


# -- the points that events carry ----------------------------------------------------------------------


def point(name, step, value, time=5.0):
    return MetricPoint(name, step, step * 10.0, time, value)


def rows(change):
    return orjson.loads(orjson.dumps(change.rows))


def grown(*points, **before):
    found = growth_of(Written(points, before))
    assert found is not None
    return found


def test_values_of_a_step_are_one_row_and_numbered_within_their_metric():
    growth = grown(point("a", 7, 0.5), point("b", 7, 1.5), point("a", 8, 0.25), a=6, b=0)
    assert growth.values == 3
    assert orjson.loads(orjson.dumps(growth.rows)) == [
        {"step": 7.0, "tokens": 70.0, "time": 5.0, "values": {"a": [6, 0.5], "b": [0, 1.5]}},
        {"step": 8.0, "tokens": 80.0, "time": 5.0, "values": {"a": [7, 0.25]}},
    ]


def test_values_that_are_not_finite_are_words():
    growth = grown(
        *(point(name, 1, float(name)) for name in ("nan", "inf", "-inf")),
        nan=0,
        inf=0,
        **{"-inf": 0},
    )
    values = orjson.loads(orjson.dumps(growth.rows))[0]["values"]
    assert values == {"nan": [0, "nan"], "inf": [0, "inf"], "-inf": [0, "-inf"]}


def test_two_values_of_a_metric_at_one_place_are_two_rows():
    growth = grown(point("a", 1, 1.0), point("a", 1, 2.0), a=0)
    found = orjson.loads(orjson.dumps(growth.rows))
    assert [row["values"] for row in found] == [{"a": [0, 1.0]}, {"a": [1, 2.0]}]


def test_a_metric_that_its_run_had_no_room_for_is_left_out():
    assert grown(point("one too many", 1, 1.0)).rows == []


def test_points_of_several_steps_are_sent_once_and_in_order(clock):
    listener = told(clock)
    for number in range(3):
        listener.note("run", "metrics", grown(point("a", number, 1.0), a=number))
    listener.note("run", "state")
    assert [row["step"] for row in rows(listener.take(1)["run"])] == [0, 1, 2]
    listener.note("run", "metrics", grown(point("a", 3, 1.0), a=3))
    assert [row["step"] for row in rows(listener.take(1)["run"])] == [3]


def test_a_page_reads_the_curves_of_a_run_with_too_many_new_points(clock):
    many = [point("a", step, 1.0) for step in range(MOST_VALUES + 1)]
    assert growth_of(Written(many, {"a": 0})) is None
    listener = told(clock)
    half = Growth(values=MOST_VALUES // 2 + 1)
    listener.note("one", "metrics", half)
    listener.note("two", "metrics", half)
    listener.note("three", "metrics", grown(point("a", 0, 1.0), a=0))
    listener.note("two", "metrics", grown(point("a", 0, 1.0), a=0))  # too late: some are missing
    sent = listener.take(3)
    assert [sent[run].rows is None for run in ("one", "two", "three")] == [False, True, False]
    listener.note("two", "metrics", half)
    assert listener.take(1)["two"].rows is not None


def test_a_page_reads_the_curves_of_a_run_with_more_new_steps_than_a_plot_has_room_for(clock):
    steps = [point("a", step, 1.0) for step in range(MOST_ROWS + 1)]
    assert growth_of(Written(steps, {"a": 0})) is None
    assert growth_of(Written([point("a", 1, 1.0)] * (MOST_ROWS + 1), {"a": 0})) is None
    assert grown(*steps[1:], a=0).values == MOST_ROWS
    listener = told(clock)
    for number in range(MOST_ROWS):
        listener.note("run", "metrics", grown(point("a", number, 1.0), a=number))
    listener.note("other", "metrics", grown(point("a", 0, 1.0), a=0))
    listener.note("run", "metrics", grown(point("a", MOST_ROWS, 1.0), a=MOST_ROWS))
    sent = listener.take(2)
    assert (sent["run"].rows, len(rows(sent["other"]))) == (None, 1)


def test_a_page_reads_curves_that_were_replaced(clock):
    listener = told(clock)
    listener.note("run", "metrics", grown(point("a", 0, 1.0), a=0))
    listener.note("run", "metrics", None)
    listener.note("run", "metrics", grown(point("a", 0, 2.0), a=0))
    assert listener.take(1)["run"].rows is None


def test_runs_whose_state_may_change_unasked_are_described_in_turns(monkeypatch):
    monkeypatch.setattr(live_module, "BEAT", 0.0)
    monkeypatch.setattr(live_module, "SPACING", 0.0)
    runs = [f"run {number}" for number in range(500)]
    described = []

    async def describe(run_ids):
        described.append(run_ids)
        return [{"id": run_id, "state": {"kind": "idle"}} for run_id in run_ids]

    async def go():
        events, leave = Live().listen("ann", describe, dict, lambda: len(described) == 5, runs)
        async for _ in events:
            pass
        leave()

    asyncio.run(go())
    assert list(chain(*described)) == runs + runs


def test_points_are_not_even_looked_at_while_no_page_is_open():
    class Untouched(Written):
        def __getattribute__(self, name):
            raise AssertionError(name)

    Live().metrics_written("ann", "run", Untouched([], {}))
