"""Metrics on disk: every point is kept, plots are bounded, no extreme is lost, and a crash costs at most a record."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import InvalidInputError, RateLimitError
from tinkex.server.dashboard import store as store_module
from tinkex.server.dashboard.columns import FANOUT, Column
from tinkex.server.dashboard.store import MetricPoint, MetricStore, RunMetrics, Written, check_name
from tinkex.server.dashboard.thinning import AXES, POINT, points_as_buckets, thinned
from tinkex.server.quotas import KeyLimits, Quotas

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def points(values, steps=None):
    found = np.zeros(len(values), POINT)
    found["step"] = np.arange(len(values)) if steps is None else steps
    found["tokens"] = found["step"] * 10
    found["time"] = found["step"] + 1e9
    found["value"] = values
    return found


def column(tmp_path, values, batch=1000):
    made = Column(tmp_path / "0")
    everything = points(values)
    for start in range(0, len(values), batch):
        made.append(everything[start : start + batch])
    return made


@settings(max_examples=200, deadline=None)
@given(
    st.lists(FLOATS, min_size=1, max_size=300),
    st.integers(2, 40),
    st.sampled_from(AXES),
    st.booleans(),
)
def test_thinning_keeps_extremes_counts_and_order(values, width, axis, shuffled):
    given_points = points(values)
    if shuffled:
        np.random.default_rng(len(values)).shuffle(given_points)
    found = thinned(points_as_buckets(given_points), axis, width)
    assert 1 <= len(found) <= max(width, 1)
    assert np.all(np.diff(found[f"{axis}_from"]) >= 0)
    numbers = np.array(values)
    finite = numbers[np.isfinite(numbers)]
    assert found["finite"].sum() == len(finite)
    assert found["nan"].sum() == np.isnan(numbers).sum()
    assert found["above"].sum() == (numbers == math.inf).sum()
    assert found["below"].sum() == (numbers == -math.inf).sum()
    if len(finite):
        assert found["low"].min() == finite.min()
        assert found["high"].max() == finite.max()


@pytest.mark.parametrize("count", [1, FANOUT - 1, FANOUT, FANOUT + 1, FANOUT**2 + 70, 20_000])
def test_a_column_of_any_length_has_all_points_in_its_plot(tmp_path, count):
    values = np.sin(np.arange(count))
    made = column(tmp_path, values, batch=777)
    found = made.read("step", None, None, 100)[0]
    assert made.count == count
    assert len(found) <= 100
    assert found["finite"].sum() == count
    assert found["low"].min() == values.min()
    assert found["high"].max() == values.max()
    assert found["step_to"].max() == count - 1
    assert np.isclose(found["total"].sum(), values.sum())


def test_a_single_spike_among_a_hundred_thousand_steps_is_in_the_plot(tmp_path):
    values = np.ones(100_000)
    values[54_321] = 99.0
    found = column(tmp_path, values, 50_000).read("step", None, None, 300)[0]
    spiked = found[found["high"] == 99.0]
    assert len(spiked) == 1
    assert spiked["step_from"][0] <= 54_321 <= spiked["step_to"][0]


def test_a_short_range_of_a_long_column_is_exact(tmp_path):
    values = np.arange(50_000, dtype=float)
    found = column(tmp_path, values, 50_000).read("tokens", 123_450, 123_990, 200)[0]
    assert found["low"].tolist() == found["high"].tolist() == values[12_345:12_400].tolist()


def test_values_that_are_not_finite_are_counted_and_do_not_hide_others(tmp_path):
    values = [1.0, math.nan, math.inf, -math.inf, 2.0] * 100
    found = column(tmp_path, values).read("step", None, None, 10)[0]
    assert found["nan"].sum() == found["above"].sum() == found["below"].sum() == 100
    assert (found["low"].min(), found["high"].max()) == (1.0, 2.0)


def test_reading_looks_at_few_records_however_long_the_column_is(tmp_path, monkeypatch):
    made = column(tmp_path, np.zeros(300_000), 100_000)
    read = []
    at = Column._at

    def counted(self, level, places, counts):
        read.append(len(places))
        return at(self, level, places, counts)

    monkeypatch.setattr(Column, "_at", counted)
    made.read("step", None, None, 100)
    made.read("step", 1_000, 250_000, 100)
    assert sum(read) < 40_000


@pytest.mark.parametrize("count", [1_000, 30_000, 200_000])
def test_a_plot_is_as_fine_as_its_width(tmp_path, count):
    made = column(tmp_path, np.arange(float(count)), 100_000)
    assert len(made.read("step", None, None, 300)[0]) >= 250
    assert len(made.read("step", count / 4, count / 2, 200)[0]) >= 150


# -- crashes -------------------------------------------------------------------------------------------


def test_an_incomplete_record_is_dropped_and_appending_continues(tmp_path):
    column(tmp_path, np.arange(200.0))
    with (tmp_path / "0.0").open("ab") as file:
        file.write(b"half a record")
    again = Column(tmp_path / "0")
    assert again.count == 200
    again.append(points([7.0], [200]))
    last = Column(tmp_path / "0").last()
    assert last is not None
    assert last["value"] == 7.0


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_buckets_that_do_not_fit_their_points_are_made_again(tmp_path, damage):
    values = np.arange(FANOUT**2 + 100.0)
    whole = column(tmp_path, values).read("step", None, None, 50)[0]
    level = tmp_path / "0.1"
    if damage == "missing":
        level.unlink()
        (tmp_path / "0.2").unlink()
    elif damage == "short":
        level.write_bytes(level.read_bytes()[:1000])
    else:
        level.write_bytes(level.read_bytes() * 2)
    found = Column(tmp_path / "0").read("step", None, None, 50)[0]
    assert found.tobytes() == whole.tobytes()


def test_a_write_that_failed_halfway_is_overwritten_by_the_next(tmp_path):
    made = column(tmp_path, [1.0, 2.0])
    with (tmp_path / "0.0").open("ab") as file:
        file.write(b"\xff" * 50)  # as a full disk leaves it, while the service goes on
    made.append(points([3.0, 4.0], [2, 3]))
    assert made.read("step", None, None, 10)[0]["low"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_file_of_names_that_is_damaged_costs_the_metrics_but_not_the_run(tmp_path):
    run = RunMetrics(tmp_path)
    run.append([MetricPoint("loss", 1, 1, 1, 0.5)])
    assert RunMetrics(tmp_path).names == ["loss"]
    (tmp_path / "names.json").write_bytes(b"[")
    assert RunMetrics(tmp_path).names == []


# -- the store -----------------------------------------------------------------------------------------


def store(tmp_path, **limits):
    return MetricStore(tmp_path, Quotas.of(KeyLimits(**limits)).metric_bytes)


def test_points_can_be_read_after_a_restart_and_are_counted(tmp_path):
    async def go():
        first = store(tmp_path)
        told = []
        first.on_written.append(lambda *what: told.append(what))
        first.add("ann", "a:train:0", [MetricPoint("loss", 1, 10, 5, 0.5)], {"steps": 1})
        assert first.state("ann", "a:train:0") == {"steps": 1}
        await first.stop()
        point = MetricPoint("loss", 1, 10, 5, 0.5)
        assert told == [("ann", "a:train:0", Written([point], {"loss": 0}))]
        again = store(tmp_path)
        await again.restore()
        assert again.run("ann", "a:train:0").last("loss")["value"] == 0.5
        assert again.state("ann", "a:train:0") == {"steps": 1}
        assert again.run("bob", "a:train:0").names == []
        with pytest.raises(RateLimitError):
            again.check_room("ann", 20 << 30)
        again.check_room("bob", 20 << 30)
        await again.stop()

    asyncio.run(go())


def test_a_metric_says_how_many_points_it_had_when_it_was_read(tmp_path):
    run = RunMetrics(tmp_path)
    for step in range(100):
        written = run.append([MetricPoint("loss", step, 1, 1, 0.5)])
        assert written.before == {"loss": step}
    found = run.read("loss", "step", 10, 20, 5)
    assert found is not None
    assert (len(found[0]) <= 5, found[1]) == (True, 100)
    assert run.read("other", "step", None, None, 5) is None


def test_a_run_that_is_read_while_it_is_deleted_begins_anew(tmp_path, monkeypatch, caplog):
    reads = []

    async def go():
        made = store(tmp_path)
        made.add("ann", "run", [MetricPoint("loss", step, 0, 0, 1.0) for step in range(5)])
        await made.flush()
        before, remove = made.run("ann", "run"), store_module._removed

        def read_and_remove(directory):
            reads.append(made.run("ann", "run").last("loss"))  # as an open page does
            return remove(directory)

        monkeypatch.setattr(store_module, "_removed", read_and_remove)
        assert await made.delete("ann", "run") == 5 * POINT.itemsize
        assert before.last("loss") is None
        assert before.read("loss", "step", None, None, 100) is None
        made.add("ann", "run", [MetricPoint("loss", 9, 0, 0, 2.0)])
        await made.flush()
        found = made.run("ann", "run").read("loss", "step", None, None, 100)
        assert found is not None
        assert (found[0]["step_to"].tolist(), found[1]) == ([9.0], 1)
        assert (
            before.last("loss") is None
        )  # its five points are gone, and the files are there again
        await made.stop()

    asyncio.run(go())
    assert reads == [None]
    assert caplog.records == []


def test_runs_used_last_stay_open_and_others_are_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_OPEN", 3)

    async def go():
        made, before = store(tmp_path), []
        made.on_written.append(lambda _owner, _run, written: before.append(written.before["loss"]))
        for step in range(2):
            for number in range(10):
                made.add("ann", f"run-{number}", [MetricPoint("loss", step, 0, 0, 1.0)])
                await made.flush()
        assert before == [0] * 10 + [1] * 10
        assert all(made.run("ann", f"run-{number}").count("loss") == 2 for number in range(10))
        assert list(made._runs) == [("ann", f"run-{number}") for number in (7, 8, 9)]
        await made.stop()

    asyncio.run(go())


def test_a_run_in_use_is_never_opened_twice(tmp_path, monkeypatch):
    """A second one would not know what the first one writes, and write over it."""
    monkeypatch.setattr(store_module, "MAX_OPEN", 1)

    async def go():
        made = store(tmp_path)
        used = made.run("ann", "used")
        for number in range(5):
            made.run("ann", f"run-{number}")
        assert made.run("ann", "used") is used
        made.run("ann", "other")
        await made.delete("ann", "used")
        assert used.deleted
        assert made.run("ann", "used") is not used
        await made.stop()

    asyncio.run(go())


def test_the_state_of_a_run_is_read_from_what_is_being_written(tmp_path):
    async def go():
        made, go_on = store(tmp_path), threading.Event()
        slow = asyncio.ensure_future(made.in_thread(go_on.wait))
        made.add("ann", "run", (), {"steps": 1})
        await asyncio.sleep(0)
        assert not made._next.runs  # its write waits for the thread
        assert made.state("ann", "run") == {"steps": 1}
        made.add("ann", "run", (), {"steps": 2})
        assert made.state("ann", "run") == {"steps": 2}
        go_on.set()
        await slow
        await made.stop()
        assert made.state("ann", "run") == {"steps": 2}

    asyncio.run(go())


def test_flush_does_not_wait_for_points_that_come_meanwhile(tmp_path):
    async def go():
        made = store(tmp_path)
        steps = iter(range(1_000))
        # On the event loop: the thread that writes may be one point further.
        announced: list[float] = []

        def add():
            made.add("ann", "run", [MetricPoint("loss", next(steps), 0, 0, 1.0)])

        def announce(_owner, _run, written):
            announced.extend(point.step for point in written.points)
            add()  # there is always something that waits

        made.on_written.append(announce)
        add()
        async with asyncio.timeout(60):
            await made.flush()
            assert announced == [0]
            await made.flush()
            assert announced == [0, 1]
        made.on_written.clear()
        await made.stop()
        assert made.run("ann", "run").count("loss") == next(steps)

    asyncio.run(go())


def test_an_error_of_who_is_told_of_points_stops_neither_writing_nor_flushing(tmp_path):
    async def go():
        made = store(tmp_path)

        def fail(*_):
            made.add("ann", "run", [MetricPoint("loss", 2, 0, 0, 1.0)])
            made.on_written.clear()
            raise LookupError

        made.on_written.append(fail)
        made.add("ann", "run", [MetricPoint("loss", 1, 0, 0, 1.0)])
        async with asyncio.timeout(60):
            await made.flush()
            await made.stop()
        assert made.run("ann", "run").count("loss") == 2

    asyncio.run(go())


def test_damage_of_a_metric_is_logged_once_and_costs_no_other_metric(tmp_path, caplog):
    run = RunMetrics(tmp_path)
    run.append([MetricPoint(name, step, 0, 0, 1.0) for step in range(9) for name in ("a", "b")])
    (tmp_path / "0.0").write_bytes(b"")
    for _ in range(2):
        assert run.last("a") is None
        assert run.read("a", "step", None, None, 100) is None
    assert run.last("b") is not None
    assert [record.args[0] for record in caplog.records] == ["a"]


def test_what_a_killed_service_was_deleting_is_gone_and_not_counted(tmp_path):
    async def go():
        first = store(tmp_path)
        first.add("ann", "run", [MetricPoint("loss", 1, 0, 0, 1.0)])
        await first.stop()
        first.directory("ann", "run").rename(tmp_path / "of-ann" / ".deleted-0")
        again = store(tmp_path, metric_bytes=POINT.itemsize)
        await again.restore()
        again.check_room("ann", POINT.itemsize)
        await again.stop()

    asyncio.run(go())
    assert list((tmp_path / "of-ann").iterdir()) == []


def test_a_key_at_its_limit_keeps_what_it_has_and_is_warned_once(tmp_path, caplog):
    async def go():
        made = store(tmp_path, metric_bytes=100)
        for step in range(10):
            made.add("ann", "run", [MetricPoint("loss", step, 0, 0, 1.0)])
            await made.flush()
        assert made.run("ann", "run").count("loss") == 3
        await made.stop()

    asyncio.run(go())
    assert [record.message for record in caplog.records if "metric_bytes" in record.message] == [
        caplog.records[0].message
    ]


@pytest.mark.parametrize("name", ["", "a\nb", "\x00", "x" * 201])
def test_names_that_cannot_be_shown_are_refused(name):
    with pytest.raises(InvalidInputError, match="metrics"):
        check_name(name, "metrics")
