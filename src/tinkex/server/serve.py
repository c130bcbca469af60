"""Runs a service until a signal, until it is closed, or until the last lease ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn

from tinkex.errors import ConfigError

from .app import build_app
from .auth import Keys, require_keys
from .connections import (
    BoundedProtocol,
    ConnectionLimits,
    affordable_connections,
    close_overdue,
    raise_descriptor_limit,
)
from .leases import Leases
from .private import UMASK
from .service import Service, Settings

__all__ = ["ADDRESS_FILE", "ServiceThread", "run"]

logger = logging.getLogger("tinkex.server")

#: The file in the data directory of a running service that contains its URL.
ADDRESS_FILE: Final = "service.json"


def run(
    settings: Settings,
    host: str,
    port: int,
    *,
    leased: bool = False,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM or, if `leased`, until the last lease ends. SIGHUP reads the key file again."""
    require_keys(host, settings.keys)
    raise_descriptor_limit()
    os.umask(UMASK)  # safe: this process only serves. The engine inherits the umask.

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stop.set)
        if settings.keys.needed:  # else SIGHUP ends the service, as a closed terminal should
            loop.add_signal_handler(signal.SIGHUP, _reload, settings.keys)
        await _serve(settings, host, port, stop, leased=leased, on_ready=on_ready)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve())


def _reload(keys: Keys) -> None:
    try:
        names = keys.reload()
    except ConfigError as error:
        logger.warning("The keys stay as they were: %s", error)
    else:
        logger.warning("The key file was read again; it has keys of %s", ", ".join(names))


class ServiceThread:
    """A service in a thread of this process, for tests and tools; it listens on a loopback port, by default a free one."""

    def __init__(self, settings: Settings, port: int = 0) -> None:
        self._settings = settings
        self._port = port
        self._ready: Future[str] = Future()
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="tinkex-service", daemon=True)

    def start(self) -> str:
        """Start the service and return its URL."""
        self._thread.start()
        return self._ready.result()

    def close(self) -> None:
        self._stop()
        self._thread.join()

    def _run(self) -> None:
        async def serve() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            self._stop = lambda: loop.is_closed() or loop.call_soon_threadsafe(stop.set)
            await _serve(
                self._settings, "127.0.0.1", self._port, stop, on_ready=self._ready.set_result
            )

        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    settings: Settings,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    leased: bool = False,
    on_ready: Callable[[str], None],
) -> None:
    _make_directory(settings.data_dir)
    listening = _listen(host, port)  # first: a port in use is reported before models are loaded
    service = Service(settings)
    stopped = asyncio.ensure_future(stop.wait())
    address = settings.data_dir / ADDRESS_FILE
    try:
        if not await _started(service, stopped):
            return
        # Only a leased service stops with its last holder; others accept leases, too.
        leases = Leases(stop.set if leased else lambda: None)
        server = _Server(build_app(service, leases), _connection_limits(settings))
        stopped.add_done_callback(server.leave)
        url = _url(listening)
        _write_address(address, url)
        if leased:
            leases.start()
        try:
            await server.serve_on(listening, lambda: on_ready(url))
        finally:
            address.unlink(missing_ok=True)
    finally:
        stopped.cancel()
        listening.close()
        await service.stop()


async def _started(service: Service, stopped: asyncio.Future[Any]) -> bool:
    """Start a service; False if it was asked to stop before it had started."""
    starting = asyncio.ensure_future(service.start())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return False


def _connection_limits(settings: Settings) -> ConnectionLimits:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConnectionLimits(
        max_connections=affordable_connections(settings.max_connections, soft),
        max_head_bytes=settings.max_head_bytes,
        head_timeout=settings.head_timeout,
        body_timeout=settings.body_timeout,
        send_timeout=settings.send_timeout,
    )


class _Server(uvicorn.Server):
    """uvicorn with bounded connections, without its signal handling, and with a callback once it listens."""

    def __init__(self, app: object, limits: ConnectionLimits) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=partial(BoundedProtocol, limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_level="error",  # at lower levels any peer could fill the log with invalid requests
                access_log=False,
                # Longer than clients keep connections, so that no request is sent on a closing one.
                timeout_keep_alive=300,
                timeout_graceful_shutdown=1,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # ten ticks are a second
            close_overdue(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def leave(self, _: object) -> None:
        self.should_exit = True

    async def serve_on(self, listening: socket.socket, on_ready: Callable[[], None]) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[listening])
        on_ready()
        await self.main_loop()
        # Open polls are closed without a log message: their clients retry.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await self.shutdown(sockets=[listening])


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}", field="data_dir") from None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {why}; choose another with --port", field="port"
        ) from None
    listening.listen(2048)
    listening.setblocking(False)
    return listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_address(path: Path, url: str) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.touch(0o600)
    scratch.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    scratch.replace(path)
