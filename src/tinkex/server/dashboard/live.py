"""Live updates: one stream of server-sent events per open page.

An event says which runs have changed and how they look now, and carries their new points. A page draws itself anew for each
event, on the processor that trains if the browser runs there, so changes are sent together. Nothing is stored: a page that
reconnects reads everything anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import orjson

from tinkex._wire.operations import ServicePart
from tinkex.errors import RateLimitError

from ..futures import Promise
from .growth import MOST_ROWS, MOST_VALUES, UNGROWN, Growth, growth_of
from .store import Written

__all__ = ["Change", "Listener", "Live"]

#: Seconds for which a change waits for others. One of the state waits longer: the metrics of its step often follow.
WAITS: Final = {"metrics": 0.05, "samples": 0.05, "state": 1.0}
#: Seconds for which a change of the state waits if the run made a step less than this ago: the next step brings it.
STEADY: Final = 3.0
#: Seconds between two events at least. A step that comes sooner than this after the last one waits as long, so that one
#: drawing shows both.
SPACING: Final = 0.8
#: Seconds after which a page hears something even if nothing changed: it shows that the connection lives.
BEAT: Final = 5.0
#: Pages of one key that may listen at a time.
MAX_LISTENERS: Final = 32
#: Runs in one event; a page that misses some hears of them next time.
_MAX_RUNS: Final = 200


@dataclass
class Change:
    """What is different about a run; `rows` are its new points, None if the page must read its curves."""

    what: set[str] = field(default_factory=set)
    rows: list[orjson.Fragment] | None = field(default_factory=list)
    values: int = 0  # in the rows


class Listener:
    """What one open page has not heard yet, and when it hears it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed: dict[str, Change] = {}  # by run
        self._values = 0  # in all changes
        self._stepped: dict[str, float] = {}  # by run: when it last got new metrics
        self._due: float | None = None
        self._sent = clock()
        self._sooner = asyncio.Event()

    def note(self, run_id: str, what: str, growth: Growth | None = UNGROWN) -> None:
        change = self._changed.setdefault(run_id, Change())
        change.what.add(what)
        self._grow(change, growth)
        now = self._clock()
        due = now + self._wait_of(run_id, what, now)
        if what == "metrics":
            self._stepped[run_id] = now
        if self._due is None or due < self._due:  # most changes come while an earlier one waits
            self._due = due
            self._sooner.set()

    def _grow(self, change: Change, growth: Growth | None) -> None:
        if change.rows is None:
            return
        if (
            growth is None
            or self._values + growth.values > MOST_VALUES
            or len(change.rows) + len(growth.rows) > MOST_ROWS
        ):
            self._values -= change.values
            change.rows, change.values = None, 0
        else:
            self._values += growth.values
            change.values += growth.values
            change.rows += growth.rows

    def _wait_of(self, run_id: str, what: str, now: float) -> float:
        passed = now - self._stepped.get(run_id, now - STEADY)
        if what == "state" and passed < STEADY:
            return STEADY
        if what == "metrics" and passed < SPACING:
            return SPACING
        return WAITS[what]

    def take(self, most: int) -> dict[str, Change]:
        """The changes that are being sent now, of at most so many runs; the others are due with the next event."""
        changed = {run_id: self._changed.pop(run_id) for run_id in list(self._changed)[:most]}
        self._values -= sum(each.values for each in changed.values())
        self._sent = self._clock()
        self._due = self._sent if self._changed else None
        self._stepped = {run: at for run, at in self._stepped.items() if self._sent - at < STEADY}
        return changed

    def seconds_left(self) -> float:
        """Until the next event: of changes that are due, or of none."""
        at = self._sent + BEAT if self._due is None else max(self._due, self._sent + SPACING)
        return at - self._clock()

    async def wait(self) -> None:
        """Until the next event is due."""
        while (seconds := self.seconds_left()) > 0:
            self._sooner.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._sooner.wait()


class Live:
    """Tells open pages what has changed."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[Listener]] = {}

    def changed(self, owner: str, run_id: str, what: str) -> None:
        """Note that something about a run is different now."""
        for listener in self._listeners.get(owner, ()):
            listener.note(run_id, what)

    def curves_replaced(self, owner: str, run_id: str) -> None:
        """Note that curves of a run are different from before, not only longer."""
        for listener in self._listeners.get(owner, ()):
            listener.note(run_id, "metrics", None)

    def request_changed(self, promise: Promise) -> None:
        if promise.operation.runner is ServicePart.MODELS:
            self.changed(promise.owner, promise.scope, "state")

    def metrics_written(self, owner: str, run_id: str, written: Written) -> None:
        listeners = self._listeners.get(owner)
        if not listeners:
            return
        growth = growth_of(written)
        for listener in listeners:
            listener.note(run_id, "metrics", growth)

    def samples_written(self, owner: str, run_id: str) -> None:
        self.changed(owner, run_id, "samples")

    def listen(
        self,
        owner: str,
        describe: Callable[[list[str]], Awaitable[list[dict[str, Any]]]],
        now: Callable[[], dict[str, Any]],
        over: Callable[[], bool],
        unsettled: Iterable[str] = (),
    ) -> tuple[AsyncIterator[bytes], Callable[[], None]]:
        """The events of an owner's runs until it is over, and what ends listening; refused if too many listen.

        `unsettled` are runs whose state may change without a request of theirs, as at the end of a session.
        """
        if len(self._listeners.get(owner, ())) >= MAX_LISTENERS:
            raise RateLimitError(
                f"This key has {MAX_LISTENERS} open pages; close some of them.", retry_after=5.0
            )
        clock = asyncio.get_running_loop().time
        listener = Listener(clock)  # counted at once: thousands may ask before the first one reads
        self._listeners.setdefault(owner, set()).add(listener)
        events = _events(listener, describe, now, over, dict.fromkeys(unsettled), clock)
        return events, lambda: self._leave(owner, listener)

    def _leave(self, owner: str, listener: Listener) -> None:
        self._listeners[owner].discard(listener)
        if not self._listeners[owner]:
            del self._listeners[owner]


async def _events(
    listener: Listener,
    describe: Callable[[list[str]], Awaitable[list[dict[str, Any]]]],
    now: Callable[[], dict[str, Any]],
    over: Callable[[], bool],
    unsettled: dict[str, None],
    clock: Callable[[], float],
) -> AsyncIterator[bytes]:
    looked = clock()
    yield _event("hello", now())
    await listener.wait()
    while not over():
        changed = listener.take(_MAX_RUNS)
        asked = list(changed)
        if beat := clock() - looked >= BEAT:
            looked = clock()
            others = (run_id for run_id in unsettled if run_id not in changed)
            asked += islice(others, _MAX_RUNS - len(asked))
        for run_id in asked:  # its next turn is after that of all others
            unsettled.pop(run_id, None)
        runs = await describe(asked) if asked else []
        for run in runs:
            change = changed.get(run["id"], Change())
            run["changed"] = sorted(change.what)
            if "metrics" in change.what:
                run["points"] = change.rows
            if run["state"]["kind"] != "ended":
                unsettled[run["id"]] = None
        if gone := set(asked) - {run["id"] for run in runs}:
            yield _event("gone", {"runs": sorted(gone)})
        if runs:
            yield _event("runs", {"runs": runs})
        if beat or not runs:
            yield _event("beat", now())
        await listener.wait()


def _event(name: str, content: dict[str, Any]) -> bytes:
    return (
        b"event: "
        + name.encode()
        + b"\ndata: "
        + orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
        + b"\n\n"
    )
