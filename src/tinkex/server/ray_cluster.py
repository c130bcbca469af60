"""The service's side of the bridge to a Ray cluster: starts it, asks it for engines, starts it again when it ends.

The bridge ends when the cluster's head is lost. Then all engines are dead; each attempt to start one again first starts
the bridge, and fails with the reason until the cluster can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinkex._python import PYTHON
from tinkex.engine.actor import ParcelPlace
from tinkex.engine.actors import NodeView
from tinkex.engine.bridge import BridgeSetup, ClusterView, Connected, ForgetParcel, Launch, Look
from tinkex.engine.parcels import Parcel
from tinkex.engine.process import encode_frame, read_frame
from tinkex.engine.progress import EngineProgress
from tinkex.errors import ConfigError

from .threads import in_new_thread

__all__ = ["BridgeProcess", "RayCluster", "RayOptions", "StartBridge"]

logger = logging.getLogger("tinkex.server")

#: Seconds in which the bridge must be connected, and in which it must answer a question.
_CONNECTING: Final = 180.0
_ANSWERING: Final = 20.0
#: Seconds for which engines that start fail with the reason of the last attempt to connect.
_PAUSE: Final = 1.0


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the cluster is, and what each engine gets of it; without GPUs given, one if the cluster has any."""

    address: str
    cpus: float = 1.0
    gpus: float | None = None
    shared_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class BridgeProcess:
    """A bridge that was started: its control socket, and how to end it."""

    control: socket.socket
    kill: Callable[[], None]
    wait: Callable[[], None]


StartBridge = Callable[[str], BridgeProcess]


def start_bridge(address: str) -> BridgeProcess:
    """Start the bridge as a process; for a new local cluster with a token that only this service knows."""
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    if address == "local":
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [
                *PYTHON,
                "-m",
                "tinkex.engine.ray_bridge",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def wait() -> None:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return BridgeProcess(ours, process.kill, wait)


class RayCluster:
    """A cluster that engines are placed in; also the exchange of the pool, which drops parcels."""

    def __init__(self, options: RayOptions, start: StartBridge = start_bridge) -> None:
        self.options = options
        self._start = start
        self._bridge: BridgeProcess | None = None
        self._namespace = f"tinkex-{secrets.token_hex(8)}"
        self._launched = 0
        self._asking = asyncio.Lock()
        self._refused: tuple[float, Exception] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self.nodes: Sequence[NodeView] = ()

    async def connect(self) -> None:
        """Start the bridge and connect it; raises `ConfigError` if the cluster cannot be reached."""
        async with self._asking:
            await self._connected()

    async def _connected(self) -> BridgeProcess:
        if self._bridge is not None:
            return self._bridge
        if self._refused is not None and time.monotonic() < self._refused[0]:
            raise self._refused[1]
        # From the event loop's thread: the kernel kills the bridge when its parent thread ends.
        bridge = self._start(self.options.address)
        setup = BridgeSetup(self.options.address, self._namespace, self.options.shared_dir)
        try:
            answer = await in_new_thread(_ask, bridge.control, encode_frame(setup), _CONNECTING)
        except asyncio.CancelledError:
            bridge.kill()
            raise
        error: Exception | None = None
        if answer is None:
            error = ConfigError(
                f"the bridge to the Ray cluster {self.options.address} did not connect; its error output is above",
                field="ray",
            )
        elif isinstance(answer, Connected):
            error = answer.error
        if error is not None:
            self._refused = time.monotonic() + _PAUSE, error
            bridge.kill()
            bridge.control.close()
            await in_new_thread(bridge.wait)
            raise error
        self.nodes = answer.nodes
        self._bridge = bridge
        return bridge

    async def look(self) -> ClusterView | None:
        """The cluster as the bridge sees it; None if there is no bridge."""
        async with self._asking:
            if self._bridge is None:
                return None
            view: ClusterView | None = await self._tell(Look(), answer=True)
            if view is not None:
                self.nodes = view.nodes
            return view

    async def launch(
        self,
        resources: Mapping[str, float],
        name: str,
        pipe: socket.socket,
        progress: EngineProgress,
    ) -> None:
        """Have an engine started at the other end of a pipe; its first message says whether it was."""
        descriptors = [pipe.fileno(), progress.fileno()]
        async with self._asking:
            await self._connected()
            self._launched += 1
            call = Launch(f"{name}-{self._launched}", resources)
            await self._tell(call, descriptors)

    async def _tell(
        self, message: object, descriptors: Sequence[int] = (), *, answer: bool = False
    ) -> Any:
        """Send a message to the bridge; a bridge that does not answer is ended."""
        bridge = self._bridge
        assert bridge is not None
        try:
            socket.send_fds(bridge.control, [b"!"], list(descriptors))
            data = encode_frame(message)
            if not answer:
                bridge.control.sendall(data)
                return None
            found = await in_new_thread(_ask, bridge.control, data, _ANSWERING)
        except OSError:
            found = None
        if found is None:
            logger.error("The bridge to the Ray cluster has ended; it is started again.")
            await self._end_bridge()
        return found

    # -- the exchange ------------------------------------------------------------------------

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def drop(self, parcel: Parcel) -> None:
        if isinstance(parcel.where, ParcelPlace) and self._loop is not None:
            task = self._loop.create_task(self._forget(parcel.where))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _forget(self, place: ParcelPlace) -> None:
        async with self._asking:
            if self._bridge is not None:
                await self._tell(ForgetParcel(place))

    def put(self, name: str, data: bytes) -> Parcel:
        raise NotImplementedError("only engines make parcels")

    def get(self, parcel: Parcel) -> bytes:
        raise NotImplementedError("only engines read parcels")

    def close(self) -> None:
        """The bridge is ended by `stop`."""

    async def stop(self) -> None:
        async with self._asking:
            if self._bridge is not None:
                await self._end_bridge()

    async def _end_bridge(self) -> None:
        bridge, self._bridge = self._bridge, None
        assert bridge is not None
        with contextlib.suppress(OSError):
            bridge.control.shutdown(socket.SHUT_RDWR)
        bridge.control.close()
        await in_new_thread(bridge.wait)


def _ask(control: socket.socket, data: bytes, timeout: float) -> Any:
    """Send a frame and read the answer; None if there is none in time."""
    control.settimeout(timeout)
    try:
        control.sendall(data)
        return read_frame(control)
    except OSError:
        return None
    finally:
        control.settimeout(None)
