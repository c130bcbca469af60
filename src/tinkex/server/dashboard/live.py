"""Live updates: one stream of server-sent events per open page.

An event says which runs have changed and how they look now. Changes within a short time are sent together, so a
thousand steps a second cost as little as four. Nothing is stored: a page that reconnects reads everything anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

import orjson

from tinkex._wire.operations import ServicePart
from tinkex.errors import RateLimitError

from ..futures import Promise

__all__ = ["Live"]

#: Seconds in which changes are collected.
COLLECTED: Final = 0.25
#: Seconds after which a page hears something even if nothing changed: it shows that the connection lives.
BEAT: Final = 5.0
#: Pages of one key that may listen at a time.
MAX_LISTENERS: Final = 32
#: Runs in one event; a page that misses some hears of them next time.
_MAX_RUNS: Final = 200


class _Listener:
    def __init__(self) -> None:
        self.changed: dict[str, set[str]] = {}  # by run: what changed
        self.woken = asyncio.Event()


class Live:
    """Tells open pages what has changed."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[_Listener]] = {}

    def changed(self, owner: str, run_id: str, what: str) -> None:
        """Note that something about a run is different now."""
        for listener in self._listeners.get(owner, ()):
            listener.changed.setdefault(run_id, set()).add(what)
            listener.woken.set()

    def request_changed(self, promise: Promise) -> None:
        if promise.operation.runner is ServicePart.MODELS:
            self.changed(promise.owner, promise.scope, "state")

    def metrics_written(self, owner: str, run_id: str) -> None:
        self.changed(owner, run_id, "metrics")

    def listen(
        self,
        owner: str,
        describe: Callable[[list[str]], Awaitable[list[dict[str, Any]]]],
        now: Callable[[], dict[str, Any]],
        stopping: asyncio.Event,
        unsettled: Iterable[str] = (),
    ) -> tuple[AsyncIterator[bytes], Callable[[], None]]:
        """The events of an owner's runs, until the service stops, and what ends listening; refused if too many listen.

        `unsettled` are runs whose state may change without a request of theirs, as at the end of a session.
        """
        if len(self._listeners.get(owner, ())) >= MAX_LISTENERS:
            raise RateLimitError(
                f"This key has {MAX_LISTENERS} open pages; close some of them.", retry_after=5.0
            )
        listener = _Listener()  # counted at once: thousands may ask before the first one reads
        self._listeners.setdefault(owner, set()).add(listener)
        events = self._events(listener, describe, now, stopping, set(unsettled))
        return events, lambda: self._leave(owner, listener)

    def _leave(self, owner: str, listener: _Listener) -> None:
        self._listeners[owner].discard(listener)
        if not self._listeners[owner]:
            del self._listeners[owner]

    async def _events(
        self,
        listener: _Listener,
        describe: Callable[[list[str]], Awaitable[list[dict[str, Any]]]],
        now: Callable[[], dict[str, Any]],
        stopping: asyncio.Event,
        unsettled: set[str],
    ) -> AsyncIterator[bytes]:
        yield _event("hello", now())
        while not stopping.is_set():
            beat = not await _woken(listener.woken, BEAT)
            await asyncio.sleep(COLLECTED)
            listener.woken.clear()
            changed, listener.changed = listener.changed, {}
            asked = [*changed, *(unsettled - changed.keys())][:_MAX_RUNS]
            runs = await describe(asked) if asked else []
            unsettled = {run["id"] for run in runs if run["state"]["kind"] != "ended"}
            for run in runs:
                run["changed"] = sorted(changed.get(run["id"], ()))
            if gone := set(asked) - {run["id"] for run in runs}:
                yield _event("gone", {"runs": sorted(gone)})
            if runs:
                yield _event("runs", {"runs": runs})
            if beat or not runs:
                yield _event("beat", now())


async def _woken(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"
