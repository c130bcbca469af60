"""A small HTTP/1.1 client for services without TLS: the local service, and clusters on a private network.

It has the same methods as `pyqwest.Client` but serves one event loop. It takes a quarter of the CPU time per request,
because no data crosses a thread (docs/decisions/0004). TLS, HTTP/2 and proxies stay with pyqwest.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias, cast
from urllib.parse import quote, urlsplit

import httptools

from tinkex._wire.compression import decode_body
from tinkex.errors import DecodeError, InvalidInputError

__all__ = ["HTTP1Client", "HTTP1Response"]

#: Bodies above this many bytes are written separately, to avoid copying them next to the headers.
_JOIN_LIMIT: Final = 1 << 16
#: A stream stops reading from its socket while more than this many bytes are unread.
_STREAM_BUFFER: Final = 1 << 20


@dataclass(slots=True)
class HTTP1Response:
    """A complete answer; header names are lower-case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(slots=True)
class _Origin:
    host: str
    port: int
    idle: deque[_Connection] = field(default_factory=deque)


class _StaleConnectionError(ConnectionError):
    """A kept-alive connection was closed before any byte of the answer arrived; another connection is tried."""


Answer: TypeAlias = Coroutine[Any, Any, HTTP1Response]


class HTTP1Client:
    """Sends requests over kept-alive connections. Used on one event loop only."""

    def __init__(self, *, connect_timeout: float = 5.0, max_idle: int = 100) -> None:
        self._connect_timeout = connect_timeout
        self._max_idle = max_idle
        self._origins: dict[tuple[str, int], _Origin] = {}
        self._open: set[_Connection] = set()
        self._closed = False

    # Not coroutines: while an answer is awaited, `_request` is the only frame of this client.
    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        return self._request("GET", url, headers, None)

    def post(self, url: str, headers: Mapping[str, str], content: bytes | None = None) -> Answer:
        return self._request("POST", url, headers, content or b"")

    def put(self, url: str, headers: Mapping[str, str], content: bytes | None = None) -> Answer:
        return self._request("PUT", url, headers, content or b"")

    def delete(self, url: str, headers: Mapping[str, str]) -> Answer:
        return self._request("DELETE", url, headers, None)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
    ) -> AsyncIterator[HTTP1Stream]:
        """An answer whose `content` can be iterated while it arrives.

        It uses its own connection, so the caller may be on another event loop than other requests.
        """
        origin, head = self._prepare(method, url, headers, content)
        connection = await self._open_connection(origin)
        try:
            response = await connection.stream(head, content)
            encoding = response.headers.get("content-encoding", "identity")
            # The request asked for no encoding, and a partial body cannot be decoded.
            if encoding != "identity" and response.status < 400:
                raise ConnectionError(f"the stream is encoded as {encoding}")
            yield response
        finally:
            connection.close()

    def drop_idle(self) -> None:
        """Close all idle connections. Called after a request timed out.

        If the network path died, for example while the machine slept, all idle connections are dead. Without this,
        each of the next requests would time out on one of them.
        """
        for origin in self._origins.values():
            for kept in list(origin.idle):
                kept.close()
            origin.idle.clear()

    async def aclose(self) -> None:
        self._closed = True
        for connection in list(self._open):
            connection.close()
        self._origins.clear()

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> HTTP1Response:
        origin, head = self._prepare(method, url, headers, content)
        while True:
            kept = bool(origin.idle)
            connection = origin.idle.pop() if kept else await self._connect(origin)
            try:
                response: HTTP1Response = await connection.exchange(head, content)
                break
            except BaseException as error:
                connection.close()  # also if cancelled: the unread answer may still arrive
                if kept and isinstance(error, _StaleConnectionError):
                    continue  # the service closed it while it was idle: try the next one
                raise
        if connection.reusable and len(origin.idle) < self._max_idle:
            origin.idle.append(connection)
        else:
            connection.close()
        encoding = response.headers.get("content-encoding")
        if encoding:
            try:
                response.content = decode_body(response.content, encoding)
            except DecodeError as error:
                if response.status < 400:  # for an error answer the status is enough
                    raise ConnectionError(f"the body does not decode: {error}") from error
        return response

    def _prepare(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> tuple[_Origin, bytes]:
        host, port, authority, target = _split(url)
        origin = self._origins.get((host, port))
        if origin is None:
            origin = self._origins[host, port] = _Origin(host, port)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if not lines.count("\n") == lines.count("\r") == len(headers) or "\0" in lines:
            raise InvalidInputError("a header holds a line break", field="headers")
        host = "" if "host" in headers else f"host: {authority}\r\n"
        length = "" if content is None else f"content-length: {len(content)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\n{host}{lines}{length}\r\n"
        try:
            return origin, head.encode("latin-1")
        except UnicodeEncodeError:  # the value is not quoted: it may be a secret
            raise InvalidInputError("a header is not Latin-1 text", field="headers") from None

    async def _connect(self, origin: _Origin) -> _Connection:
        """A new connection that is kept after its first exchange."""
        connection = await self._open_connection(origin)
        self._open.add(connection)
        connection.on_lost = self._forget
        connection.origin = origin
        return connection

    async def _open_connection(self, origin: _Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout) as limit:
                _, connection = await loop.create_connection(_Connection, origin.host, origin.port)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no connection within {self._connect_timeout:g} s") from error
        except UnicodeError as error:  # Python raises it for an impossible host name
            raise OSError(f"not a valid host name: {origin.host!r:.80}") from error
        if self._closed:
            connection.close()
            raise ConnectionError("the client is closed")
        return connection

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection.origin is not None and connection in connection.origin.idle:
            connection.origin.idle.remove(connection)


@lru_cache(maxsize=1024)
def _split(url: str) -> tuple[str, int, str, str]:
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise InvalidInputError(f"not an http address: {url!r:.200}", field="url")
    host = parts.hostname or ""
    # Escapes only characters that a request line forbids; the caller's own escapes are kept.
    target = quote(parts.path, safe="/%:@!$&'()*+,;=~") or "/"
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?[]")
    return host, parts.port or 80, parts.netloc.rpartition("@")[2], target


class _Connection(asyncio.Protocol):
    """One socket and its current exchange, if any. The parser calls the `on_…` methods."""

    origin: _Origin | None = None

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: asyncio.Future[Any] | None = None
        self._stream: HTTP1Stream | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._exchanges = 0
        self._heard = False
        self._in_body = False
        self._closed = False
        self._paused = False
        self.reusable = False
        self.on_lost: Any = None

    async def stream(self, head: bytes, content: bytes | None) -> HTTP1Stream:
        self._stream = HTTP1Stream(self)
        opened: HTTP1Stream = await self.exchange(head, content)
        return opened

    def exchange(self, head: bytes, content: bytes | None) -> asyncio.Future[Any]:
        """Send a request; the future is its answer."""
        if self._closed or self._transport is None:
            raise _StaleConnectionError("the connection is closed")
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._headers, self._body = {}, []
        self._heard = self._in_body = self.reusable = False
        self._exchanges += 1
        if not content:
            self._transport.write(head)
        elif len(content) <= _JOIN_LIMIT:
            self._transport.write(head + content)
        else:
            self._transport.write(head)
            self._transport.write(content)
        return answer

    def close(self) -> None:
        if not self._closed and self._transport is not None:
            self._transport.abort()  # `close` would first send the rest of an abandoned upload

    def pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # -- called by asyncio -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ConnectionError("the service switched protocols"))
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))
        if self._answer is None and self._stream is None and not self.reusable:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        if self._in_body and error is None and self._ends_with_connection():
            self._finish()
        elif self._answer is not None or self._stream is not None:
            if self._exchanges > 1 and not self._heard:
                self._fail(_StaleConnectionError("the service closed a kept connection"))
            else:
                what = "in the middle of an answer" if self._heard else "without an answer"
                self._fail(
                    ConnectionError(f"the connection was closed {what}: {error or 'end of file'}")
                )
        if self.on_lost is not None:
            self.on_lost(self)

    # -- called by the parser ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answer is None and self._stream is None:
            # If it were taken for the answer to the next request, all later answers would be off by one.
            raise ConnectionError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._in_body = True
        if self._stream is not None:
            self._stream.status, self._stream.headers = (
                self._parser.get_status_code(),
                self._headers,
            )
            self._deliver(self._stream)

    def on_body(self, body: bytes) -> None:
        if self._stream is not None:
            self._stream.feed(body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # interim, such as "100 Continue"
            self._headers = {}
            return
        self.reusable = self._parser.should_keep_alive() and not self._closed
        self._finish()

    def _ends_with_connection(self) -> bool:
        """Whether the body has no declared length, so that closing the connection ends it."""
        return (
            "content-length" not in self._headers
            and "chunked" not in self._headers.get("transfer-encoding", "").lower()
        )

    def _finish(self) -> None:
        self._in_body = False
        if self._stream is not None:
            self._stream.feed(None)
            self._stream = None
            return
        body, self._body = self._body, []  # do not keep the body while the connection is idle
        content = body[0] if len(body) == 1 else b"".join(body)
        self._deliver(HTTP1Response(self._parser.get_status_code(), self._headers, content))

    def _deliver(self, answer: Any) -> None:
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, error: Exception) -> None:
        self.reusable = self._in_body = False
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
        elif self._stream is not None:
            self._stream.feed(error)
        self._stream = None


class HTTP1Stream:
    """An answer that is still arriving; `content` yields its parts once."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._connection = connection
        self._parts: deque[bytes | Exception | None] = deque()
        self._buffered = 0
        self._arrived = asyncio.Event()

    def feed(self, part: bytes | Exception | None) -> None:
        """Add the next part of the body, None for its end, or an error."""
        self._parts.append(part)
        if isinstance(part, bytes):
            self._buffered += len(part)
            if self._buffered > _STREAM_BUFFER:
                self._connection.pause()
        self._arrived.set()

    @property
    async def content(self) -> AsyncIterator[bytes]:
        while True:
            while not self._parts:
                self._arrived.clear()
                await self._arrived.wait()
            part = self._parts.popleft()
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            self._buffered -= len(part)
            if self._buffered <= _STREAM_BUFFER // 2:
                self._connection.resume()
            yield part
