"""A real HTTP server on loopback that sends scripted answers and records its requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httptools

from tinkex._retry import Clock

from .in_thread import ServerInThread


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """An answer; `body` is JSON data or bytes."""

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    wait_for: threading.Event | None = None  # delays the answer until the test sets it

    def encode(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        headers = {
            "content-type": self.content_type,
            "content-length": str(len(body)),
            **self.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {self.status} Scripted\r\n{lines}\r\n".encode() + body


@dataclass(frozen=True)
class Raw:
    """Raw bytes to send; then the connection is closed."""

    data: bytes = b""


class Hang:
    """Never answer."""


Reply = Answer | Raw | Hang
Handler = Callable[[Request], Reply]


def promise(request_id: str = "r-1", **more: Any) -> Answer:
    return Answer({"request_id": request_id, **more})


class ScriptedServer(ServerInThread):
    """Routes are `"POST /api/v1/asample"`; the last reply of a script is repeated forever.

    Calls that every client makes automatically have default answers, unless a test scripts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self._scripts: dict[str, deque[Reply | Handler]] = {}
        self._arrivals: dict[str, int] = defaultdict(int)
        self._changed = threading.Condition()
        self._connections: set[_ServerConnection] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self.open_connections = 0
        self.on("POST /api/v1/client/config", Answer({}))
        self.on("POST /api/v1/client/dynamic_config", Answer({}))
        self.on("POST /api/v1/create_session", Answer({"session_id": "s-1"}))
        self.on("POST /api/v1/session_heartbeat", Answer({}))
        self.on("POST /api/v1/sessions/s-1/finish", Answer({}))
        self.on("POST /api/v1/create_model", promise("model"))
        self.on(
            "POST /api/v1/create_sampling_session", Answer({"sampling_session_id": "s-1:sample:0"})
        )
        self.on_future("model", Answer({"model_id": "s-1:train:0"}))

    # -- scripting ---------------------------------------------------------------------------

    def on(self, route: str, *replies: Reply | Handler) -> None:
        self._scripts[route] = deque(replies)

    def on_future(self, request_id: str, *replies: Reply | Handler) -> None:
        """Script the polls of one promise."""
        self.on(f"future {request_id}", *replies)

    def asked(self, route: str) -> list[Request]:
        method, path = route.split(" ", 1)
        return [
            request for request in self.requests if (request.method, request.path) == (method, path)
        ]

    def wait_for(self, route: str, count: int = 1, timeout: float = 60.0) -> list[Request]:
        """Block until `route` has received `count` requests."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.asked(route)) >= count, timeout)
        assert arrived, f"{route} was asked {len(self.asked(route))} times, not {count}"
        return self.asked(route)

    # -- running -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(
            lambda: _ServerConnection(self), "127.0.0.1", 0
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        # asyncio handles a connection in a separate task, which starts some iterations after the accept. Closing
        # the server before that breaks the task and leaks the socket. So stop accepting first.
        self._loop.remove_reader(self._server.sockets[0])
        accepting = asyncio.all_tasks() - self._answering - {asyncio.current_task()}
        await asyncio.gather(*accepting)
        self._server.close()
        for connection in self._connections:
            connection.abort()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await asyncio.gather(*[connection.lost for connection in self._connections])

    def reply_to(self, request: Request) -> Reply:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
            script = self._scripts.get(self._route(request))
            if not script:
                return Answer({"detail": f"no script for {request.method} {request.path}"}, 404)
            reply = script.popleft() if len(script) > 1 else script[0]
        return reply(request) if callable(reply) and not isinstance(reply, Hang | type) else reply  # type: ignore[return-value]

    def _route(self, request: Request) -> str:
        if request.path == "/api/v1/retrieve_future":
            return f"future {request.json['request_id']}"
        return f"{request.method} {request.path}"


class _ServerConnection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self.lost = asyncio.get_running_loop().create_future()
        self._server._connections.add(self)
        self._server.open_connections += 1
        self._reset()

    def connection_lost(self, error: Exception | None) -> None:
        self._server._connections.discard(self)
        self._server.open_connections -= 1
        self.lost.set_result(None)

    def abort(self) -> None:
        self._transport.abort()

    def _reset(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self._headers: dict[str, str] = {}

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        parts = urlsplit(self._url.decode())
        request = Request(
            self._parser.get_method().decode(),
            parts.path,
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            self._headers,
            self._body,
        )
        self._url, self._headers, self._body = b"", {}, b""
        task = asyncio.ensure_future(self._answer(request))
        self._server._answering.add(task)
        task.add_done_callback(self._server._answering.discard)

    async def _answer(self, request: Request) -> None:
        reply = self._server.reply_to(request)
        if isinstance(reply, Answer):
            if reply.wait_for is not None:
                await asyncio.to_thread(reply.wait_for.wait, 120)
            self._transport.write(reply.encode())
        elif isinstance(reply, Raw):
            self._transport.write(reply.data)
            self._transport.close()


class FakeClock(Clock):
    """A clock that moves only while something sleeps: short sleeps return at once, long ones wait for `advance`.

    Sleeps of `long` seconds or more are those of background work between rounds (heartbeats every 10 s); if they
    returned at once, it would spin. `slept` lists the short sleeps.
    """

    def __init__(self, *, long: float = 10.0, chance: float = 0.0) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._long = long
        self._sleepers: list[tuple[float, asyncio.Event, asyncio.AbstractEventLoop]] = []
        self._lock = threading.Lock()
        super().__init__(
            monotonic=lambda: self.now,
            wall=lambda: self.now,
            sleep=self._sleep,
            random=lambda: chance,
        )

    def __setattr__(self, name: str, value: Any) -> None:  # the base class is frozen
        object.__setattr__(self, name, value)

    async def _sleep(self, seconds: float) -> None:
        if seconds < self._long:
            self.now += seconds
            self.slept.append(seconds)
            await asyncio.sleep(0)
            return
        woken = asyncio.Event()
        with self._lock:
            self._sleepers.append((self.now + seconds, woken, asyncio.get_running_loop()))
        await woken.wait()

    def advance(self, seconds: float) -> None:
        """Move time forward and wake the sleepers whose time has come."""
        self.now += seconds
        with self._lock:
            due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self.now]
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self.now]
        for _, woken, loop in due:
            loop.call_soon_threadsafe(woken.set)

    @property
    def sleeping(self) -> int:
        with self._lock:
            return len(self._sleepers)
