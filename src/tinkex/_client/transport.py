"""HTTP transport: connection pools by purpose, headers, authentication, retries and events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import platform
import re
import secrets
import sys
import traceback
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from tinkex import types
from tinkex._retry import Clock, Tried, retrying
from tinkex._version import PARITY_VERSION, __version__
from tinkex._wire.compression import compress
from tinkex._wire.failures import error_from_response
from tinkex._wire.lazy_codecs import json_codec, proto_codec
from tinkex._wire.media_types import PROTOBUF
from tinkex._wire.operations import Body, Operation, Pool, operation, query_of
from tinkex._wire.transform import given, is_omit
from tinkex.config import REDACTED, Config, redact_headers
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    ClientClosedError,
    ConfigError,
    DecodeError,
    HTTPRequest,
    HTTPResponse,
    InvalidInputError,
    TinkerError,
)
from tinkex.telemetry.bus import emit, tell, wants
from tinkex.telemetry.calls import attempt_events, current_call, next_id
from tinkex.telemetry.lazy_events import event_types

from .auth import Auth
from .breaker import Circuits
from .budget import Budget, slots
from .http1 import HTTP1Client, HTTP1Response
from .notices import Notices, logger
from .retry import HTTPRetryPolicy

__all__ = ["RawResponse", "Transport", "clean_headers"]

R = TypeVar("R")

#: Connections per pool over HTTP/1.1, where each exchange needs its own. Sampling starts with `pool_size` connections,
#: because more than about 50 busy sockets reduce throughput, and adds more when the service is slow to accept. Polls of
#: samples use half of the process's file limit: the poll of a finished sample must not wait for an unfinished one.
_CONNECTIONS: Final = {
    Pool.SESSION: 16,
    Pool.REST: 50,
    Pool.TRAINING: 16,
    Pool.FUTURES: 400,
    Pool.TELEMETRY: 4,
}
#: Seconds a sample waits for a connection before more are opened.
_PATIENCE: Final = 1.0
#: Exchanges in flight per pool over HTTP/2, where they share a connection.
_STREAMS: Final = 1000
#: More than are ever in flight; samples have their own limit.
_UNLIMITED: Final = 1_000_000_000
#: The circuit breaker of each pool. Polls have none, because they wait for calls already started; telemetry has none,
#: because it belongs to no call.
_CIRCUITS: Final = {
    Pool.SESSION: "session",
    Pool.REST: "session",
    Pool.TRAINING: "training",
    Pool.SAMPLING: "sampling",
}
#: The operations without which no session is open.
_OPENING: Final = frozenset({"client_config", "create_session"})


class RawResponse(Protocol):
    """The answer of an HTTP client."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> bytes: ...


