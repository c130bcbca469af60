"""The progress display, on a terminal and elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

import tinkex
from tinkex.errors import InvalidInputError
from tinkex.telemetry import bus
from tinkex.telemetry.events import QueueStateChange, SampleStop, TrainingPass, TrainingStep

from ..client.helpers import answer_training, datum, new_trainer


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def trained(tokens: int = 1000, loss: float | None = 2.5) -> None:
    bus.emit(TrainingPass(1, "forward_backward", 1.0, 4, tokens, loss))
    bus.emit(TrainingStep(2, "optim_step", 0.1, {}))


def test_line_shows_step_loss_speed_and_time_left():
    time = Time()
    with tinkex.progress(10, title="tuning", file=io.StringIO(), clock=time) as shown:
        assert shown.line == "tuning · step 0/10 · 0:00:00"
        time.now = 4.0
        trained()
        trained(loss=None)
        assert shown.line == "tuning · step 2/10 · loss 2.5 · 500 tok/s · 0:00:16 left"
        assert shown.fraction == 0.2


def test_samples_are_counted_too():
    time = Time()
    with tinkex.progress(samples=8, file=io.StringIO(), clock=time) as shown:
        time.now = 2.0
        bus.emit(SampleStop(1, "sample", 2.0, 10, 0, 100, 4))
        assert shown.line == "sample 4/8 · 50 tok/s · 0:00:02 left"
        bus.emit(SampleStop(1, "sample", 2.0, 10, 0, 100, 4))
        assert shown.line == "sample 8/8 · 100 tok/s · 0:00:02"


def test_resumed_loop_counts_from_its_done_steps():
    time = Time()
    with tinkex.progress(10, done=6, file=io.StringIO(), clock=time) as shown:
        assert shown.line == "step 6/10 · 0:00:00"
        time.now = 4.0
        trained(tokens=0)
        assert shown.line == "step 7/10 · loss 2.5 · 0:00:12 left"
        assert shown.fraction == 0.7


def test_note_is_shown_and_forward_does_not_change_the_loss():
    with tinkex.progress(2, file=io.StringIO(), clock=Time()) as shown:
        trained()
        bus.emit(TrainingPass(3, "forward", 1.0, 4, 10, 99.0))
        shown.note = "held out 1.25"
        assert shown.line == "step 1/2 · loss 2.5 · held out 1.25 · 0:00:00 left"


def test_without_totals_there_is_no_time_left():
    time = Time()
    with tinkex.progress(file=io.StringIO(), clock=time) as shown:
        trained(tokens=0)
        time.now = 61.0
        assert shown.fraction is None
        assert shown.line == "step 1 · loss 2.5 · 0:01:01"


def test_waiting_is_shown_until_the_next_event():
    with tinkex.progress(2, file=io.StringIO(), clock=Time()) as shown:
        bus.emit(QueueStateChange("r", "paused_capacity", "busy"))
        assert "waiting: busy" in shown.line
        bus.emit(QueueStateChange("r", "paused_rate_limit", None))
        assert "waiting: paused_rate_limit" in shown.line
        bus.emit(QueueStateChange("r", "active", None))
        assert "waiting" not in shown.line
        bus.emit(QueueStateChange("r", "paused_capacity", "busy"))
        trained()
        assert "waiting" not in shown.line


def test_without_a_terminal_lines_are_plain():
    time, file = Time(), io.StringIO()
    with tinkex.progress(4, file=file, clock=time) as shown:
        for _ in range(3):
            time.now += 8.0
            trained(tokens=0)
            shown.write()  # as its thread does every ten seconds
            shown.write()  # nothing has changed
        trained(tokens=0)
    assert file.getvalue().splitlines() == [
        "step 1/4 · loss 2.5 · 0:00:24 left",
        "step 2/4 · loss 2.5 · 0:00:16 left",
        "step 3/4 · loss 2.5 · 0:00:08 left",
        "step 4/4 · loss 2.5 · 0:00:24",
    ]


def test_the_last_line_is_not_repeated_when_only_time_has_passed():
    time, file = Time(), io.StringIO()
    with tinkex.progress(1, file=file, clock=time) as shown:
        trained()
        time.now = 1.0
        shown.write()
        time.now = 2.0
    assert file.getvalue() == "step 1/1 · loss 2.5 · 1.0k tok/s · 0:00:01\n"


def test_on_a_terminal_one_line_is_redrawn():
    file = Terminal()
    with tinkex.progress(2, file=file) as shown:
        trained()
        trained()
        last = shown.line
    assert "step 2/2" in last
    assert "step 2/2" in file.getvalue()
    assert "\x1b[" in file.getvalue()


def test_exception_ends_the_display_and_is_raised():
    file = Terminal()
    with pytest.raises(ZeroDivisionError), tinkex.progress(2, file=file):
        raise ZeroDivisionError
    assert not bus.wants(TrainingStep)


def test_a_closed_file_does_not_end_the_work():
    file = io.StringIO()
    with tinkex.progress(1, file=file):
        file.close()
        trained()


@pytest.mark.parametrize("field", ["steps", "samples"])
def test_totals_must_be_positive(field):
    with pytest.raises(InvalidInputError, match=field):
        tinkex.progress(**{field: 0})  # type: ignore[arg-type]


def test_a_training_loop_is_shown(server, service):
    answer_training(server)
    trainer = new_trainer(service())
    file = io.StringIO()
    with tinkex.progress(2, file=file) as shown:
        for _ in range(2):
            trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
            trainer.optim_step().result()
    assert (shown.steps, shown.tokens, shown.loss) == (2, 6, 1.0)
    assert file.getvalue().startswith("step 2/2 · loss 1")


def test_rich_is_loaded_for_a_terminal_only():
    script = """
import io, sys, tinkex
with tinkex.progress(1, file=io.StringIO()):
    pass
assert not any(name.partition('.')[0] == 'rich' for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
