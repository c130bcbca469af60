"""Limits on size and time of connections whose peer is not authenticated yet.

uvicorn bounds neither the size of a request's head nor the time it takes. `BoundedProtocol` measures both, and
`close_overdue` closes connections that exceed a deadline. One check per second covers all connections, which is
cheaper than a timer per request.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = [
    "BoundedProtocol",
    "ConnectionLimits",
    "affordable_connections",
    "close_overdue",
    "raise_descriptor_limit",
]

#: Header lines of one request. Every header lookup scans all of them.
MAX_HEADERS: Final = 256
#: Bytes of a request's path and query.
MAX_TARGET_BYTES: Final = 16 << 10
#: Requests that may wait on a connection while an earlier one is being answered.
MAX_PIPELINED: Final = 32
#: The peer must send at least this many bytes of a body, or its end, in each period of `body_timeout`.
MIN_BODY_BYTES: Final = 16 << 10
#: The peer must take at least this many bytes of an answer, or its rest, in each period of `send_timeout`.
MIN_TAKEN_BYTES: Final = 64 << 10
#: Bytes of a body that are read and dropped after its request was refused. Closing the connection while the peer
#: still sends would reset it, and the peer might not see the response.
MAX_DROPPED_BYTES: Final = 64 << 20
#: File descriptors for everything but connections: database, journal, checkpoints, the engine's pipes.
_OTHER_DESCRIPTORS: Final = 128
#: A higher limit would only let a flood of connections take more memory.
_MAX_DESCRIPTORS: Final = 65_536


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits for connections; times are in seconds."""

    max_connections: int = 10_000
    max_head_bytes: int = 64 << 10
    head_timeout: float = 20.0
    body_timeout: float = 30.0
    send_timeout: float = 60.0


class Phase(Enum):
    """What a connection is waiting for."""

    HEAD = "the head of a request"
    BODY = "the body of a request"
    ANSWER = "the service"
    IDLE = "the next request"


class _RefusedError(Exception):
    """Stops the parser: the response is written and the connection is closing."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits on size and time."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self.phase = Phase.HEAD
        self.since = self.loop.time()
        self._unparsed = 0  # bytes since the parser last finished a head or a part of a body
        self._has_begun = False
        self._head_bytes = 0
        self._received = 0  # bytes of the body in this period
        self._dropped = 0
        # Since the start of this period the peer has not had the whole answer.
        self._taking_since, self._taken_before = self.since, 0

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = self.loop.time()

    # -- the transport -----------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._counting = _CountingTransport(transport)
        super().connection_made(self._counting)  # type: ignore[arg-type]
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            self.refuse(503, "All connections of the service are in use; try again later.")

    @property
    def waits_for_peer(self) -> bool:
        """Whether the service is not working on a request of this connection, so closing it loses no work."""
        refused = self.phase is Phase.BODY and self.cycle.response_complete
        return refused or self.phase in {Phase.HEAD, Phase.IDLE}

    def _make_room(self) -> bool:
        """Close the connections that have waited longest for their peer; return whether there were any.

        Closes several at once (1% of the limit), because finding them scans all connections.
        """
        waiting = [
            other
            for other in self.connections
            if isinstance(other, BoundedProtocol) and other is not self and other.waits_for_peer
        ]
        count = max(1, self._limits.max_connections // 100)
        for oldest in nsmallest(count, waiting, key=lambda other: other.since):
            self.connections.discard(
                oldest
            )  # now: otherwise it counts until its transport is closed
            oldest.transport.close()
        return bool(waiting)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.phase is Phase.IDLE:  # also for bytes that are not the start of a request
            self._enter(Phase.HEAD)
        self._unparsed += len(data)
        super().data_received(data)
        # Checked after parsing: the data may end one request and start another.
        if self._unparsed > self._limits.max_head_bytes and not self.transport.is_closing():
            self._refuse_head()

    def _refuse_head(self) -> None:
        self.refuse(
            431,
            f"The head of a request may have at most {self._limits.max_head_bytes} bytes and {MAX_HEADERS} headers. "
            "The operator of the service raises the limit with --set max_head_bytes=BYTES.",
        )

    def refuse(self, status: int, reason: str) -> None:
        """Respond to the request that is being received with an error, and close the connection."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering or not self.cycle.response_started:
            category = "user" if status < 500 else "server"
            body = json.dumps({"detail": reason, "category": category}).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)

    # -- the parser --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._enter(Phase.HEAD)
        self._has_begun = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is not Phase.HEAD:  # a trailer: not used
            return
        self._head_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + self._head_bytes
        if size > self._limits.max_head_bytes or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
        elif len(self.url) > MAX_TARGET_BYTES:
            self.refuse(414, f"Path and query may have at most {MAX_TARGET_BYTES} bytes.")
        elif len(self.pipeline) >= MAX_PIPELINED:
            self.refuse(400, f"At most {MAX_PIPELINED} requests may wait on one connection.")
        if self.transport.is_closing():
            raise _RefusedError
        self._enter(Phase.BODY)
        self._unparsed = self._received = self._dropped = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._received += len(body)
        if self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > MAX_DROPPED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._has_begun = False
        self._enter(Phase.IDLE if self.cycle.response_complete else Phase.ANSWER)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.phase is Phase.ANSWER:
            self._enter(Phase.ANSWER if self.pipeline else Phase.IDLE)
        super().on_response_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: any peer could fill the log. The request is answered as if it had no upgrade header."""

    # -- deadlines ---------------------------------------------------------------------------

    def close_if_overdue(self, now: float) -> None:
        """Close the connection if its peer took too long to send or to receive."""
        if self._is_slow_to_take(now):
            self.transport.abort()
        elif self.phase is Phase.HEAD and now - self.since > self._limits.head_timeout:
            if self._has_begun:
                self.refuse(408, "The head of the request took too long.")
            else:
                self.transport.close()
        elif self.phase is Phase.IDLE and now - self.since > self.timeout_keep_alive:
            # uvicorn has a timer for this, but does not start it when a body ends after its response.
            self.transport.close()
        elif self.phase is Phase.BODY and self._is_slow(now):
            if self.cycle.response_complete:
                self.transport.close()
            else:
                self.refuse(408, "The body of the request arrived too slowly.")

    def _is_slow(self, now: float) -> bool:
        if self.flow.read_paused:  # flow control: the service itself is not reading
            self.since, self._received = now, 0
        if now - self.since <= self._limits.body_timeout:
            return False
        slow = self._received < MIN_BODY_BYTES
        self.since, self._received = now, 0
        return slow

    def _is_slow_to_take(self, now: float) -> bool:
        unsent = self.transport.get_write_buffer_size()
        taken = self._counting.written - unsent
        if unsent and now - self._taking_since <= self._limits.send_timeout:
            return False
        slow = unsent > 0 and taken - self._taken_before < MIN_TAKEN_BYTES
        self._taking_since, self._taken_before = now, taken
        return slow


class _CountingTransport:
    """A transport that counts the bytes written to it, so that it is known how many have left its buffer."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def close_overdue(connections: Iterable[object], now: float) -> None:
    """Close connections whose peer exceeded a deadline."""
    for connection in list(connections):
        if isinstance(connection, BoundedProtocol):
            connection.close_if_overdue(now)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most `_MAX_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def affordable_connections(wanted: int, soft: int) -> int:
    """The number of connections that leaves enough of `soft` file descriptors for other files."""
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _OTHER_DESCRIPTORS, soft * 3 // 4))
