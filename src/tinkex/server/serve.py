"""Running a service: in the foreground until a signal, or for as long as somebody holds a lease."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn

from tinkex.errors import ConfigError

from .app import build_app
from .auth import require_keys
from .leases import Leases
from .service import Service, Settings

__all__ = ["ADDRESS_FILE", "run"]

#: In the data directory of a running service: where it can be reached.
ADDRESS_FILE: Final = "service.json"


def run(
    settings: Settings,
    host: str,
    port: int,
    *,
    leased: bool = False,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM, or, if `leased`, until the last holder has gone."""
    require_keys(host, settings.keys)
    factory = _loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(settings, host, port, leased=leased, on_ready=on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    settings: Settings, host: str, port: int, *, leased: bool, on_ready: Callable[[str], None]
) -> None:
    listening = _listen(host, port)  # first of all: a taken port should not cost a model's loading
    service = Service(settings)
    server: _Server | None = None

    def leave() -> None:
        if server is not None:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(service.start())
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        await service.stop()
        return
    leases = Leases(leave)
    config = uvicorn.Config(
        build_app(service, leases),
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        # Longer than clients keep theirs, so that no request meets a connection that is closing.
        timeout_keep_alive=300,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, leave)
    address = settings.data_dir / ADDRESS_FILE
    url = _url(listening)
    try:
        _write_address(address, url)
        if leased:
            leases.start()
        await server.serve_until_told(listening, lambda: on_ready(url))
    finally:
        address.unlink(missing_ok=True)
        await service.stop()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, and with a word when it listens."""

    async def serve_until_told(
        self, listening: socket.socket, on_ready: Callable[[], None]
    ) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[listening])
        on_ready()
        await self.main_loop()
        # Polls that are held open need not be waited for: their clients ask again.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await self.shutdown(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port",
            field="port",
        ) from None
    listening.listen(2048)
    listening.setblocking(False)
    return listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_address(path: Path, url: str) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    scratch.replace(path)