class Transport:
    """Sends operations to one service with one configuration."""

    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or Clock()
        self.auth = Auth(config, self.clock)
        # Userinfo moves into a header, so that no URL in a log or error contains a password.
        self._base_url, userinfo = _split_userinfo(config.base_url)
        self.notices = Notices(self._base_url, self.clock)
        #: The last error after which a request that opens the session was retried; None once it succeeded.
        self.unopened: TinkerError | None = None
        self.billing_window = 3600.0
        self._clients: dict[Pool, Any] = {}
        self._borrowed: Any = None  # the caller's own client, which the caller closes
        self._limits: dict[Pool, Budget] = {}
        self._sampling_pools = 1  # sampling connections, as a multiple of `pool_size`
        #: The circuits of `_CIRCUITS`; None without the setting `circuit_breaker`.
        self.circuits = (
            None if config.circuit_breaker is None else Circuits(config.circuit_breaker, self.clock)
        )
        self._headers = _default_headers(config, userinfo)
        clean_headers({"x-api-key": config.api_key or ""})
        self._query = dict(config.default_query)
        self._nonce = secrets.token_hex(8)
        self._counter = itertools.count()
        self._multiplexed = urlsplit(config.base_url).scheme == "https"
        self._closed = False
        #: Metadata of request events that belong to no call.
        self.metadata: Mapping[str, Any] = dict(config.user_metadata or {})
        self._add_trace_context = _trace_context(config)

    # -- operations --------------------------------------------------------------------------

    async def call(
        self,
        operation: Operation[R],
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
        policy: HTTPRetryPolicy | None = None,
    ) -> R:
        """Send an operation and decode its answer."""
        response = await self.send(
            operation, request, path=path, headers=headers, deadline=deadline, policy=policy
        )
        return self.read(operation, operation.result, response)

    async def send(
        self,
        operation: Operation[object],
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
        policy: HTTPRetryPolicy | None = None,
    ) -> RawResponse:
        """Send an operation, with retries by `policy`. Returns the first successful answer."""
        url = self._url(operation, request, path)
        body, content_headers = encode_body(operation, request)
        extra = {**content_headers, **clean_headers(headers or {})}
        if operation.method != "GET" and "x-idempotency-key" not in extra:
            extra["x-idempotency-key"] = self.new_idempotency_key()
        policy = policy or self.policy_for(operation)

        async def once(attempt: int) -> RawResponse:
            response = await self.exchange(
                operation, url, extra, body, attempt=attempt, deadline=deadline
            )
            if response.status < 300 or (operation.redirects and response.status < 400):
                return response
            raise self.error(operation, url, response)

        waiting = partial(self.tell_waiting, operation.name, policy, deadline)
        return await retrying(once, policy, self.clock, waiting, deadline, attempt_events)

    def policy_for(self, operation: Operation[object]) -> HTTPRetryPolicy:
        billing_window = self.billing_window if operation.pauses else 0.0
        if not operation.retries:
            return HTTPRetryPolicy(0, 0.0, billing_window)
        window = self.config.retry_window if operation.window else 0.0
        config = self.config
        delays = (config.retry_delay_base, config.retry_delay_max)
        return HTTPRetryPolicy(config.max_retries, window, billing_window, *delays)

    def tell_waiting(
        self,
        what: str,
        policy: HTTPRetryPolicy,
        deadline: float | None,
        error: TinkerError,
        tried: Tried,
        wait: float,
    ) -> None:
        """Report that a request failed, when it is retried and when the retries end."""
        if what in _OPENING:
            self.unopened = error
        limit = policy.limit(error)
        if deadline is not None:
            left = deadline - self.clock.monotonic()
            limit = f"giving up when the call's own timeout ends in {left:.0f} s"
        self.notices.retry(what, error, tried.attempt, tried.elapsed, wait, limit)

    def read(self, operation: Operation[object], kind: type[R], response: RawResponse) -> R:
        """Decode the body of a successful answer. A body that does not fit the protocol is an error."""
        if kind is types.EmptyResponse:  # success; the body does not matter
            return kind()
        try:
            return json_codec.decode(response.content, kind)
        except DecodeError as error:
            raise self.misunderstood(operation, response, error) from error

    def read_promise(self, operation: Operation[object], response: RawResponse) -> Any:
        """The promise of a queued operation, or its result if the service answers with it directly."""
        try:
            body = json_codec.parse(response.content)
            promised = isinstance(body, dict) and "request_id" in body
            return json_codec.from_object(
                body, types.UntypedAPIFuture if promised else operation.result
            )
        except DecodeError as error:
            raise self.misunderstood(operation, response, error) from error

    def misunderstood(
        self, operation: Operation[object], response: RawResponse, error: TinkerError
    ) -> APIResponseValidationError:
        url = self._url(operation, None, None, check=False)
        headers = _lower(response.headers)
        return APIResponseValidationError(
            HTTPResponse(response.status, headers, HTTPRequest(operation.method, url)),
            response.content[:2000],
            f"{operation.name}: the service answered {response.status} with "
            f"{headers.get('content-type', 'no content type')} that cannot be decoded: {error}",
            request_id=headers.get("x-request-id"),
        )

    def error(self, operation: Operation[object], url: str, response: RawResponse) -> TinkerError:
        return error_from_response(
            response.status,
            _lower(response.headers),
            response.content,
            HTTPRequest(operation.method, url),
            now=self.clock.wall(),
        )

    # -- one exchange ------------------------------------------------------------------------

    def exchange(
        self,
        operation: Operation[object],
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        attempt: int = 0,
        deadline: float | None = None,
        omitted: Iterable[str] = (),
    ) -> Coroutine[Any, Any, RawResponse]:
        """Send one request and return its answer, whatever the status. Raises only if there is no answer.

        `omitted` names default headers to leave out.
        """
        once = self._exchange(operation, url, headers, body, attempt, deadline, omitted)
        if self.circuits is None or operation.pool not in _CIRCUITS:
            return once
        return self.circuits.of(_CIRCUITS[operation.pool]).learn_from(once, deadline)

    def admit(self, pool: Pool) -> None:
        """Raise if the circuit breaker is open. Called once per call, before it gets a sequence number."""
        if self.circuits is not None and pool in _CIRCUITS:
            self.circuits.of(_CIRCUITS[pool]).admit()

    async def _exchange(
        self,
        operation: Operation[object],
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        attempt: int,
        deadline: float | None,
        omitted: Iterable[str],
    ) -> RawResponse:
        if self._closed:
            raise _closed()
        if self.auth.stale and operation is not _EXCHANGE:
            await self.auth.ensure()
        sent = {**self.headers(attempt), **headers}
        for name in omitted:
            sent.pop(name, None)
        timeout = operation.timeout or self.config.timeout
        if deadline is not None:
            timeout = min(timeout, deadline - self.clock.monotonic())
        if timeout <= 0:  # the caller no longer waits, so nothing is sent
            raise APITimeoutError(
                HTTPRequest(operation.method, url), "The timeout ended before the request was sent."
            )
        if self.config.dump_headers:
            _dump(operation.method, url, attempt, sent, body)
        pool = operation.pool
        limit = self._limits.get(pool) or self._open_pool(pool)
        if not limit.try_take(1):
            await self._wait_for_place(pool, limit)
        flight = None
        if operation.pool in _CIRCUITS:  # the service holds polls on purpose: not reported as slow
            flight = self.notices.begin(operation.name, timeout)
        watched: tuple[int, float] | None = None
        try:
            if self._closed:  # while it waited
                raise _closed()
            if wants(event_types.HttpEvent):
                watched = self._watch(operation)
            if self._add_trace_context is not None:
                self._add_trace_context(sent)
            async with self.clock.timeout(timeout):
                client, method = self._clients[pool], operation.method
                response = await (
                    client.post(url, headers=sent, content=body)
                    if method == "POST"
                    else _sending(client, method, url, sent, body)
                )
        except _foreign_errors() as error:
            client = self._clients.get(pool)
            if isinstance(error, TimeoutError) and isinstance(client, HTTP1Client):
                client.drop_idle()
            raise _connection_error(error, operation.method, url, timeout) from error
        else:
            if watched is not None:
                if wants(event_types.HttpRequestStop):
                    self._tell_answered(operation, watched, response.status, attempt)
                watched = None
            if note := response.headers.get("x-deprecation-note"):
                self.notices.deprecated(note, response.headers.get("x-deprecation-level"))
            return response
        finally:
            limit.give_back(1)
            if flight is not None:
                self.notices.end(flight)
            if watched is not None:
                self._tell_failed(operation, watched, sys.exception())

    # -- events of an exchange -----------------------------------------------------------------

    def _watch(self, operation: Operation[object]) -> tuple[int, float]:
        """Emit the start event of a request. Returns the number of its events and the start time."""
        number = next_id()
        if wants(event_types.HttpRequestStart):
            facts = self._facts_of(operation)
            emit(
                event_types.HttpRequestStart(
                    number, *facts, self.clock.wall(), metadata=self._whose()
                )
            )
        return number, self.clock.monotonic()

    def _tell_answered(
        self, operation: Operation[object], watched: tuple[int, float], status: int, attempt: int
    ) -> None:
        number, began = watched
        seconds, facts = self.clock.monotonic() - began, self._facts_of(operation)
        outcome = (status, "ok" if 200 <= status < 300 else "error", attempt)
        tell(
            partial(
                event_types.HttpRequestStop,
                number,
                *facts,
                seconds,
                *outcome,
                metadata=self._whose(),
            )
        )

    def _tell_failed(
        self, operation: Operation[object], watched: tuple[int, float], error: BaseException | None
    ) -> None:
        if wants(event_types.HttpRequestException):
            number, began = watched
            seconds, facts = self.clock.monotonic() - began, self._facts_of(operation)
            failure = (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
            emit(
                event_types.HttpRequestException(
                    number, *facts, seconds, *failure, metadata=self._whose()
                )
            )

    def _facts_of(self, operation: Operation[object]) -> tuple[str, str, str, str]:
        pool = operation.pool._value_  # faster than `value`, which dominates this function
        return operation.method, operation.path, pool, self._base_url

    def _whose(self) -> Mapping[str, Any]:
        call = current_call()
        return self.metadata if call is None else call.metadata

    @asynccontextmanager
    async def stream(
        self, operation: Operation[object], request: Any, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Any]:
        """Send an operation once, without retries, and yield its answer while it is still arriving."""
        url = self._url(operation, request, None)
        body, content_headers = encode_body(operation, request)
        await self.ready(operation.pool)
        sent = {
            **self.headers(),
            "x-idempotency-key": self.new_idempotency_key(),
            **content_headers,
            **clean_headers(headers or {}),
        }
        async with self.open_stream(
            operation.pool, operation.method, url, sent, body, name=operation.name
        ) as response:
            yield response

    async def ready(self, pool: Pool) -> None:
        """Make sure the credential is fresh and `pool` has a client. Call it on the runtime's loop only."""
        if self._closed:
            raise _closed()
        if self.auth.stale:
            await self.auth.ensure()
        if pool not in self._limits:
            self._open_pool(pool)

    @asynccontextmanager
    async def open_stream(
        self,
        pool: Pool,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        name: str | None = None,
    ) -> AsyncIterator[Any]:
        """Open a streamed answer. With a `name`, a slow start is reported to the user.

        The timeout covers only the time until the answer starts; the body may take any time.
        """
        if self._closed:
            raise _closed()
        if pool not in self._limits:
            self._open_pool(pool)
        client, timeout = self._clients[pool], self.config.timeout
        if isinstance(client, HTTP1Client) and url.startswith("https:"):  # redirected
            client = self._pyqwest_client()
        open_stream = _method_of(client, "stream")
        # A URL on another host is signed and gives access like a key, so it is not logged.
        if self.config.dump_headers and url.startswith(self._base_url):
            _dump(method, url, 0, headers, body)
        flight = None if name is None else self.notices.begin(name, timeout)
        path = urlsplit(url).path
        row = Operation(name or path, method, path, object, object, pool, Body.NONE)
        watched = self._watch(row) if wants(event_types.HttpEvent) else None
        if self._add_trace_context is not None:
            self._add_trace_context(headers := dict(headers))
        opened = open_stream(method, url, headers=headers, content=body)
        async with AsyncExitStack() as stack:
            try:
                async with self.clock.timeout(timeout):
                    response = await stack.enter_async_context(opened)
                if watched is not None:
                    self._tell_answered(row, watched, response.status, 0)
                    watched = None
            except _foreign_errors() as error:
                raise _connection_error(error, method, url, timeout) from error
            finally:
                if flight is not None:
                    self.notices.end(flight)
                if watched is not None:
                    self._tell_failed(row, watched, sys.exception())
            yield _Streamed(response, method, url)

    @staticmethod
    async def read_stream(response: Any) -> RawResponse:
        """Read the rest of a stream into a complete answer, for example of an error."""
        content = b"".join([bytes(part) async for part in response.content])
        return HTTP1Response(response.status, _lower(response.headers), content)

    # -- details -----------------------------------------------------------------------------

    def new_idempotency_key(self) -> str:
        return f"tinkex-{self._nonce}-{next(self._counter):x}"

    def headers(self, attempt: int = 0) -> dict[str, str]:
        """The default headers of every request, including the credential."""
        return {
            "x-api-key": self.auth.credential,
            "x-stainless-retry-count": str(attempt),
            **self._headers,
        }

    def url(self, path: str, query: Mapping[str, Any] | None = None) -> str:
        """The full URL of a path. Precedence of query parameters: default < in the path < explicit."""
        if not path.startswith("/"):
            path = f"/{path}"
        if not query and not self._query:
            return f"{self._base_url}{path}"
        base, _, inline = path.partition("?")
        explicit = _query(query or {})
        # A name may occur several times in the path; an explicit value replaces all of them.
        kept = [
            pair for pair in parse_qsl(inline, keep_blank_values=True) if pair[0] not in explicit
        ]
        named = explicit.keys() | {name for name, _ in kept}
        merged = [pair for pair in self._query.items() if pair[0] not in named]
        merged += [*kept, *((name, text) for name, text in explicit.items() if text is not None)]
        suffix = f"?{urlencode(merged)}" if merged else ""
        return f"{self._base_url}{base}{suffix}"

    def _url(
        self,
        operation: Operation[object],
        request: Any,
        path: Mapping[str, str] | None,
        *,
        check: bool = True,
    ) -> str:
        filled = operation.url_path(path) if check else operation.path
        query = query_of(request) if operation.body is Body.QUERY and request is not None else None
        return self.url(filled, query)

    def _open_pool(self, pool: Pool) -> Budget:
        self._limits[pool] = slots(self._places(pool))
        self._clients[pool] = self._new_client()
        return self._limits[pool]

    async def _wait_for_place(self, pool: Pool, limit: Budget) -> None:
        """Wait for a free slot. A sample that waits `_PATIENCE` seconds adds connections for all samples."""
        may_grow = self._sampling_pools < self.config.pool_count
        if pool is not Pool.SAMPLING or self._multiplexed or not may_grow:
            await limit.take(1)
            return
        timer = asyncio.get_running_loop().call_later(_PATIENCE, self._add_connections, limit)
        try:
            await limit.take(1)
        finally:
            timer.cancel()

    def _add_connections(self, limit: Budget) -> None:
        size, most = self.config.pool_size, _spare_sockets(_file_limit()) // 2
        fits = (self._sampling_pools + 1) * size <= most  # polls of samples need sockets too
        if fits and self._sampling_pools < self.config.pool_count:
            self._sampling_pools += 1
            limit.give_back(size)

    def _places(self, pool: Pool) -> int:
        """Initial limit on exchanges in flight in a pool."""
        if pool is Pool.SAMPLE_FUTURES:
            return _UNLIMITED if self._multiplexed else _spare_sockets(_file_limit())
        if self._multiplexed:
            return _STREAMS
        return self.config.pool_size if pool is Pool.SAMPLING else _CONNECTIONS[pool]

    def _new_client(self) -> Any:
        chosen = self.config.http_client
        if isinstance(chosen, str):
            module, _, name = chosen.partition(":")
            chosen = getattr(import_module(module), name)
        if isinstance(chosen, type):
            return chosen()
        if chosen is not None:
            self._borrowed = chosen
            return chosen
        if not self._multiplexed and self.config.proxy is None:
            return HTTP1Client(connect_timeout=self.config.connect_timeout)
        return self._pyqwest_client()

    def _pyqwest_client(self) -> Any:
        import pyqwest

        proxy = self.config.proxy
        transport = pyqwest.HTTPTransport(
            connect_timeout=self.config.connect_timeout,
            pool_max_idle_per_host=self.config.pool_size,
            follow_redirects=False,
            tls_include_system_certs=True,
            enable_brotli=False,
            enable_otel=False,
            proxy=pyqwest.Proxy(proxy.url, headers=dict(proxy.headers)) if proxy else None,
        )
        return pyqwest.Client(transport)

    async def close(self) -> None:
        self._closed = True
        self.notices.close()
        for client in self._clients.values():
            closing = getattr(client, "aclose", None)
            if closing is not None and client is not self._borrowed:
                await closing()
        self._clients.clear()
        self._limits.clear()


def _closed() -> ClientClosedError:
    return ClientClosedError("The client is closed; make a new one.")


def _sending(
    client: Any, method: str, url: str, headers: Mapping[str, str], body: bytes | None
) -> Awaitable[RawResponse]:
    """Send a request that is not a POST."""
    answer: Awaitable[RawResponse]
    if method == "GET":
        answer = client.get(url, headers=headers)
    elif method == "PUT":
        answer = _method_of(client, "put")(url, headers=headers, content=body)
    else:
        answer = client.delete(url, headers=headers)
    return answer


def _file_limit() -> int | None:
    """The limit on open files and sockets of this process, or None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _spare_sockets(file_limit: int | None) -> int:
    """Half of the file limit; the other half is for the rest of the program."""
    return _UNLIMITED if file_limit is None else max(1, file_limit // 2)


class _Streamed:
    """A stream that raises APIConnectionError instead of errors of the HTTP library."""

    def __init__(self, response: Any, method: str, url: str) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self._parts = response.content
        self._method, self._url = method, url

    @property
    async def content(self) -> AsyncIterator[Any]:
        try:
            async for part in self._parts:
                yield part
        except _foreign_errors() as error:
            raise _connection_error(error, self._method, self._url, None) from error


def encode_body(operation: Operation[object], request: Any) -> tuple[bytes | None, dict[str, str]]:
    """The body of a request and its content headers."""
    if operation.body in {Body.NONE, Body.QUERY}:
        return (None, {}) if operation.method in {"GET", "DELETE"} else (b"", {})
    if isinstance(request, bytes):
        return request, {"content-type": PROTOBUF}
    return json_codec.encode({} if request is None else request), _JSON


_JSON: Final = {"content-type": "application/json"}
_EXCHANGE: Final = operation("auth_token")  # sent with the API key, so it needs no fresh token


def encode_training(request: Any, *, zstd: bool) -> tuple[bytes, dict[str, str]]:
    """A forward or forward_backward request as protobuf, compressed with `zstd=True`."""
    body = proto_codec.encode_forward_backward_request(request)
    headers = {"content-type": PROTOBUF}
    if zstd:
        return compress(body), {**headers, "content-encoding": "zstd"}
    return body, headers


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_LINE: Final = re.compile(r"[^\r\n\0]*")


def clean_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """The caller's headers with lower-case names. Invalid names and values with line breaks are refused.

    Headers without a value are left out. Errors do not quote values: one of them may be a key.
    """
    clean = {
        str(name).strip().lower(): str(value)
        for name, value in headers.items()
        if value is not None and given(value)
    }
    for name, value in clean.items():
        if not _TOKEN.fullmatch(name):
            raise InvalidInputError(f"{name!r:.80} is not the name of a header", field="headers")
        if not _LINE.fullmatch(value):
            raise InvalidInputError(f"{name} holds a line break", field="headers")
    return clean


def _query(query: Mapping[str, Any]) -> dict[str, str | None]:
    """The given query parameters as text; None for a default that the caller wants to leave out."""
    texts: dict[str, str | None] = {}
    for name, value in query.items():
        if not str(name).strip():
            raise InvalidInputError("has a blank name", field="query")
        if isinstance(value, bool):
            texts[str(name)] = str(value).lower()
        elif isinstance(value, str | int | float):
            texts[str(name)] = str(value)
        elif is_omit(value):
            texts[str(name)] = None
        elif value is not None and given(value):
            raise InvalidInputError(
                f"must be text or a number, not {type(value).__name__}", field=f"query.{name}"
            )
    return texts


def _split_userinfo(url: str) -> tuple[str, str]:
    """The URL without `user:password@`, and that part base64-encoded for the header."""
    parts = urlsplit(url)
    userinfo, _, address = parts.netloc.rpartition("@")
    plain = parts._replace(netloc=address).geturl() if userinfo else url
    return plain, b64encode(unquote(userinfo).encode()).decode()


def _method_of(client: Any, name: str) -> Any:
    method = getattr(client, name, None)
    if method is None:
        raise ConfigError(f"has no method {name!r}, which this call needs", field="http_client")
    return method


def _trace_context(config: Config) -> Callable[[dict[str, str]], None] | None:
    """A function that adds the caller's trace to request headers; None if disabled or not available."""
    if not config.otel_propagate:
        return None
    from tinkex.telemetry.otel import trace_context

    return trace_context()


def _foreign_errors() -> tuple[type[Exception], ...]:
    """Errors that the HTTP library raises: its own, and built-in connection and timeout errors."""
    if "pyqwest" not in sys.modules:
        return (OSError,)
    import pyqwest

    return (
        OSError,
        pyqwest.ReadError,
        pyqwest.WriteError,
        pyqwest.RemoteProtocolError,
        pyqwest.TooManyRedirects,
    )


#: How the TLS library words a certificate that it refuses; the reason follows.
_REFUSED_CERTIFICATE: Final = "invalid peer certificate: "


def _connection_error(
    error: BaseException, method: str, url: str, timeout: float | None
) -> APIConnectionError:
    request = HTTPRequest(method, url)
    detail = str(error).partition("\n")[0]
    if isinstance(error, TimeoutError):
        if detail:  # the timeout is the library's, not ours
            return APITimeoutError(request, f"No answer: {detail}")
        return APITimeoutError(request, f"No answer within {timeout or 0:g} s")
    _, refused, why = detail.partition(_REFUSED_CERTIFICATE)
    if refused:
        return APIConnectionError(
            request,
            f"The certificate of the service is not trusted: {why}; SSL_CERT_FILE names a file with "
            "certificates to trust",
        )
    return APIConnectionError(request, f"Connection failed: {detail or type(error).__name__}")


def _dump(
    method: str, url: str, attempt: int, headers: Mapping[str, str], body: bytes | None
) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    text = "" if body is None else _printable(body)
    logger.info(
        "%s %s (attempt %d)\n%s\n%s",
        method,
        _DEFAULT_PORT.sub(lambda found: found[1] or found[2], url),
        attempt,
        "\n".join(f"{name}: {value}" for name, value in redact_headers(headers).items()),
        text,
    )


_SHOWN: Final = 2000
#: A URL with the default port of its scheme, which a log does not need to show.
_DEFAULT_PORT: Final = re.compile(r"^(http://[^/?]+):80(?=[/?]|$)|^(https://[^/?]+):443(?=[/?]|$)")


def _printable(body: bytes) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return f"<{len(body)} bytes>"
    text = _SECRET_FIELD.sub(rf"\1{REDACTED}", text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… <{len(body)} bytes>"


_SECRET_FIELD: Final = re.compile(r'("weights_access_token"\s*:\s*")[^"]*')


_OS: Final = {
    "darwin": "MacOS",
    "linux": "Linux",
    "freebsd": "FreeBSD",
    "openbsd": "OpenBSD",
    "win": "Windows",
}
_ARCH: Final = {
    **dict.fromkeys(("x86_64", "amd64"), "x64"),
    **dict.fromkeys(("i386", "i686", "x86"), "x32"),
    **dict.fromkeys(("aarch64", "arm64"), "arm64"),
    **dict.fromkeys(("arm", "armv6l", "armv7l"), "arm"),
}


def machine_headers(system: str, machine: str) -> dict[str, str]:
    """Operating system and CPU, in the protocol's terms. A release number in the system name is ignored."""
    return {
        "x-stainless-os": _OS.get(system.rstrip("0123456789"), "Unknown"),
        "x-stainless-arch": _ARCH.get(machine.lower(), "unknown"),
    }


def _default_headers(config: Config, userinfo: str) -> dict[str, str]:
    headers = {
        "accept": "application/json",
        "user-agent": f"AsyncTinkex/Python {__version__}",
        "x-stainless-package-version": PARITY_VERSION,
        **machine_headers(sys.platform, platform.machine()),
        "x-stainless-runtime": platform.python_implementation(),
        "x-stainless-runtime-version": platform.python_version(),
        "x-stainless-async": "async:asyncio",
        "x-stainless-read-timeout": f"{config.timeout:.3f}",
    }
    if userinfo:
        headers["authorization"] = f"Basic {userinfo}"
    if config.cf_access_client_id:
        headers["cf-access-client-id"] = config.cf_access_client_id
    if config.cf_access_client_secret:
        headers["cf-access-client-secret"] = config.cf_access_client_secret
    return clean_headers({**headers, **_lower(config.default_headers)})
