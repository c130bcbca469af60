"""An engine inside an actor: the loop of the engine process, with calls and replies that come and go through a cluster."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

from tinkex._version import __version__

from .actors import ActorLostError, Actors, ActorSilentError
from .base_models import default_cache_dir
from .calls import CallFrame, Reply
from .luggage import PackedFrame, PackedMessage, Unpacking, is_shared
from .parcels import Parcel, ParcelLostError
from .process import Ready, Setup, work
from .progress import EngineProgress
from .resident import resident_bytes
from .shared_memory import SharedMemory
from .values import Array

__all__ = ["ActorDepot", "EngineActor", "HostFacts", "ParcelPlace", "Pulled"]

#: Seconds in which an engine must get a parcel from another one.
_FETCH: Final = 120.0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What an engine runs on; engines that work together have the same versions."""

    node_id: str
    tinkex: str
    torch: str

    @classmethod
    def of_this_process(cls, node_id: str = "") -> HostFacts:
        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "none"
        return cls(node_id, __version__, torch)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The messages of an engine since the last pull; `ended` if no more will come."""

    ready: Ready | None
    messages: list[PackedMessage]
    progress: tuple[int, int]
    memory: int
    ended: bool


@dataclass(frozen=True, slots=True)
class ParcelPlace:
    """Where a parcel is: the actor that keeps it, and its name there."""

    actor: str
    name: str


class ActorDepot:
    """Parcels stay in the memory of the engine that made them; others fetch them through the object store."""

    def __init__(self, own: str, actors: Actors) -> None:
        self._own, self._actors = own, actors
        self._kept: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> Parcel:
        self._kept[name] = data
        return Parcel(name, len(data), ParcelPlace(self._own, name))

    def get(self, parcel: Parcel) -> bytes:
        place = _place(parcel)
        try:
            if place.actor == self._own:
                content = self.kept(place.name)
            else:
                content = self._actors.find(place.actor).ask("fetch", place.name, timeout=_FETCH)
        except (ActorLostError, ActorSilentError) as error:
            raise ParcelLostError(
                f"the engine {place.actor} cannot send {place.name}: {error}"
            ) from None
        if content is None:
            raise ParcelLostError(f"the engine {place.actor} has dropped {place.name}")
        data: bytes = content.tobytes()
        return data

    def drop(self, parcel: Parcel) -> None:
        place = _place(parcel)
        if place.actor == self._own:
            self.forget(place.name)
            return
        with contextlib.suppress(ActorLostError):
            self._actors.find(place.actor).send("forget", place.name)

    def kept(self, name: str) -> Array | None:
        data = self._kept.get(name)
        return None if data is None else np.frombuffer(data, np.uint8)

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)


def _place(parcel: Parcel) -> ParcelPlace:
    assert isinstance(parcel.where, ParcelPlace)
    return parcel.where


class EngineActor:
    """An engine whose calls are pushed and whose replies are pulled. Each method may run in a thread of its own."""

    def __init__(self, name: str, actors: Actors) -> None:
        self._actors = actors
        self._depot = ActorDepot(name, actors)
        self._inbox = _QueuedInbox()
        self._progress = EngineProgress.alone()
        self._said = threading.Condition()
        self._ready: Ready | None = None
        self._out: list[PackedMessage] = []
        self._ended = False
        self._memory = SharedMemory()
        self._memory.open()
        self._unpacking = Unpacking(self._memory.directory)

    def facts(self) -> HostFacts:
        return HostFacts.of_this_process(self._actors.here())

    def start(self, setup: Setup, shared: Path | None) -> None:
        """Start the engine; the first `pull` that has something returns its `Ready`."""
        if not is_shared(setup.cache_dir, shared):
            setup = replace(setup, cache_dir=default_cache_dir())
        self._unpacking = Unpacking(self._memory.directory, shared)
        threading.Thread(target=self._run, args=(setup,), name="tinkex-engine", daemon=True).start()

    def _run(self, setup: Setup) -> None:
        try:
            work(setup, self._inbox, self._say, self._progress, self._depot)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            with self._said:
                self._ended = True
                self._said.notify()

    def _say(self, said: object) -> None:
        if isinstance(said, Ready):
            ready, messages = said, []
        else:
            assert isinstance(said, list)
            ready, messages = None, [self._unpacking.pack(message) for message in said]
        with self._said:
            self._ready = ready or self._ready
            self._out += messages
            self._said.notify()

    # -- calls -------------------------------------------------------------------------------

    def push(self, packed: PackedFrame) -> None:
        try:
            self._inbox.put(self._unpacking.unpack(packed))
        except OSError as error:  # no room for the files
            self._inbox.put(Reply(packed.frame.call_id, error=error))

    def pull(self, wait: float) -> Pulled:
        """The messages since the last pull; waits at most `wait` seconds for the first."""
        with self._said:
            self._said.wait_for(lambda: self._ready or self._out or self._ended, wait)
            ready, self._ready = self._ready, None
            messages, self._out = self._out, []
            ended = self._ended
        return Pulled(ready, messages, self._progress.read(), resident_bytes("self"), ended)

    def end(self) -> None:
        """Remove this engine's files at once, and end it after its current work; then the actor can be killed."""
        self._inbox.put(None)
        with self._said:  # it may be told twice at once
            self._memory.close()

    # -- parcels -----------------------------------------------------------------------------

    def fetch(self, name: str) -> Array | None:
        return self._depot.kept(name)

    def forget(self, name: str) -> None:
        self._depot.forget(name)


class _QueuedInbox:
    """The inbox of a loop, filled by other threads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[CallFrame | Reply | None] = queue.SimpleQueue()

    def get(self, *, block: bool, timeout: float | None = None) -> CallFrame | Reply | None:
        return self._queue.get(block=block, timeout=timeout)

    def put(self, message: CallFrame | Reply | None) -> None:
        self._queue.put(message)

    def empty(self) -> bool:
        return self._queue.empty()
