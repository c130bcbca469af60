"""Requests by path: bodies, complete answers and streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import tinkex
from tinkex._client.http import APIResponse
from tinkex._wire.sse import ServerSentEvent
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    ClientClosedError,
    DecodeError,
    InvalidInputError,
    NotFoundError,
)
from tinkex.types import HealthResponse

from ..scripted import Answer, FakeClock, Hang, Raw

X = "/api/v1/x"
Service = Callable[..., tinkex.ServiceClient]


# -- verbs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["get", "post", "put", "delete"])
def test_method_returns_json_body(server, service, verb):
    server.on(f"{verb.upper()} {X}", Answer({"a": [1, None]}))
    assert getattr(service().http, verb)(X).result(10) == {"a": [1, None]}


@pytest.mark.parametrize("verb", ["post", "put"])
def test_a_body_is_sent_as_json_unless_it_is_bytes(server, service, verb):
    server.on(f"{verb.upper()} {X}", Answer())
    send = getattr(service().http, verb)
    send(X, {"a": 1}).result(10)
    send(X, b"raw", headers={"Content-Type": "text/plain"}).result(10)
    send(X).result(10)
    sent = [(request.headers.get("content-type"), request.body) for request in server.requests]
    assert sent == [("application/json", b'{"a":1}'), ("text/plain", b"raw"), (None, b"")]


@pytest.mark.parametrize("verb", ["get", "delete"])
def test_body_of_get_or_delete_is_refused(server, service, verb):
    with pytest.raises(InvalidInputError, match="body"):
        getattr(service().http, verb)(X, body={"a": 1}).result(10)
    assert server.requests == []


@pytest.mark.parametrize("method", ["PATCH", "", "HEAD", "GET / HTTP/1.1\r\n"])
def test_unknown_method_is_refused(server, service, method):
    http = service().http
    with pytest.raises(InvalidInputError, match="method"):
        http.with_raw_response(method, X)

    async def stream() -> None:
        async with http.with_streaming_response(method, X):
            pass

    with pytest.raises(InvalidInputError, match="method"):
        asyncio.run(stream())
    assert server.requests == []


def test_a_method_may_be_written_in_any_case(server, service):
    server.on(f"PUT {X}", Answer())
    assert service().http.with_raw_response("put", X, body={}).result(10).method == "PUT"


def test_an_idempotency_key_may_be_chosen(server, service):
    server.on(f"POST {X}", Answer())
    server.on(f"GET {X}", Answer())
    http = service().http
    http.post(X, idempotency_key="mine").result(10)
    http.post(X, headers={"X-Idempotency-Key": "header"}, idempotency_key="mine").result(10)
    http.get(X).result(10)
    keys = [request.headers.get("x-idempotency-key") for request in server.requests]
    assert keys == ["mine", "header", None]


def test_values_not_given_are_not_sent(server, service):
    server.on(f"POST {X}", Answer())
    body = {"a": 1, "b": tinkex.NOT_GIVEN, "c": [tinkex.OMIT, {"d": tinkex.NOT_GIVEN}], "e": None}
    headers = {"x-a": None, "x-b": tinkex.NOT_GIVEN, "x-c": 1, "accept": tinkex.NOT_GIVEN}
    query = {"p": None, "q": tinkex.NOT_GIVEN, "r": 1}
    service().http.post(X, body, headers=headers, query=query).result(10)
    (sent,) = server.requests
    assert sent.json == {"a": 1, "c": [{}], "e": None}
    assert (sent.headers.get("x-a"), sent.headers.get("x-b")) == (None, None)
    assert (sent.headers["x-c"], sent.headers["accept"]) == ("1", "application/json")
    assert sent.query == {"r": "1"}


def test_a_default_may_be_omitted(server, service):
    server.on(f"POST {X}", Answer())
    client = service(default_query={"p": "1"}, default_headers={"x-a": "1"})
    omitted = {"X-A": tinkex.OMIT, "user-agent": tinkex.OMIT, "content-type": tinkex.OMIT}
    query = {"p": tinkex.OMIT}
    call = client.http.post(X, {}, headers=omitted, query=query, idempotency_key=tinkex.OMIT)
    assert call.result(10) == {}

    async def stream() -> None:
        async with client.http.with_streaming_response("POST", X, body={}, headers=omitted):
            pass

    asyncio.run(stream())
    plain, streamed = server.requests
    names = {"x-a", "user-agent", "content-type"}
    assert not names & (plain.headers.keys() | streamed.headers.keys())
    assert "x-idempotency-key" not in plain.headers
    assert plain.query == {}


def test_body_may_contain_protocol_types(server, service):
    server.on(f"POST {X}", Answer())
    tensor = tinkex.TensorData([[1, 2]], "int64")
    service().http.post(X, {"tensor": tensor, "not": tinkex.NOT_GIVEN}).result(10)
    written = {"data": [1, 2], "dtype": "int64", "shape": [1, 2]}
    assert server.requests[0].json == {"tensor": written}


def test_delays_between_retries_can_be_set(server, service, clock):
    server.on(f"GET {X}", *[Answer({}, 503)] * 3, Answer())
    service(retry_delay_base=0.1, retry_delay_max=0.3).http.get(X).result(10)
    assert clock.slept == pytest.approx([0.1, 0.2, 0.3])


def test_max_retries_can_be_set_per_call(server, service):
    server.on(f"GET {X}", Answer({}, 503))
    with pytest.raises(APIStatusError):
        service(max_retries=5).http.get(X, max_retries=1).result(10)
    assert len(server.requests) == 2


def test_timeout_can_be_set_per_call(server, service):
    server.on(f"GET {X}", Hang())
    with pytest.raises(APITimeoutError):
        service().http.get(X, timeout=0.05).result(10)


def test_timeout_of_call_may_exceed_default(server, service):
    held = threading.Event()
    server.on(f"GET {X}", Answer({"a": 1}, wait_for=held))
    client = service(timeout=0.01)
    call = client.http.get(X, timeout=10)
    server.wait_for(f"GET {X}")
    with pytest.raises(APITimeoutError):
        client.http.get(X, max_retries=0).result(10)
    held.set()
    assert call.result(10) == {"a": 1}
    told = [request.headers["x-stainless-read-timeout"] for request in server.requests]
    assert told == ["10.000", "0.010"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_reported_instead_of_followed(server, service, status):
    headers = {"Location": "https://elsewhere/y", "Expires": "tomorrow"}
    server.on(f"GET {X}", Answer(b"moved", status, headers))
    found = service().http.get(X).result(10)
    assert found == {"url": "https://elsewhere/y", "status": status, "expires": "tomorrow"}


def test_redirect_without_location_is_error(server, service):
    server.on(f"GET {X}", Answer(b"", 302))
    with pytest.raises(APIStatusError) as raised:
        service().http.get(X).result(10)
    assert raised.value.status_code == 302


@pytest.mark.parametrize("body", [b"<html>", b"{", b"\xff"])
def test_a_body_that_is_not_json_is_an_error_that_names_the_call(server, service, body):
    server.on(f"GET {X}", Answer(body, headers={"x-request-id": "q-1"}, content_type="text/html"))
    with pytest.raises(APIResponseValidationError, match=f"GET {X}.*text/html") as raised:
        service().http.get(X).result(10)
    assert raised.value.request_id == "q-1"
    assert raised.value.body == body


# -- complete answers -----------------------------------------------------------------------------


def test_raw_answer_has_status_headers_and_metadata(server, service, clock):
    server.on(f"POST {X}", Answer({}, 503), Answer({"a": 1}, 201, {"X-Name": "Value"}))
    response = service().http.with_raw_response("POST", X, body={}, query={"q": 1}).result(10)
    assert (response.status, response.status_code) == (201, 201)
    assert (response.method, response.url) == ("POST", f"{server.url}{X}?q=1")
    assert response.body == b'{"a": 1}'
    assert response.data == {"a": 1}
    assert response.retries == 1
    assert response.elapsed_ms == 500
    assert response.headers["x-name"] == "Value"
    assert response.header("X-NAME") == response.header("x-name") == "Value"
    assert response.header("absent") is None


def test_repr_of_raw_answer_hides_body(server, service):
    server.on(f"GET {X}", Answer({"secret": "abc"}))
    assert "abc" not in repr(service().http.with_raw_response("GET", X).result(10))


def test_a_raw_answer_with_an_error_status_is_raised(server, service):
    with pytest.raises(NotFoundError):
        service().http.with_raw_response("GET", X).result(10)


def raw(body: bytes) -> APIResponse:
    return APIResponse(200, {}, "GET", X, body, 1.0, 0)


def test_answer_is_parsed_plain_by_function_or_as_type():
    answer = raw(b'{"status": "ok"}')
    assert answer.parse() == {"status": "ok"}
    assert answer.parse(lambda data: data["status"].upper()) == "OK"
    assert answer.parse(HealthResponse) == HealthResponse(status="ok")
    assert raw(b"").parse() == {}


class Read:
    def __init__(self, data: Any) -> None:
        self.data = data

    @classmethod
    def from_json(cls, data: Any) -> Read:
        return cls(data)


def test_answer_is_parsed_as_class_with_from_json_or_built_in_type():
    answer = raw(b'{"a": 1}')
    assert answer.parse(Read).data == answer.parse(to=Read).data == {"a": 1}
    assert answer.parse(to=dict) == answer.parse(to=dict[str, int]) == {"a": 1}
    assert raw(b"[1]").parse(to=list) == [1]
    assert (raw(b"7").parse(to=int), raw(b"1.5").parse(to=float)) == (7, 1.5)
    assert (raw(b"True").parse(to=bool), raw(b"x").parse(to=str)) == (True, "x")
    assert (raw(b"x").parse(to=bytes), raw(b"x").parse(to=type(None))) == (b"x", None)


def test_answer_can_be_read_as_bytes_text_lines_and_json():
    answer = raw(b'{"a":\n"\xc3\xa4"}')
    assert (answer.read(), answer.json()) == (answer.body, {"a": "ä"})
    assert answer.text() == '{"a":\n"ä"}' == "".join(answer.iter_text(2))
    assert list(answer.iter_lines()) == ['{"a":', '"ä"}']
    assert b"".join(answer.iter_bytes(3)) == answer.body == next(answer.iter_bytes())
    assert (list(raw(b"").iter_bytes()), list(raw(b"").iter_text())) == ([], [])
    assert (answer.elapsed.total_seconds(), answer.retries_taken) == (0.001, 0)
    assert (answer.http_request.method, answer.http_response.status_code) == ("GET", 200)
    answer.close()
    assert answer.is_closed


@pytest.mark.parametrize(("charset", "text"), [("latin-1", "Ã¤"), ("UTF-8", "ä"), ("made-up", "ä")])
def test_text_is_decoded_with_charset_of_content_type(charset, text):
    headers = {"content-type": f"text/plain; charset={charset}"}
    assert APIResponse(200, headers, "GET", X, "ä".encode(), 1.0, 0).text() == text


def test_error_of_parser_is_raised():
    with pytest.raises(KeyError):
        raw(b"{}").parse(lambda data: data["absent"])
    with pytest.raises(DecodeError):
        raw(b'{"status": 5}').parse(HealthResponse)
    with pytest.raises(DecodeError):
        raw(b"<html>").parse()
    with pytest.raises(InvalidInputError, match="parser"):
        raw(b"{}").parse("json")


# -- streams --------------------------------------------------------------------------------------


class Feed:
    """A server that sends the parts that the test passes to it, when it passes them."""

    def __init__(self) -> None:
        self.pieces: list[bytes | None] = []
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self._more = threading.Semaphore(0)
        feed = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                feed.seen.append((self.command, self.path, headers, body))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                while (piece := feed._next()) is not None:
                    self.wfile.write(piece)
                self.close_connection = True

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def _next(self) -> bytes | None:
        assert self._more.acquire(timeout=10)
        return self.pieces.pop(0)

    def send(self, piece: bytes | None) -> None:
        self.pieces.append(piece)
        self._more.release()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def feed() -> Iterator[Feed]:
    running = Feed()
    thread = threading.Thread(target=running.server.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join()


@pytest.fixture
def fed(feed: Feed, service: Service, clock: FakeClock) -> Any:
    return service(base_url=feed.url).http


def test_events_are_yielded_while_answer_is_still_arriving(feed, fed):
    async def work() -> None:
        async with fed.stream_get(X, query={"q": 1}) as response:
            assert (response.status, response.method) == (200, "GET")
            assert response.url == f"{feed.url}{X}?q=1"
            assert response.headers["content-type"] == "text/event-stream"
            events = response.iter_events()
            feed.send(b'data: {"n": 1}\n\ndata: {"n"')
            assert await anext(events) == {"n": 1}
            feed.send(b": 2}\n\n: a comment\n\nevent: empty\n\ndata: not json\n\n")
            assert await anext(events) == {"n": 2}
            assert await anext(events) == "not json"
            feed.send(b"data: 3")
            feed.send(None)
            assert [event async for event in events] == [3]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("parser", "expected"),
    [
        ("json", {"a": 1}),
        ("raw", ServerSentEvent("tick", '{"a": 1}', "7", None)),
        (lambda event: event.event, "tick"),
    ],
)
def test_events_are_parsed_by_chosen_parser(feed, fed, parser, expected):
    async def work() -> list[Any]:
        async with fed.with_streaming_response("GET", X) as response:
            feed.send(b'event: tick\r\nid: 7\r\ndata: {"a": 1}\r\n\r\n')
            feed.send(None)
            return [event async for event in response.iter_events(parser)]

    assert asyncio.run(work()) == [expected]


def test_a_streamed_request_carries_body_key_and_idempotency_key(feed, fed):
    feed.send(None)

    async def work() -> bytes:
        async with fed.with_streaming_response(
            "POST", X, body={"a": 1}, headers={"Accept": "text/event-stream"}
        ) as response:
            return b"".join([part async for part in response.iter_bytes()])

    assert asyncio.run(work()) == b""
    ((_, _, headers, body),) = feed.seen
    assert body == b'{"a":1}'
    assert headers["accept"] == "text/event-stream"
    assert headers["content-type"] == "application/json"
    assert headers["x-api-key"] == "tml-test"
    assert headers["x-stainless-retry-count"] == "0"
    assert headers["x-idempotency-key"]


def test_stream_bytes_are_unchanged(feed, fed):
    async def work() -> None:
        async with fed.with_streaming_response("GET", X) as response:
            parts = response.iter_bytes()
            for piece in (b"\x00\xff", b"more"):
                feed.send(piece)
                assert await anext(parts) == piece
            feed.send(None)
            assert [part async for part in parts] == []

    asyncio.run(work())


def read(http: Any) -> Any:
    async def work() -> list[Any]:
        async with http.with_streaming_response("GET", X) as response:
            return [event async for event in response.iter_events()]

    return asyncio.run(work())


def test_error_status_of_stream_is_raised_as_typed_error(server, service):
    server.on(f"GET {X}", Answer({"detail": "no"}, 404, {"x-request-id": "q-1"}))
    with pytest.raises(NotFoundError, match="no") as raised:
        read(service().http)
    assert raised.value.request_id == "q-1"


@pytest.mark.parametrize(
    "broken", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: 1\n\n", b"SSH-2.0\r\n"]
)
def test_truncated_stream_is_connection_error(server, service, broken):
    server.on(f"GET {X}", Raw(broken))
    with pytest.raises(APIConnectionError):
        read(service().http)


def test_stream_that_does_not_start_is_timeout(server, service):
    server.on(f"GET {X}", Hang())
    with pytest.raises(APITimeoutError):
        read(service(timeout=0.05).http)


def test_a_closed_client_opens_no_stream(server, service):
    client = service()
    client.close().result(10)
    with pytest.raises(ClientClosedError):
        read(client.http)
    assert server.requests == []


def test_open_stream_can_be_read_after_client_is_closed(feed, service):
    client = service(base_url=feed.url)

    async def work() -> None:
        async with client.http.with_streaming_response("GET", X) as response:
            await client.close()
            feed.send(b"data: 1\n\n")
            feed.send(None)
            assert [event async for event in response.iter_events()] == [1]

    asyncio.run(work())


def test_error_in_code_of_stream_reader_is_unchanged(server, service):
    server.on(f"GET {X}", Answer(b"data: 1\n\n"))

    async def work() -> None:
        async with service().http.with_streaming_response("GET", X):
            raise FileNotFoundError("my file")

    with pytest.raises(FileNotFoundError, match="my file"):
        asyncio.run(work())
