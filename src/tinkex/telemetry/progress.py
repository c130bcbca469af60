"""The progress of a training loop or a batch of samples while it runs.

    with tinkex.progress(steps=100):
        for batch in batches:
            ...

On a terminal this is one line that is redrawn; elsewhere a plain line every ten seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TextIO

from tinkex.errors import InvalidInputError

from . import bus
from .bus import column
from .events import Event, QueueStateChange, SampleStop, TrainingPass, TrainingStep

__all__ = ["Progress", "progress"]

#: Seconds between plain lines.
_INTERVAL: Final = 10.0
_REDRAWN_PER_SECOND: Final = 4
#: Seconds over which tokens per second are averaged.
_LATELY: Final = 10.0


def progress(
    steps: int | None = None,
    *,
    samples: int | None = None,
    done: int = 0,
    title: str = "",
    file: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Show steps, loss, tokens per second, the queue state and the time left, in a `with` block.

    `steps` and `samples` are the totals, for the bar and the time left; without them neither is shown. `done` is the
    number of steps that an earlier run of the loop has completed. The output goes to `file`, by default stderr.
    """
    for name, value in (("steps", steps), ("samples", samples)):
        if value is not None and value < 1:
            raise InvalidInputError(f"must be 1 or more, not {value}", field=name)
    return Progress(steps, samples, done, title, file or sys.stderr, clock)


class Progress(bus.Collector):
    """Shown by `progress`; `line` is the same as text, `note` is the caller's own text in it."""

    kinds = (TrainingPass, TrainingStep, SampleStop)

    def __init__(
        self,
        total_steps: int | None,
        total_samples: int | None,
        done: int,
        title: str,
        file: TextIO,
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self.steps = self._done = done
        self.samples = self.tokens = 0
        self.loss: float | None = None
        self.note = ""
        self._total_steps = total_steps
        self._total_samples = total_samples
        self._title = title
        self._file = file
        self._clock = clock
        self._began = clock()
        self._seen = deque([(self._began, 0)])  # (time, tokens so far)
        self._events = 0
        self._waiting: tuple[int, str] = (0, "")  # (number of events at that time, reason)
        self._last_line = ""
        self._last_state: object = None  # what the last line told, apart from speed and time
        self._shown: Any = None

    # -- counting ----------------------------------------------------------------------------

    def count(self, kind: type[Event], events: list[bus.Unmade]) -> None:
        self._events += len(events)
        if kind is TrainingStep:
            self.steps += len(events)
        elif kind is SampleStop:
            self.samples += sum(column(events, "sequences"))
            self.tokens += sum(column(events, "sampled_tokens"))
        else:
            self.tokens += sum(column(events, "tokens"))
            passes = zip(column(events, "operation"), column(events, "loss"), strict=True)
            for operation, loss in passes:
                if loss is not None and operation != "forward":  # `forward` does not train
                    self.loss = loss

    def _queued(self, event: QueueStateChange) -> None:
        self.flush()
        active = event.queue_state == "active"
        why = "" if active else event.queue_state_reason or event.queue_state
        self._waiting = (self._events, why)

    def _subscribe(self) -> tuple[int, ...]:
        return (*super()._subscribe(), bus.attach(self._queued, QueueStateChange))

    # -- formatting --------------------------------------------------------------------------

    @property
    def fraction(self) -> float | None:
        """The share that is done, from 0 to 1; None if the total is unknown."""
        if self._total_steps is not None:
            return min(1.0, self.steps / self._total_steps)
        if self._total_samples is not None:
            return min(1.0, self.samples / self._total_samples)
        return None

    @property
    def line(self) -> str:
        self.flush()
        parts = [self._title] if self._title else []
        if self.steps or self._total_steps is not None:
            parts.append(f"step {self.steps}{_of(self._total_steps)}")
        if self.samples or self._total_samples is not None:
            parts.append(f"sample {self.samples}{_of(self._total_samples)}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.note:
            parts.append(self.note)
        if speed := self._speed():
            parts.append(f"{_short(speed)} tok/s")
        since, why = self._waiting
        if why and since == self._events:  # no event since then
            parts.append(f"waiting: {why}")
        parts.append(self._time())
        return " · ".join(parts)

    def _speed(self) -> float:
        """Tokens per second over the last ten seconds."""
        now = self._clock()
        while len(self._seen) > 1 and now - self._seen[0][0] > _LATELY:
            self._seen.popleft()
        self._seen.append((now, self.tokens))
        since, before = self._seen[0]
        return (self.tokens - before) / (now - since) if now > since else 0.0

    def _time(self) -> str:
        spent = self._clock() - self._began
        total, now, before = self._total_samples, self.samples, 0
        if self._total_steps is not None:
            total, now, before = self._total_steps, self.steps, self._done
        if total is None or not before < now < total:
            return str(timedelta(seconds=round(spent)))
        return f"{timedelta(seconds=round(spent * (total - now) / (now - before)))} left"

    # -- display -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._seen = deque([(self._began, self.tokens)])
        lines = _Lines(self.write, self._finish)
        self._shown = self._on_terminal() if _is_terminal(self._file) else lines
        self._shown.start()
        return self.attach()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
        self._shown.stop()  # shows the final state

    def write(self) -> None:
        """Show the current state: redraw on a terminal, elsewhere print a line if it has changed."""
        if self._shown is not None and not isinstance(self._shown, _Lines):
            self._shown.refresh()
        elif (line := self.line) != self._last_line:
            self._last_line, self._last_state = line, self._state
            with suppress(OSError, ValueError):  # a closed pipe must not end the work
                print(line, file=self._file, flush=True)

    @property
    def _state(self) -> object:
        self.flush()
        return self._events, self.note, self._waiting

    def _finish(self) -> None:
        """Print the final state, unless the last line told it."""
        if self._state != self._last_state:
            self.write()

    def _on_terminal(self) -> Any:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        def draw() -> Table:
            row = Table.grid(padding=(0, 1))
            line, fraction = self.line, self.fraction
            if fraction is None:
                row.add_row(line)
            else:
                row.add_row(ProgressBar(1.0, fraction, width=24), line)
            return row

        return Live(
            console=Console(file=self._file),
            get_renderable=draw,
            refresh_per_second=_REDRAWN_PER_SECOND,
        )


class _Lines:
    """Writes a line every ten seconds, on its own thread, and the last one at the end."""

    def __init__(self, write: Callable[[], None], finish: Callable[[], None]) -> None:
        self._write, self._finish = write, finish
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tinkex-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._write()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._finish()


def _is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except (AttributeError, ValueError):
        return False


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
