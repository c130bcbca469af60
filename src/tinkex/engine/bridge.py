"""The bridge: a process beside the service that connects its pipes with engines in a cluster.

The service does not use Ray itself: Ray ends every process that has used it once the head of the cluster is lost. For each
engine the service sends one end of a pipe. The bridge places an actor and carries the same frames as an engine process
would: calls from the pipe to the actor, replies back. A pipe that closes means that the engine is dead, in both directions.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tinkex.errors import ConfigError, TinkerError

from . import base_models
from .actor import HostFacts, ParcelPlace, Pulled
from .actors import (
    ActorHandle,
    ActorLostError,
    Actors,
    ActorSilentError,
    NodeView,
    StoreFullError,
    impossible,
    lacking,
)
from .base_models import PreparedModel
from .calls import AddBaseModel, CallFrame, Reply, Token
from .luggage import Files, is_shared, pack, write_whole_directory, writes
from .process import Ready, Setup, encode_frame, read_frame
from .progress import EngineProgress

__all__ = ["Bridge", "BridgeSetup", "ClusterView", "Connected", "ForgetParcel", "Launch", "Look"]

#: Seconds that a new actor waits for resources, and that its process may take to start.
PLACEMENT: Final = 10.0
STARTING: Final = 60.0
#: Seconds between two looks at the cluster, and between two signs of life of an engine.
LOOKING: Final = 1.0
PULLING: Final = 1.0
#: Seconds in which an actor that is let go must have removed its files, and all of them when the bridge ends.
ENDING: Final = 2.0
LEAVING: Final = 5.0
#: Seconds for which a node is avoided on which an engine could not start.
AVOIDING: Final = 60.0


@dataclass(frozen=True, slots=True)
class BridgeSetup:
    """How to reach the cluster; `namespace` is that of the actors' names."""

    address: str
    namespace: str
    #: A directory that all nodes see under the same path.
    shared: Path | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """The bridge is connected, or `error` says why it is not."""

    nodes: Sequence[NodeView] = ()
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Start an engine; its pipe and its progress memory come with this message."""

    name: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Look:
    """Ask for a `ClusterView`."""


@dataclass(frozen=True, slots=True)
class ForgetParcel:
    """Free a parcel that nobody reads any more."""

    place: ParcelPlace


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The machines of the cluster as they were `age` seconds ago."""

    nodes: Sequence[NodeView] = ()
    age: float = 0.0


@dataclass(eq=False)
class _Avoided:
    """Nodes on which an engine could not start, each with the time until which it is avoided."""

    clock: Callable[[], float]
    until: dict[str, float] = field(default_factory=dict)

    def add(self, node_id: str) -> None:
        self.until[node_id] = self.clock() + AVOIDING

    def among(self, nodes: Sequence[NodeView]) -> set[str]:
        """The nodes to avoid now; none if that left no other."""
        now = self.clock()
        found = {node.node_id for node in nodes if now < self.until.get(node.node_id, now)}
        return set() if len(found) == len(nodes) else found


