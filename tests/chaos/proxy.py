"""A proxy between client and service that injects random faults, reproducible by a seed.

Faults are drawn in the order in which requests arrive, so the same seed and traffic give the same faults. The worst
faults happen after the service has handled the request: the work is done, but the response is lost.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from tests.in_thread import ServerInThread

__all__ = ["Fault", "FaultPlan", "FaultyProxy"]


class Fault(StrEnum):
    RESET_BEFORE = "reset before the request was forwarded"
    RESET_AFTER = "reset after the request was forwarded"
    SILENT = "connection half open, no response"
    CUT = "response cut off"
    SLOW = "slow response"
    TIMEOUT = "408"
    CONFLICT = "409"
    GONE = "410"
    BUSY = "429"
    BROKEN = "5xx"


#: Sent by the proxy instead of the service's response; half of these requests are forwarded anyway.
_STATUSES = {
    Fault.TIMEOUT: (408,),
    Fault.CONFLICT: (409,),
    Fault.GONE: (410,),
    Fault.BUSY: (429,),
    Fault.BROKEN: (500, 502, 503, 504, 529),
}
#: Only these endpoints can return 410.
_MAY_BE_GONE = ("/retrieve_future", "/session_heartbeat")


@dataclass
class FaultPlan:
    """Chooses the fault of each request."""

    seed: int = 0
    share: float = 0.05  # of requests, for each kind of fault
    kinds: Sequence[Fault] = tuple(Fault)
    #: After this many requests the port is closed for `outage` seconds, like a service restart; 0 means never.
    outage_every: int = 0
    outage: float = 0.2
    slow: float = 0.1
    chance: random.Random = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def choose(self, path: str) -> Fault | None:
        self.counts["requests"] += 1
        drawn = self.chance.random() / self.share
        if drawn >= len(self.kinds):
            return None
        fault = self.kinds[int(drawn)]
        if fault is Fault.GONE and not path.endswith(_MAY_BE_GONE):
            return None
        self.counts[fault.value] += 1
        return fault

    @property
    def outage_due(self) -> bool:
        return bool(self.outage_every) and self.counts["requests"] % self.outage_every == 0


@dataclass(frozen=True)
class _Message:
    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode("latin-1").partition("?")[0]


class FaultyProxy(ServerInThread):
    """Forwards requests to a service and injects the plan's faults."""

    def __init__(self, service_url: str, plan: FaultPlan) -> None:
        super().__init__()
        address = urlsplit(service_url)
        self._host, self._service_port = address.hostname or "", address.port or 80
        self.plan = plan
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None
        self._outage: asyncio.Task[None] | None = None

    async def _listen(self) -> None:
        self._listening = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, backlog=2048
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._outage is not None:
            await self._outage
        await self._hang_up()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await _turns()

    async def _hang_up(self) -> None:
        assert self._listening is not None
        # asyncio calls `_accept` some loop iterations after accepting a connection; until then nothing would close it.
        self._loop.remove_reader(self._listening.sockets[0])
        await _turns()
        self._listening.close()
        for writer in list(self._writers):
            _reset(writer)

    async def _be_away(self) -> None:
        """Reset all connections and close the port for a while."""
        self.plan.counts["outages"] += 1
        await self._hang_up()
        await asyncio.sleep(self.plan.outage)
        await self._listen()
        self._outage = None

    # -- one connection ------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._writers.add(writer)
        upstream = _Upstream(self._host, self._service_port)
        try:
            while (request := await _read(reader)) is not None:
                if not await self._answer(request, upstream, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client or the service has closed the connection, or the proxy stops
        finally:
            self._serving.discard(task)
            self._writers.discard(writer)
            upstream.close()
            writer.transport.abort()

    async def _answer(
        self,
        request: _Message,
        upstream: _Upstream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Handle one request, with its fault; return whether the connection stays open."""
        plan = self.plan
        fault = plan.choose(request.path)
        if plan.outage_due and self._outage is None:
            self._outage = asyncio.ensure_future(self._be_away())
        before = fault is Fault.RESET_BEFORE or (
            (fault is Fault.SILENT or fault in _STATUSES) and plan.chance.random() < 0.5
        )
        answer = None if before else await upstream.ask(request)
        if answer is not None:
            plan.counts["forwarded to the service"] += 1
        if fault in {Fault.RESET_BEFORE, Fault.RESET_AFTER}:
            _reset(writer)
            return False
        if fault is Fault.SILENT:
            await reader.read()  # returns when the client closes the connection
            return False
        if fault in _STATUSES:
            answer = _status(plan.chance.choice(_STATUSES[fault]))
        assert answer is not None
        if fault is Fault.CUT:
            whole = answer.head + answer.body
            writer.write(whole[: plan.chance.randrange(1, len(whole))])
            await writer.drain()
            return False
        if fault is Fault.SLOW:
            writer.write(answer.head)
            await asyncio.sleep(plan.slow)
            writer.write(answer.body)
        else:
            writer.write(answer.head + answer.body)
        await writer.drain()
        return True


@dataclass
class _Upstream:
    """The connection to the service for one client connection."""

    host: str
    port: int
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: _Message) -> _Message:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self._streams
        writer.write(request.head + request.body)
        await writer.drain()
        answer = await _read(reader)
        if answer is None:
            raise ConnectionResetError("the service closed the connection")
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()


async def _read(reader: asyncio.StreamReader) -> _Message | None:
    """Read a whole message; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as end:
        if end.partial:
            raise
        return None
    fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:] if b":" in line)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return _Message(head, await _chunks(reader))
    return _Message(head, await reader.readexactly(int(fields.get(b"content-length", b"0"))))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while True:
        size = await reader.readuntil(b"\r\n")
        parts += [size, await reader.readexactly(int(size.partition(b";")[0], 16) + 2)]
        if parts[-1] == b"\r\n":
            return b"".join(parts)


def _status(status: int) -> _Message:
    body = b'{"detail": "sent by the proxy"}'
    head = f"HTTP/1.1 {status} Fault\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return _Message(head.encode(), body)


async def _turns() -> None:
    """Let the event loop run its pending callbacks."""
    for _ in range(10):
        await asyncio.sleep(0)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a RST, like a host that has restarted."""
    raw = writer.get_extra_info("socket")
    if raw is not None and not writer.transport.is_closing():
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
