"""Requests by path, for calls that no client method covers: raw answers, streams, uploads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

from tinkex._retry import retrying
from tinkex._wire.lazy_codecs import json_codec
from tinkex._wire.operations import Body, Operation, Pool
from tinkex._wire.sse import ServerSentEvent, SSEDecoder
from tinkex._wire.transform import Omit, coalesce, given, is_omit
from tinkex.errors import DecodeError, InvalidInputError
from tinkex.telemetry.calls import attempt_events

from .http1 import HTTP1Response
from .multipart import Files, encode_multipart
from .responses import REDIRECTS, APIResponse
from .runtime import APIFuture
from .session import Session
from .transport import RawResponse, clean_headers

__all__ = ["APIResponse", "HTTPClient", "StreamResponse"]

Method = Literal["GET", "POST", "PUT", "DELETE"]
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE"})


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """An answer that is still arriving."""

    status: int
    headers: Mapping[str, str]
    method: str
    url: str
    _chunks: AsyncIterator[Any] = field(repr=False)

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield bytes(chunk)

    async def iter_events(
        self, parser: Literal["json", "raw"] | Callable[[ServerSentEvent], Any] = "json"
    ) -> AsyncIterator[Any]:
        """Server-sent events as they arrive. Events without data are skipped."""
        decoder = SSEDecoder()
        async for chunk in self._chunks:
            for event in decoder.feed(bytes(chunk)):
                if event.data:
                    yield _parsed(event, parser)
        for event in decoder.flush():
            if event.data:
                yield _parsed(event, parser)


def _parsed(event: ServerSentEvent, parser: Any) -> Any:
    if parser == "json":
        return event.json()
    return event if parser == "raw" else parser(event)


class HTTPClient:
    """GET, POST, PUT and DELETE on paths of the service, with the client's headers, retries and errors.

    Plain calls return the body as JSON; `with_raw_response` returns an `APIResponse` instead, and
    `with_streaming_response` opens a `StreamResponse` without waiting for the body. Redirects are
    reported, not followed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, path: str, **options: Any) -> APIFuture[Any]:
        return self._parsed("GET", path, options)

    def post(self, path: str, body: Any = None, **options: Any) -> APIFuture[Any]:
        return self._parsed("POST", path, {"body": body, **options})

    def put(self, path: str, body: Any = None, **options: Any) -> APIFuture[Any]:
        return self._parsed("PUT", path, {"body": body, **options})

    def delete(self, path: str, **options: Any) -> APIFuture[Any]:
        return self._parsed("DELETE", path, options)

    def _parsed(self, method: Method, path: str, options: dict[str, Any]) -> APIFuture[Any]:
        async def data() -> Any:
            response = await self._request(method, path, **options)
            try:
                return response.data
            except DecodeError as error:
                answer = HTTP1Response(response.status, response.headers, response.body)
                row = _row(method, path)
                raise self._session.transport.misunderstood(row, answer, error) from error

        return self._session.start(f"{method} {path}", data, timeout=options.get("timeout"))

    def with_raw_response(
        self, method: Method, path: str, **options: Any
    ) -> APIFuture[APIResponse]:
        """The whole answer instead of its body."""
        work = partial(self._request, _checked(method), path, **options)
        return self._session.start(f"{method} {path}", work, timeout=options.get("timeout"))

    @asynccontextmanager
    async def with_streaming_response(
        self,
        method: Method,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[StreamResponse]:
        """Open an answer and read its body as it arrives, on the caller's event loop."""
        method, transport = _checked(method), self._session.transport
        url = transport.url(path, query)
        content, extra = _body(body, None, headers)
        await self._session.submit(transport.ready(Pool.REST))
        if method != "GET":
            extra.setdefault("x-idempotency-key", transport.new_idempotency_key())
        sent = {**transport.headers(), **extra}
        for name in _omitted(headers):
            sent.pop(name, None)
        async with transport.open_stream(Pool.REST, method, url, sent, content) as response:
            lowered = {name.lower(): value for name, value in response.headers.items()}
            if response.status >= 300:
                refused = await transport.read_stream(response)
                raise transport.error(_row(method, path), url, refused)
            yield StreamResponse(response.status, lowered, method, url, response.content)

    def stream_get(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> AbstractAsyncContextManager[StreamResponse]:
        """`with_streaming_response` of a GET."""
        return self.with_streaming_response("GET", path, query=query, headers=headers)

    async def _request(
        self,
        method: Method,
        path: str,
        *,
        body: Any = None,
        files: Files | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        idempotency_key: str | Omit | None = None,
    ) -> APIResponse:
        session, transport = self._session, self._session.transport
        url = transport.url(path, query)
        if idempotency_key is not None:
            headers = {"x-idempotency-key": idempotency_key, **(headers or {})}
        content, extra = _body(body, files, headers)
        omitted = _omitted(headers)
        if timeout is not None:
            extra.setdefault("x-stainless-read-timeout", f"{timeout:.3f}")
        if content is not None and method in {"GET", "DELETE"}:
            raise InvalidInputError(f"a {method} request has no body", field="body")
        if method != "GET":
            extra.setdefault("x-idempotency-key", transport.new_idempotency_key())
        row, deadline = _row(method, path, timeout), session.deadline(timeout)
        started, attempts = session.clock.monotonic(), 0
        transport.admit(row.pool)

        async def once(attempt: int) -> RawResponse:
            nonlocal attempts
            attempts = attempt
            response = await transport.exchange(
                row, url, extra, content, attempt=attempt, deadline=deadline, omitted=omitted
            )
            if response.status >= 300 and not _leads_on(response):
                raise transport.error(row, url, response)
            return response

        policy = transport.policy_for(row)
        if max_retries is not None:
            policy = replace(policy, max_retries=max_retries)
        waiting = partial(transport.tell_waiting, row.name, policy, deadline)
        response = await retrying(once, policy, session.clock, waiting, deadline, attempt_events)
        return APIResponse(
            response.status,
            {name.lower(): value for name, value in response.headers.items()},
            method,
            url,
            response.content,
            (session.clock.monotonic() - started) * 1000,
            attempts,
        )


def _checked(method: str) -> Method:
    verb = str(method).upper()
    if verb not in _METHODS:
        raise InvalidInputError(f"{method!r:.80} is not one of {sorted(_METHODS)}", field="method")
    return cast("Method", verb)


def _leads_on(response: RawResponse) -> bool:
    return response.status in REDIRECTS and any(
        name.lower() == "location" for name in response.headers
    )


def _row(method: Method, path: str, timeout: float | None = None) -> Operation[object]:
    name = f"{method} {path}"
    kinds = (object, object, Pool.REST, Body.JSON)
    return Operation(name, method, path, *kinds, timeout=timeout, window=False)


def _omitted(headers: Mapping[str, Any] | None) -> list[str]:
    """Default headers that the caller asks to leave out."""
    return [name.strip().lower() for name, value in (headers or {}).items() if is_omit(value)]


def _body(
    body: Any, files: Files | None, headers: Mapping[str, Any] | None
) -> tuple[bytes | None, dict[str, str]]:
    body, extra = _given_only(coalesce(body)), clean_headers(headers or {})
    multipart = extra.get("content-type", "").lower().startswith("multipart/form-data")
    if files or multipart:
        content, content_type = encode_multipart(body or {}, files or {}, extra.get("content-type"))
        return content, {**extra, "content-type": content_type}
    if body is None or isinstance(body, bytes):
        return body, extra
    return json_codec.encode(body), {"content-type": "application/json", **extra}


def _given_only(body: Any) -> Any:
    """The body without values that were not given, in mappings and lists. Typed protocol values stay unchanged."""
    if isinstance(body, Mapping):
        return {str(name): _given_only(value) for name, value in body.items() if given(value)}
    if isinstance(body, list | tuple):
        return [_given_only(value) for value in body if given(value)]
    return body