class Bridge:
    """Runs until the service closes the control socket."""

    def __init__(
        self,
        control: socket.socket,
        connect: Callable[[BridgeSetup], Actors],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._connect = connect
        self._clock = clock
        self._seen: tuple[Sequence[NodeView], float] = ((), 0.0)

    def run(self) -> None:
        setup = read_frame(self._control)
        if not isinstance(setup, BridgeSetup):
            return
        try:
            actors = self._connect(setup)
            actors.connect()
            self._seen = actors.nodes(), self._clock()
        except Exception as error:
            refusal = error if isinstance(error, TinkerError) else _unreachable(setup, error)
            self._control.sendall(encode_frame(Connected(error=refusal)))
            return
        self._control.sendall(encode_frame(Connected(self._seen[0])))
        threading.Thread(target=self._watch, args=(actors,), daemon=True).start()
        forgetting: queue.SimpleQueue[ParcelPlace] = queue.SimpleQueue()
        threading.Thread(target=_forget, args=(actors, forgetting), daemon=True).start()
        models, avoided = _LocalModels(), _Avoided(self._clock)
        connections: list[_Connection] = []
        try:
            while (received := self._receive()) is not None:
                message, descriptors = received
                match message:
                    case Launch():
                        pipe = socket.socket(fileno=descriptors[0])
                        progress = EngineProgress.of_descriptor(descriptors[1])
                        os.close(descriptors[1])
                        made = _Connection(
                            message, pipe, progress, actors, models, avoided, setup.shared
                        )
                        connections = [each for each in connections if not each.over.is_set()]
                        connections.append(made)
                        made.start()
                    case Look():
                        nodes, when = self._seen
                        view = ClusterView(nodes, self._clock() - when)
                        self._control.sendall(encode_frame(view))
                    case ForgetParcel(place):
                        forgetting.put(place)
        finally:
            until = self._clock() + LEAVING
            for each in connections:  # their actors clean up
                each.over.wait(max(0.0, until - self._clock()))
            actors.close()

    def _receive(self) -> tuple[Any, list[int]] | None:
        """The next message of the service, with the descriptors that came along; None at the end."""
        try:
            mark, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        except OSError:
            return None
        message = read_frame(self._control) if mark else None
        return None if message is None else (message, descriptors)

    def _watch(self, actors: Actors) -> None:
        while True:
            time.sleep(LOOKING)
            with contextlib.suppress(Exception):  # the view grows old; the service sees its age
                self._seen = actors.nodes(), self._clock()


def _forget(actors: Actors, parcels: queue.SimpleQueue[ParcelPlace]) -> None:
    """Free parcels, in a thread: while the head of the cluster is lost, finding an actor takes a minute."""
    while True:
        place = parcels.get()
        with contextlib.suppress(Exception):  # without its actor the parcel is gone
            actors.find(place.actor).send("forget", place.name)


def _unreachable(setup: BridgeSetup, error: Exception) -> ConfigError:
    return ConfigError(f"cannot use the cluster {setup.address}: {error}", field="ray")


class _LocalModels:
    """The base models as they are on this machine: tokenizers and facts for the service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, PreparedModel] = {}

    def of(self, spec: str, cache_dir: Path) -> PreparedModel:
        with self._lock:
            if spec not in self._known:
                self._known[spec] = base_models.prepare(base_models.parse_spec(spec), cache_dir)
            return self._known[spec]


class _Connection:
    """One engine: a pipe to the service on one side, an actor on the other."""

    def __init__(
        self,
        launch: Launch,
        pipe: socket.socket,
        progress: EngineProgress,
        actors: Actors,
        models: _LocalModels,
        avoided: _Avoided,
        shared: Path | None,
    ) -> None:
        self._launch, self._pipe, self._progress = launch, pipe, progress
        self._actors, self._models, self._avoided = actors, models, avoided
        self._shared = shared
        self._setup: Setup | None = None
        self._actor: ActorHandle | None = None
        self._node = NodeView("", "")
        self._told = False
        self._closed = threading.Event()
        #: Set when nothing is left of the engine.
        self.over = threading.Event()
        self._sending = threading.Lock()
        self._writing: dict[int, Path] = {}
        self._adding: dict[int, str] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name=self._launch.name, daemon=True).start()

    def _run(self) -> None:
        """Send the calls of the service to the actor, until the service or the actor has ended."""
        try:
            with self._pipe:
                setup = read_frame(self._pipe)
                if isinstance(setup, Setup):
                    self._setup = setup
                    threading.Thread(target=self._serve, args=(setup,), daemon=True).start()
                    while (frame := read_frame(self._pipe)) is not None:
                        self._push(CallFrame(*frame))
        finally:
            self._closed.set()
            if self._actor is not None:
                self._let_go(self._actor)
            self.over.set()

    def _let_go(self, actor: ActorHandle) -> None:
        """End an actor; its files are removed first, if it can still be reached."""
        try:
            with contextlib.suppress(ActorLostError, ActorSilentError, StoreFullError):
                actor.ask("end", timeout=ENDING)
        finally:
            self._actors.kill(actor)

    def _serve(self, setup: Setup) -> None:
        """Start the actor and send its messages to the service."""
        try:
            self._pull(self._begin(setup))
        except (ActorLostError, ActorSilentError, StoreFullError) as error:
            self._refuse(ConfigError(f"{self._where}{error}", field="ray"))
        except TinkerError as error:
            self._refuse(error)
        finally:
            with contextlib.suppress(OSError):
                self._pipe.shutdown(socket.SHUT_RDWR)

    def _refuse(self, error: Exception) -> None:
        """Tell the service why the engine does not start; once it was ready, a closed pipe says enough."""
        if not self._told:
            self._send(Ready(error=error))
        elif not self._closed.is_set():
            print(f"{self._launch.name}: {error}", file=sys.stderr, flush=True)  # noqa: T201

    @property
    def _where(self) -> str:
        return f"on node {self._node.name}: " if self._node.node_id else ""

    # -- start -------------------------------------------------------------------------------

    def _begin(self, setup: Setup) -> ActorHandle:
        nodes = self._wait_for_room()
        avoid = self._avoided.among(nodes)
        actor = self._actor = self._actors.place(self._launch.name, self._launch.resources, avoid)
        if self._closed.is_set():  # the service gave up meanwhile
            self._actors.kill(actor)
        try:
            facts: HostFacts = actor.ask("facts", timeout=STARTING)
        except ActorSilentError:
            self._actors.kill(actor)
            reason = lacking(self._actors.nodes(), self._launch.resources)
            raise ActorSilentError(
                reason or f"the engine was placed, but did not start within {STARTING:.0f} s"
            ) from None
        nodes = [*nodes, *self._actors.nodes()]
        self._node = next(
            (node for node in nodes if node.node_id == facts.node_id),
            NodeView(facts.node_id, facts.node_id),
        )
        self._check(facts)
        actor.ask("start", _portable_setup(setup), self._shared, timeout=STARTING)
        return actor

    def _wait_for_room(self) -> Sequence[NodeView]:
        until = time.monotonic() + PLACEMENT
        while not self._closed.is_set():
            nodes = self._actors.nodes()
            avoided = self._avoided.among(nodes)
            welcome = [node for node in nodes if node.node_id not in avoided]
            reason = lacking(welcome, self._launch.resources)
            if reason is None:
                return nodes
            if time.monotonic() > until or impossible(nodes, self._launch.resources):
                if len(welcome) < len(nodes):
                    reason += "; nodes on which an engine just failed to start are left out"
                raise ActorSilentError(reason)
            self._closed.wait(0.2)
        raise ActorSilentError("the service does not wait any more")

    def _check(self, facts: HostFacts) -> None:
        """Refuse a node with other versions: its engine would read our calls wrongly, or end in other bits."""
        own = HostFacts.of_this_process(facts.node_id)
        for package in ("tinkex", "torch"):
            theirs, ours = getattr(facts, package), getattr(own, package)
            if theirs != ours:
                self._avoided.add(facts.node_id)
                raise ConfigError(
                    f"{self._where}{package} is {theirs}, and here it is {ours}; install the same version",
                    field="ray",
                )

    # -- calls -------------------------------------------------------------------------------

    def _push(self, frame: CallFrame) -> None:
        assert self._actor is not None
        written = writes(frame.call)
        if written is not None and not is_shared(written, self._shared):
            self._writing[frame.call_id] = written
        if isinstance(frame.call, AddBaseModel):
            self._adding[frame.call_id] = frame.call.name
            frame = CallFrame(frame.call_id, AddBaseModel(_portable_source(frame.call.name)))
        try:
            self._actor.send("push", pack(frame, self._shared))
        except ActorLostError:
            self._closed.set()
        except (StoreFullError, OSError) as error:
            failed = error if isinstance(error, OSError) else MemoryError(str(error))
            self._send([Reply(frame.call_id, error=failed)])
        except TinkerError as error:
            self._send([Reply(frame.call_id, error=error)])

    def _pull(self, actor: ActorHandle) -> None:
        try:
            while not self._closed.is_set():
                pulled: Pulled = actor.ask("pull", PULLING)
                self._progress.repeat(pulled.progress, pulled.memory)
                if pulled.ready is not None:
                    self._send(self._localized(pulled.ready))
                    self._told = True
                if pulled.messages:
                    self._deliver(pulled)
                if pulled.ended:
                    return
        finally:
            self._let_go(actor)

    def _deliver(self, pulled: Pulled) -> None:
        now: list[Reply | Token] = []
        for packed in pulled.messages:
            message = packed.message
            if isinstance(message, Reply):
                directory = self._writing.pop(message.call_id, None)
                if packed.files is not None and directory is not None:
                    # In a thread: flushing files takes long, and other replies do not wait for it.
                    write = (message, packed.files, directory)
                    threading.Thread(target=self._write, args=write, daemon=True).start()
                    continue
                added = self._adding.pop(message.call_id, None)
                if added is not None and message.error is None:
                    message = self._added(added, message)
            now.append(message)
        if now:
            self._send(now)

    def _write(self, reply: Reply, files: Files, directory: Path) -> None:
        try:
            write_whole_directory(files, directory)
        except OSError as error:
            reply = Reply(reply.call_id, error=error)
        self._send([reply])

    def _send(self, value: object) -> None:
        data = encode_frame(value)
        with self._sending, contextlib.suppress(OSError):  # the service has closed the pipe
            self._pipe.sendall(data)

    # -- base models -------------------------------------------------------------------------

    def _localized(self, ready: Ready) -> Ready:
        """What the service is told of an engine: its node, and base models as they are on this machine."""
        assert self._setup is not None
        if ready.error is not None:
            self._avoided.add(self._node.node_id)
            error = ConfigError(f"{self._where}{ready.error}", field="base_model")
            return Ready(error=error)
        try:
            models = [
                self._same(model, self._models.of(spec, self._setup.cache_dir))
                for spec, model in zip(self._setup.base_models, ready.models, strict=True)
            ]
        except TinkerError as error:
            return Ready(error=error)
        return replace(ready, models=models, node=self._node.name)

    def _added(self, name: str, reply: Reply) -> Reply:
        assert self._setup is not None
        try:
            local = self._models.of(name, self._setup.cache_dir)
            return replace(reply, value=self._same(reply.value, local))
        except TinkerError as error:
            return replace(reply, value=None, error=error)

    def _same(self, theirs: PreparedModel, local: PreparedModel) -> PreparedModel:
        if replace(theirs, directory=local.directory) != local:
            self._avoided.add(self._node.node_id)
            raise ConfigError(
                f"{self._where}{local.name} is another model there ({theirs.directory}) than here ({local.directory})",
                field="base_model",
            )
        return local


def _portable_setup(setup: Setup) -> Setup:
    return replace(setup, base_models=[_portable_source(text) for text in setup.base_models])


def _portable_source(text: str) -> str:
    """A base model as another machine can look for it: a directory by its whole path."""
    spec = base_models.parse_spec(text)
    local = Path(spec.source).expanduser()
    return f"{spec.name}={local.resolve()}" if local.is_dir() else text
