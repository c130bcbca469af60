"""Requests and answers over real sockets: headers, statuses, retries, errors, pools."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import platform
import socket
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyqwest
import pytest

from tinkex import errors, types
from tinkex._client.transport import Transport, _dump, _file_limit, _spare_sockets, machine_headers
from tinkex._version import PARITY_VERSION, __version__
from tinkex._wire.compression import compress
from tinkex._wire.failures import lacks_route
from tinkex._wire.operations import OPERATIONS, Pool, operation
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    ClientClosedError,
    ConfigError,
    InvalidInputError,
    RequestErrorCategory,
    TinkerError,
)
from tinkex.types import EmptyResponse, HealthResponse

from ..scripted import Answer, FakeClock, Hang, Raw, ScriptedServer, promise
from .helpers import (
    SAMPLE,
    STEP,
    answer_training,
    new_sampler,
    new_trainer,
    promise_by_seq,
    sample,
    sampled,
    until,
)

HEALTH = operation("healthz")
FINISH = operation("finish_session")
FINISH_PATH = {"session_id": "s-1"}
BEAT = operation("session_heartbeat")
X = "/api/v1/x"
Use = Callable[..., Any]


@pytest.fixture(params=["http1", "pyqwest"])
def library(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options that select the HTTP library: HTTP1Client, or pyqwest for TLS and proxies."""
    if request.param == "http1":
        return {}
    return {"http_client": pyqwest.Client(pyqwest.HTTPTransport(follow_redirects=False))}


@pytest.fixture
def use(server: ScriptedServer) -> Use:
    """Run a coroutine function with a transport to the scripted server."""

    def run(
        work: Callable[[Transport], Awaitable[Any]], clock: FakeClock | None = None, **options: Any
    ) -> Any:
        options = {"base_url": server.url, "api_key": "tml-test", **options}

        async def main() -> Any:
            config = Config.from_environ({}, **options)
            transport = Transport(config, clock=clock or FakeClock(long=1e9))
            try:
                return await work(transport)
            finally:
                await transport.close()
                for _ in range(5):
                    await asyncio.sleep(0)

        return asyncio.run(main())

    return run


@pytest.fixture
def closed_port() -> Iterator[int]:
    # Bound but not listening: connections are refused, and no other process can take the port.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def health(transport: Transport) -> Awaitable[HealthResponse]:
    return transport.call(HEALTH)


def on_health(server: ScriptedServer, *replies: Any) -> None:
    server.on("GET /api/v1/healthz", *replies)


def failed(use: Use, work: Any = health, **options: Any) -> Any:
    with pytest.raises(TinkerError) as raised:
        use(work, **options)
    return raised.value


WELL = Answer({"status": "ok"})


# -- statuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (300, "APIStatusError"),
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (405, "APIStatusError"),
        (408, "APIStatusError"),
        (409, "ConflictError"),
        (410, "GoneError"),
        (413, "PayloadTooLargeError"),
        (415, "UnsupportedMediaTypeError"),
        (422, "UnprocessableEntityError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
        (599, "InternalServerError"),
    ],
)
def test_each_status_raises_its_typed_error(server, use, status, kind):
    on_health(server, Answer({"detail": "no"}, status, {"X-Request-Id": "q-7"}))
    error = failed(use, max_retries=0)
    assert type(error) is getattr(errors, kind)
    assert (error.status_code, error.request_id) == (status, "q-7")
    assert error.request.method == "GET"
    assert error.request.url == f"{server.url}/api/v1/healthz"
    assert error.body == {"detail": "no"}
    assert str(error) == f"no (status {status})"


@pytest.mark.parametrize(
    ("status", "body", "category"),
    [
        (400, {}, "user"),
        (404, {"detail": "x"}, "user"),
        (429, {}, "server"),
        (408, {}, "server"),
        (500, {}, "server"),
        (400, {"category": "server"}, "server"),
        (500, {"category": "User"}, "user"),
        (500, {"category": "odd"}, "unknown"),
    ],
)
def test_category_comes_from_body_or_else_from_status(server, use, status, body, category):
    on_health(server, Answer(body, status))
    assert failed(use, max_retries=0).category is RequestErrorCategory(category)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "d"}, "d"),
        ({"message": "m"}, "m"),
        ({"error": "e"}, "e"),
        ({"error": {"message": "m"}}, "m"),
        ({"detail": [{"loc": ["body", "rank"], "msg": "too small"}]}, "body.rank: too small"),
        (b"plain words", "plain words"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_error_carries_message_of_service(server, use, body, message):
    on_health(server, Answer(body, 404))
    assert failed(use).message == message


@pytest.mark.parametrize(
    "body", [{"detail": "Not Found"}, {"detail": "Method Not Allowed"}, b"", [1], b"404 Not Found."]
)
@pytest.mark.parametrize("status", [404, 405])
def test_error_names_missing_endpoint(server, use, body, status):
    on_health(server, Answer(body, status))
    error = failed(use)
    assert error.message == f"The service at {server.url} has no GET /api/v1/healthz."
    assert lacks_route(error)
    assert error.body == (body.decode() or None if isinstance(body, bytes) else body)


def test_missing_object_is_distinguished_from_missing_endpoint(server, use):
    on_health(server, Answer({"detail": "Checkpoint not found: a/b"}, 404))
    error = failed(use)
    assert error.message == "Checkpoint not found: a/b"
    assert not lacks_route(error)


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_an_empty_answer_is_an_empty_object(server, service, body):
    server.on(f"POST {X}", Answer(body))
    assert service().http.post(X, {"a": 1}).result(10) == {}


def test_a_204_is_an_empty_object(server, service):
    server.on(f"DELETE {X}", Raw(b"HTTP/1.1 204 No Content\r\n\r\n"))
    assert service().http.delete(X).result(10) == {}


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("zstd", compress)])
def test_compressed_answers_are_decompressed(server, use, library, encoding, encode):
    on_health(server, Answer(encode(b'{"status": "ok"}'), headers={"content-encoding": encoding}))
    assert use(health, **library).status == "ok"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"<html>", content_type="text/html", headers={"x-request-id": "q-7"}),
        Answer(b'{"status": ', headers={"x-request-id": "q-7"}),
        Answer([1, 2], headers={"x-request-id": "q-7"}),
        Answer({"status": 5}, headers={"x-request-id": "q-7"}),
        Answer(b"\xff", headers={"x-request-id": "q-7"}),
    ],
)
def test_undecodable_body_of_success_is_validation_error(server, use, library, answer):
    on_health(server, answer)
    error = failed(use, **library)
    assert type(error) is APIResponseValidationError
    assert (error.status_code, error.request_id) == (200, "q-7")
    assert "healthz" in str(error)
    assert not error.retryable
    assert len(server.requests) == 1


def test_redirect_is_not_followed_and_is_error_for_most_calls(server, use, library):
    archive = operation("get_checkpoint_archive_url")
    path = {"training_run_id": "r", "checkpoint_id": "weights/1"}
    moved = Answer(b"", 302, {"Location": f"{server.url}/elsewhere"})
    server.on("GET /api/v1/training_runs/r/checkpoints/weights/1/archive", moved)
    on_health(server, moved)
    response = use(lambda transport: transport.send(archive, path=path), **library)
    assert (response.status, response.headers["location"]) == (302, f"{server.url}/elsewhere")
    error = failed(use, **library)
    assert (type(error), error.status_code) == (APIStatusError, 302)
    assert server.asked("GET /elsewhere") == []


# -- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
@pytest.mark.parametrize("most", [0, 3])
def test_temporary_status_is_retried_max_retries_times(server, use, status, most):
    on_health(server, Answer({}, status))
    client_config = operation("client_config")
    server.on("POST /api/v1/client/config", Answer({}, status))
    error = failed(use, lambda transport: transport.call(client_config), max_retries=most)
    assert error.status_code == status
    assert len(server.asked("POST /api/v1/client/config")) == most + 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_permanent_status_is_not_retried(server, use, status):
    on_health(server, Answer({"detail": "no"}, status))
    failed(use)
    assert len(server.requests) == 1


def test_heartbeat_is_not_retried(server, use):
    server.on("POST /api/v1/session_heartbeat", Answer({}, 503))
    failed(use, lambda transport: transport.call(BEAT, {"session_id": "s-1"}))
    assert len(server.requests) == 1


def test_dispatch_is_retried_for_five_minutes_without_answer(use, closed_port):
    clock = FakeClock(long=1e9)
    error = failed(use, clock=clock, base_url=f"http://127.0.0.1:{closed_port}", max_retries=2)
    assert type(error) is APIConnectionError
    assert clock.slept[:2] == [0.5, 1.0]
    assert sum(clock.slept) == 300


def test_waits_follow_retry_after_or_backoff_formula(server, use, library):
    clock = FakeClock(long=1e9)
    on_health(
        server,
        Answer({}, 429, {"Retry-After": "7"}),
        Answer({}, 503, {"retry-after-ms": "250", "retry-after": "9"}),
        Answer({}, 500),
        Answer({}, 503, {"retry-after": "100"}),
        WELL,
    )
    assert use(health, clock=clock, **library).status == "ok"
    assert clock.slept == [7.0, 0.25, 2.0, 4.0]


def test_x_should_retry_forces_and_prevents_retries(server, use):
    on_health(server, Answer({"detail": "x"}, 400, {"X-Should-Retry": "TRUE"}), WELL)
    assert use(health).status == "ok"
    on_health(server, Answer({}, 503, {"X-Should-Retry": "False"}))
    assert failed(use).status_code == 503
    assert len(server.requests) == 3


def test_blank_400_is_retried_three_times_without_wait(server, use):
    clock = FakeClock()
    on_health(server, Answer(b"", 400))
    assert failed(use, clock=clock).status_code == 400
    assert len(server.requests) == 4
    assert clock.slept == []


def test_billing_pause_ends_with_window_or_payment(server, service, clock):
    server.on(
        "POST /api/v1/client/config", Answer({"billing_exception_max_pause_duration_sec": 10})
    )
    on_health(server, Answer({"detail": "pay"}, 402), WELL)
    client = service()
    assert client.health().status == "ok"
    assert clock.slept == [5.0]
    on_health(server, Answer({"detail": "pay"}, 402))
    with pytest.raises(errors.BillingError, match="pay"):
        client.health()
    server.on(f"GET {X}", Answer({"detail": "pay"}, 402))
    with pytest.raises(errors.BillingError, match="pay"):
        client.http.get(X).result(10)
    assert clock.slept == [5.0] * 5


@pytest.mark.parametrize(
    "name", ["create_session", "create_model", "create_sampling_session", "session_heartbeat"]
)
def test_opening_calls_raise_billing_error_at_once(server, use, name):
    row = operation(name)
    server.on(f"POST {row.path}", Answer({"detail": "pay"}, 402))
    assert isinstance(failed(use, lambda transport: transport.call(row, {})), errors.BillingError)
    assert len(server.requests) == 1


def test_creating_sampler_has_no_retry_window(use, closed_port):
    clock = FakeClock(long=1e9)
    row = operation("create_sampling_session")
    options = {"base_url": f"http://127.0.0.1:{closed_port}", "max_retries": 1}
    failed(use, lambda transport: transport.call(row, {}), clock=clock, **options)
    assert clock.slept == [0.5]


@pytest.mark.parametrize("body", [b"", b"null", b"done", b"[]"])
def test_body_of_empty_response_is_ignored(server, use, body):
    server.on("POST /api/v1/sessions/s-1/finish", Answer(body))
    done = use(lambda transport: transport.call(FINISH, {}, path=FINISH_PATH))
    assert isinstance(done, EmptyResponse)


def test_call_is_not_retried_beyond_deadline(server, use):
    clock = FakeClock(long=1e9)
    on_health(server, Answer({}, 503))
    failed(use, lambda transport: transport.call(HEALTH, deadline=clock.now + 4), clock=clock)
    assert clock.slept == [0.5, 1.0, 2.0]


# -- no answer ------------------------------------------------------------------------------------

BROKEN = [
    b"",
    b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope",
    b"HTTP/1.1 200 OK\r\ncontent-encoding: zstd\r\ncontent-length: 4\r\n\r\nnope",
]


@pytest.mark.parametrize("broken", BROKEN)
def test_malformed_answer_is_connection_error_and_retried(server, use, library, broken):
    server.on("POST /api/v1/session_heartbeat", Raw(broken))
    error = failed(use, lambda transport: transport.call(BEAT), **library)
    assert type(error) is APIConnectionError
    assert error.request.url == f"{server.url}/api/v1/session_heartbeat"
    assert error.__cause__ is not None
    on_health(server, Raw(broken), WELL)
    assert use(health, **library).status == "ok"


def test_a_refused_connection_is_a_connection_error(use, library, closed_port):
    error = failed(
        use,
        lambda transport: transport.call(BEAT),
        base_url=f"http://127.0.0.1:{closed_port}",
        **library,
    )
    assert type(error) is APIConnectionError
    assert isinstance(error.__cause__, ConnectionError)
    assert error.retryable
    assert error.status_code is None


@pytest.mark.heavy
def test_dead_network_path_costs_one_timeout_not_one_per_connection(server, use):
    async def work(transport: Transport) -> None:
        server.on("POST /api/v1/session_heartbeat", Answer({}))
        await asyncio.gather(*(transport.call(BEAT, {}) for _ in range(5)))
        assert server.open_connections == 5
        server.on("POST /api/v1/session_heartbeat", Hang())
        with pytest.raises(APITimeoutError):
            await transport.call(BEAT, {}, deadline=transport.clock.monotonic() + 0.05)
        while server.open_connections:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)

    use(work)


def test_missing_answer_is_timeout(server, use, library):
    server.on("POST /api/v1/asample", Hang())
    error = failed(use, lambda t: t.call(operation("asample"), {}), timeout=0.05, **library)
    assert (type(error), str(error)) == (APITimeoutError, "No answer within 0.05 s")
    assert error.retryable


@pytest.mark.parametrize("left", [0.05, 0.0, -5.0])
def test_exchange_ends_at_deadline_of_call(server, use, library, left):
    server.on("POST /api/v1/session_heartbeat", Hang())
    clock = FakeClock()
    error = failed(use, lambda t: t.call(BEAT, deadline=clock.now + left), clock=clock, **library)
    assert type(error) is APITimeoutError
    assert left > 0 or server.requests == []


def test_connect_timeout_is_named_in_error(use):
    with socket.socket() as full, socket.socket() as one, socket.socket() as two:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (one, two):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        error = failed(
            use,
            lambda transport: transport.call(BEAT),
            base_url=f"http://127.0.0.1:{full.getsockname()[1]}",
            connect_timeout=0.05,
        )
    assert type(error) is APITimeoutError
    assert str(error) == "No answer: no connection within 0.05 s"


# -- headers --------------------------------------------------------------------------------------


def test_request_has_protocol_headers(server, use, library):
    on_health(server, WELL)
    use(health, timeout=60, **library)
    headers = dict(server.requests[0].headers)
    assert headers.pop("host") == server.url.removeprefix("http://")
    headers.pop("accept-encoding", None)
    assert headers == {
        "accept": "application/json",
        "user-agent": f"AsyncTinkex/Python {__version__}",
        "x-api-key": "tml-test",
        "x-stainless-package-version": PARITY_VERSION,
        "x-stainless-os": {"Linux": "Linux", "Darwin": "MacOS"}.get(platform.system(), "Windows"),
        "x-stainless-arch": headers["x-stainless-arch"],
        "x-stainless-runtime": "CPython",
        "x-stainless-runtime-version": platform.python_version(),
        "x-stainless-async": "async:asyncio",
        "x-stainless-read-timeout": "60.000",
        "x-stainless-retry-count": "0",
    }
    assert headers["x-stainless-arch"] in {"x64", "arm64", "x32", "arm", "unknown"}


@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [
        ("linux", "x86_64", ("Linux", "x64")),
        ("darwin", "arm64", ("MacOS", "arm64")),
        ("win32", "AMD64", ("Windows", "x64")),
        ("freebsd14", "i686", ("FreeBSD", "x32")),
        ("openbsd7", "armv7l", ("OpenBSD", "arm")),
        ("plan9", "riscv64", ("Unknown", "unknown")),
    ],
)
def test_machine_headers_use_protocol_terms(system, machine, named):
    assert tuple(machine_headers(system, machine).values()) == named


def test_body_has_content_type(server, use, library):
    use(lambda transport: transport.call(BEAT, {"session_id": "s-1"}), **library)
    request = server.requests[0]
    assert request.headers["content-type"] == "application/json"
    assert request.headers["content-length"] == str(len(request.body))
    assert request.json == {"session_id": "s-1"}


def test_idempotency_key_is_same_for_retries_and_new_for_each_call(server, use):
    finish = "POST /api/v1/sessions/s-1/finish"
    server.on(finish, Answer({}, 503), Answer({}, 503), Answer({}))

    async def twice(transport: Transport) -> None:
        await transport.call(FINISH, {}, path=FINISH_PATH)
        await transport.call(FINISH, {}, path=FINISH_PATH)

    use(twice)
    keys = [request.headers["x-idempotency-key"] for request in server.asked(finish)]
    counts = [request.headers["x-stainless-retry-count"] for request in server.asked(finish)]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert counts == ["0", "1", "2", "0"]


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_every_modifying_call_has_idempotency_key(server, use, method):
    name = "set_checkpoint_ttl" if method == "PUT" else "delete_checkpoint"
    path = {"training_run_id": "r", "checkpoint_id": "weights/1"}
    failed(use, lambda t: t.call(operation(name), {"ttl_seconds": 5}, path=path))
    assert server.requests[0].method == method
    assert server.requests[0].headers["x-idempotency-key"]


def test_get_has_no_idempotency_key(server, use):
    on_health(server, Answer({}, 503), WELL)
    use(health)
    assert all("x-idempotency-key" not in request.headers for request in server.requests)


def test_idempotency_key_of_caller_is_kept(server, use):
    own = {"X-Idempotency-Key": "mine"}
    use(lambda transport: transport.call(FINISH, {}, path=FINISH_PATH, headers=own))
    assert server.requests[0].headers["x-idempotency-key"] == "mine"


def test_cloudflare_headers_are_sent_if_configured(server, use):
    on_health(server, WELL)
    use(health)
    use(health, cf_access_client_id="id", cf_access_client_secret="secret")
    without, with_them = (request.headers for request in server.requests)
    assert "cf-access-client-id" not in without
    assert "cf-access-client-secret" not in without
    assert with_them["cf-access-client-id"] == "id"
    assert with_them["cf-access-client-secret"] == "secret"


def test_later_headers_win_whatever_their_case(server, use):
    async def work(transport: Transport) -> None:
        await transport.call(BEAT, {}, headers={"X-B": "call", "CONTENT-TYPE": "text/x"})

    use(
        work,
        cf_access_client_id="cloudflare",
        default_headers={
            "User-Agent": "mine",
            "X-Stainless-Os": "mine",
            "CF-Access-Client-Id": "mine",
            "X-Api-Key": "mine",
            "x-a": "default",
            "x-b": "default",
        },
    )
    headers = server.requests[0].headers
    names = ("user-agent", "x-stainless-os", "cf-access-client-id", "x-api-key")
    assert [headers[name] for name in names] == ["mine"] * 4
    assert (headers["x-a"], headers["x-b"]) == ("default", "call")
    assert headers["content-type"] == "text/x"


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"default_headers": {"x-a": "1\r\nx-b: SECRET"}}, {}),
        ({"default_headers": {"a b": "SECRET"}}, {}),
        ({"cf_access_client_secret": "SEC\nRET"}, {}),
        ({"api_key": "tml-SEC\nRET"}, {}),
        ({}, {"x-a": "SEC\rRET"}),
        ({}, {"x-a:": "SECRET"}),
        ({}, {"": "SECRET"}),
        ({}, {"x-a": "SEC\0RET"}),
    ],
)
def test_header_with_line_break_is_refused_without_quoting_it(
    server, use, library, options, headers
):
    error = failed(use, lambda t: t.call(HEALTH, headers=headers), **library, **options)
    assert isinstance(error, InvalidInputError)
    assert "SEC" not in str(error)
    assert server.requests == []


def test_credentials_in_url_become_header_and_are_never_shown(server, use, caplog):
    url = server.url.replace("http://", "http://me:p%40ss@") + "/sub"
    server.on("GET /sub/api/v1/healthz", Answer({"detail": "no"}, 404))
    caplog.set_level(logging.INFO, "tinkex")
    error = failed(use, base_url=url, dump_headers=True)
    assert server.requests[0].headers["authorization"] == "Basic bWU6cEBzcw=="
    assert error.request.url == f"{server.url}/sub/api/v1/healthz"
    assert "p%40ss" not in caplog.text
    assert "p@ss" not in caplog.text
    assert "bWU6cEBzcw" not in caplog.text


def test_header_dump_redacts_secrets(server, use, caplog):
    caplog.set_level(logging.INFO, "tinkex")
    server.on("POST /api/v1/session_heartbeat", Answer({}))
    use(
        lambda transport: transport.call(BEAT, {"session_id": "s-1"}, headers={"x-seen": "yes"}),
        dump_headers=True,
        api_key="tml-secret-1",
        cf_access_client_id="id-2",
        cf_access_client_secret="secret-3",
        default_headers={"Authorization": "Bearer secret-4", "Proxy-Authorization": "secret-5"},
    )
    (record,) = (record for record in caplog.records if "attempt 0" in record.getMessage())
    text = record.getMessage()
    assert f"POST {server.url}/api/v1/session_heartbeat" in text
    assert "x-seen: yes" in text
    assert "cf-access-client-id: id-2" in text
    assert '{"session_id":"s-1"}' in text
    assert "secret" not in text.replace("cf-access-client-secret: [REDACTED]", "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:80/x", "http://host/x"),
        ("https://host:443/x?q=1", "https://host/x?q=1"),
        ("http://[::1]:80/x", "http://[::1]/x"),
        ("http://host:8080/x", "http://host:8080/x"),
        ("https://host:80/x", "https://host:80/x"),
    ],
)
def test_dump_hides_default_port(caplog, url, shown):
    caplog.set_level(logging.INFO, "tinkex")
    _dump("GET", url, 0, {}, None)
    assert caplog.records[0].message.startswith(f"GET {shown} (attempt 0)")


def test_streamed_request_is_dumped_unless_on_another_host(server, use, caplog):
    caplog.set_level(logging.INFO, "tinkex")
    server.on(f"GET {X}", Answer({}))

    async def work(transport: Transport) -> None:
        for address in (
            transport.url(X),
            f"{server.url.replace('127.0.0.1', 'localhost')}{X}?sig=1",
        ):
            headers = transport.headers()
            async with transport.open_stream(Pool.REST, "GET", address, headers) as response:
                await transport.read_stream(response)

    use(work, dump_headers=True)
    (record,) = (record for record in caplog.records if "attempt 0" in record.getMessage())
    assert f"GET {server.url}{X}" in record.getMessage()
    assert "tml-test" not in record.getMessage()


def test_large_or_binary_body_is_dumped_as_size(server, use, caplog):
    caplog.set_level(logging.INFO, "tinkex")

    async def work(transport: Transport) -> None:
        await transport.call(BEAT, {"text": "x" * 100_000})
        await transport.call(BEAT, b"\xff" * 50_000)

    use(work, dump_headers=True)
    assert len(caplog.text) < 10_000
    assert "<100011 bytes>" in caplog.text
    assert "<50000 bytes>" in caplog.text


def test_nothing_is_logged_without_dump_headers(server, use, caplog):
    caplog.set_level(logging.DEBUG, "tinkex")
    on_health(server, WELL)
    use(health)
    assert caplog.records == []


@pytest.mark.parametrize(("level", "logged"), [("warning", "WARNING"), ("error", "ERROR")])
def test_deprecation_note_is_logged_once(server, use, caplog, level, logged):
    note = {"x-deprecation-note": "upgrade soon", "x-deprecation-level": level}
    on_health(server, Answer({"status": "ok"}, headers=note))

    async def twice(transport: Transport) -> None:
        await health(transport)
        await health(transport)

    use(twice)
    assert [(r.levelname, r.name) for r in caplog.records] == [(logged, "tinkex")]
    assert "upgrade soon" in caplog.text


# -- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "query", "default", "expected"),
    [
        (X, None, {}, {}),
        (f"{X}?a=1", None, {}, {"a": "1"}),
        (
            X,
            {"a": 1, "b": True, "c": None, "d": "x y&z"},
            {},
            {"a": "1", "b": "true", "d": "x y&z"},
        ),
        (X, None, {"a": "default"}, {"a": "default"}),
        (f"{X}?a=path", None, {"a": "default", "b": "2"}, {"a": "path", "b": "2"}),
        (f"{X}?a=path&b=", {"a": "call"}, {"a": "default"}, {"a": "call", "b": ""}),
    ],
)
def test_query_precedence_is_default_then_path_then_call(
    server, service, path, query, default, expected
):
    server.on(f"GET {X}", Answer())
    service(default_query=default).http.get(path, query=query).result(10)
    assert server.requests[0].query == expected


def test_repeated_query_name_in_path_is_kept(use):
    async def url(transport: Transport) -> str:
        return transport.url("/x?tag=a&tag=b&c=1", {"c": 2})

    assert use(url, default_query={"tag": "z", "d": "4"}).endswith("/x?d=4&tag=a&tag=b&c=2")


@pytest.mark.parametrize("query", [{"": 1}, {" ": 1}, {"a": [1]}, {"a": {"b": 1}}, {"a": b"x"}])
def test_query_value_that_is_not_text_or_number_is_refused(server, service, query):
    with pytest.raises(InvalidInputError, match="query"):
        service().http.get(X, query=query).result(10)
    assert server.requests == []


def test_path_needs_no_leading_slash_and_cannot_leave_service(server, service):
    client = service(base_url=f"{server.url}/base/")
    for path in ("a/b", "/a/b", "http://example.org/a"):
        with pytest.raises(errors.NotFoundError):
            client.http.get(path).result(10)
    paths = [request.path for request in server.requests]
    assert paths == ["/base/a/b", "/base/a/b", "/base/http://example.org/a"]


# -- custom HTTP client ---------------------------------------------------------------------------


class Recorder:
    """A custom HTTP client that answers without a network."""

    made: list[Recorder] = []

    def __init__(self, answer: Any = None) -> None:
        Recorder.made.append(self)
        self.calls: list[tuple[str, str]] = []
        self.closed = 0
        self._answer = answer or SimpleNamespace(
            status=200, headers={"X-Request-Id": "Q"}, content=b'{"status": "ok"}'
        )

    async def _call(self, verb: str, url: str) -> Any:
        self.calls.append((verb, url))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def aclose(self) -> None:
        self.closed += 1

    async def get(self, url: str, headers: Any) -> Any:
        return await self._call("GET", url)

    async def post(self, url: str, headers: Any, content: bytes) -> Any:
        return await self._call("POST", url)

    async def delete(self, url: str, headers: Any) -> Any:
        return await self._call("DELETE", url)


def test_custom_http_client_replaces_network(server, use):
    recorder = Recorder()
    assert use(health, http_client=recorder).status == "ok"
    use(lambda t: t.call(FINISH, {}, path=FINISH_PATH), http_client=recorder)
    assert recorder.calls == [
        ("GET", f"{server.url}/api/v1/healthz"),
        ("POST", f"{server.url}/api/v1/sessions/s-1/finish"),
    ]
    assert server.requests == []


def test_custom_http_client_may_be_import_path(use):
    Recorder.made.clear()
    assert use(health, http_client=f"{__name__}:Recorder").status == "ok"
    assert len(Recorder.made) == 1


def test_custom_http_client_is_closed_by_its_creator(use):
    given = Recorder()
    use(health, http_client=given)
    assert given.closed == 0
    Recorder.made.clear()
    use(health, http_client=Recorder)
    assert [made.closed for made in Recorder.made] == [1]


def test_custom_http_client_without_put_or_stream_is_reported(use):
    path = {"training_run_id": "r", "checkpoint_id": "weights/1"}
    ttl = operation("set_checkpoint_ttl")
    error = failed(use, lambda t: t.call(ttl, {}, path=path), http_client=Recorder())
    assert isinstance(error, ConfigError)
    assert "'put'" in str(error)

    async def stream(transport: Transport) -> None:
        async with transport.open_stream(Pool.SESSION, "GET", transport.url("/x"), {}):
            pass

    assert "'stream'" in str(failed(use, stream, http_client=Recorder()))


def test_custom_http_client_may_return_header_names_in_any_case(use):
    answer = SimpleNamespace(
        status=404, headers={"X-Request-ID": "Q", "Retry-After": "5"}, content=b""
    )
    error = failed(use, http_client=Recorder(answer))
    assert (error.request_id, error.retry_after) == ("Q", 5.0)
    answer = SimpleNamespace(status=200, headers={"X-Request-ID": "Q"}, content=b"?")
    assert failed(use, http_client=Recorder(answer)).request_id == "Q"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ConnectionResetError("gone"), APIConnectionError),
        (socket.gaierror(-2, "unknown name"), APIConnectionError),
        (TimeoutError("slow"), APITimeoutError),
        (TimeoutError(), APITimeoutError),
        (OSError(), APIConnectionError),
        (pyqwest.ReadError("cut"), APIConnectionError),
        (pyqwest.WriteError("cut"), APIConnectionError),
        (pyqwest.RemoteProtocolError("odd"), APIConnectionError),
        (pyqwest.StreamError("odd", 2), APIConnectionError),
        (pyqwest.TooManyRedirects("round"), APIConnectionError),
        (pyqwest.ConnectTimeout("slow"), APITimeoutError),
    ],
)
def test_errors_of_http_library_become_connection_errors(use, raised, kind):
    error = failed(
        use, lambda transport: transport.call(BEAT), http_client=Recorder(raised), max_retries=0
    )
    assert type(error) is kind
    assert error.__cause__ is raised
    assert str(raised) in str(error)


def test_bug_in_custom_http_client_is_raised_unchanged(use):
    with pytest.raises(ZeroDivisionError):
        use(health, http_client=Recorder(ZeroDivisionError()))


# -- pools and limits -----------------------------------------------------------------------------


def test_each_pool_has_its_own_http_client(use):
    Recorder.made.clear()

    async def work(transport: Transport) -> None:
        for row in OPERATIONS.values():
            if row.method != "PUT":
                await transport.exchange(row, "http://x", {}, b"")

    use(work, http_client=Recorder)
    assert {row.pool for row in OPERATIONS.values()} == set(Pool)
    assert len(Recorder.made) == len(Pool)


@pytest.fixture
def patient_samples(monkeypatch):
    """No sample waits so long that it adds connections, however slow the machine is."""
    monkeypatch.setattr("tinkex._client.transport._PATIENCE", 3600.0)


def test_many_samples_use_only_sampling_connections(server, use, patient_samples):
    server.on("POST /api/v1/asample", Hang())
    on_health(server, WELL)
    asample = operation("asample")

    async def work(transport: Transport) -> None:
        flood = [asyncio.create_task(transport.call(asample, {})) for _ in range(10)]
        await asyncio.to_thread(server.wait_for, "POST /api/v1/asample", 3)
        await health(transport)
        assert len(server.asked("POST /api/v1/asample")) == 3
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    use(work, pool_size=3)


def test_waiting_samples_add_connections_up_to_pool_count(server, use, monkeypatch):
    monkeypatch.setattr("tinkex._client.transport._PATIENCE", 0.0)
    server.on("POST /api/v1/asample", Hang())
    on_health(server, WELL)
    asample = operation("asample")

    async def work(transport: Transport) -> None:
        flood = [asyncio.create_task(transport.call(asample, {})) for _ in range(10)]
        await asyncio.to_thread(server.wait_for, "POST /api/v1/asample", 6)
        await health(transport)
        assert len(server.asked("POST /api/v1/asample")) == 6
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    use(work, pool_size=2, pool_count=3)


def test_many_raw_requests_do_not_block_heartbeat(server, service, clock):
    server.on(f"GET {X}", Hang())
    client = service()
    flood = [client.http.get(X) for _ in range(60)]
    server.wait_for(f"GET {X}", 50)
    assert client.holder.get_session_id() == "s-1"
    until(lambda: clock.sleeping == 2)
    clock.advance(10)
    server.wait_for("POST /api/v1/session_heartbeat")
    for each in flood:
        each.cancel()


@pytest.mark.skipif((_file_limit() or 1024) < 1024, reason="hundreds of connections are opened")
def test_polls_of_samples_do_not_block_training_or_each_other(server, service):
    answer_training(server)
    server.on(SAMPLE, promise_by_seq)
    many = 410  # more than the 400 connections of the pool for other polls
    for number in range(many):
        server.on_future(f"r-{number}", Hang())
    server.on_future(f"r-{many - 1}", sampled(7))
    server.on(STEP, promise("step"))
    server.on_future("step", Answer({"metrics": {}}))
    client = service()
    trainer, sampler = new_trainer(client), new_sampler(client)
    drawing = [sample(sampler) for _ in range(many)]
    assert drawing[-1].result(10).sequences[0].tokens == [7]
    trainer.optim_step(types.AdamParams()).result(10)
    for each in drawing:
        each.cancel()


@pytest.mark.parametrize(("files", "sockets"), [(256, 128), (1024, 512), (1, 1)])
def test_polls_of_samples_use_half_of_file_limit(files, sockets):
    assert _spare_sockets(files) == sockets
    assert _spare_sockets(None) > 1_000_000


def test_slot_is_returned_however_request_ends(server, use):
    sample = "POST /api/v1/asample"
    server.on(sample, Answer({}, 500), Raw(b"HTTP/1.1 2"), Hang(), Answer({"request_id": "r"}))
    asample = operation("asample")

    async def work(transport: Transport) -> int:
        for _ in range(2):
            with pytest.raises(TinkerError):
                await transport.send(asample, {})
        task = asyncio.create_task(transport.send(asample, {}))
        await asyncio.to_thread(server.wait_for, sample, 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return (await transport.send(asample, {})).status

    assert use(work, pool_size=1) == 200


def test_twenty_requests_at_once_all_get_their_own_answers(server, service):
    server.on(f"POST {X}", lambda request: Answer({"echo": request.json["number"]}))
    client = service()
    futures = [client.http.post(X, {"number": number}) for number in range(20)]
    assert [future.result(10)["echo"] for future in futures] == list(range(20))
    keys = {request.headers["x-idempotency-key"] for request in server.requests}
    assert len(keys) == 20


# -- closing --------------------------------------------------------------------------------------


def test_a_closed_client_refuses_at_once(server, service):
    client = service()
    client.close().result(10)
    with pytest.raises(ClientClosedError):
        client.http.get(X)
    with pytest.raises(ClientClosedError):
        client.health()
    assert server.requests == []


def test_closing_ends_requests_in_flight_and_waiting(server, use, patient_samples):
    server.on("POST /api/v1/asample", Hang())
    asample = operation("asample")

    async def work(transport: Transport) -> None:
        tasks = [asyncio.create_task(transport.call(asample, {})) for _ in range(3)]
        await asyncio.to_thread(server.wait_for, "POST /api/v1/asample", 1)
        await transport.close()
        sent, *waited = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(sent, APIConnectionError)
        assert [type(error) for error in waited] == [ClientClosedError] * 2
        for late in (transport.call(HEALTH), transport.ready(Pool.SESSION)):
            with pytest.raises(ClientClosedError):
                await late
        with pytest.raises(ClientClosedError):
            async with transport.open_stream(Pool.SESSION, "GET", server.url, {}):
                pass

    use(work, pool_size=1)
    assert len(server.requests) == 1


def test_closing_client_fails_its_calls_with_client_closed_error(server, service):
    server.on(f"GET {X}", Hang())
    client = service()
    future = client.http.get(X)
    server.wait_for(f"GET {X}")
    client.close().result(10)
    with pytest.raises(ClientClosedError):
        future.result(10)


# -- streams --------------------------------------------------------------------------------------


def read_stream(row: Any, request: Any = None) -> Callable[[Transport], Awaitable[bytes]]:
    async def work(transport: Transport) -> bytes:
        async with transport.stream(row, request, {"Accept": "text/event-stream"}) as response:
            assert response.status == 200
            return b"".join([bytes(part) async for part in response.content])

    return work


STREAM = operation("stream_sample")


def test_a_streamed_operation_carries_the_same_headers(server, use, library):
    server.on("POST /api/v1/stream_sample", Answer(b"data: 1\n\n"))
    assert use(read_stream(STREAM, {"a": 1}), **library) == b"data: 1\n\n"
    (request,) = server.requests
    assert request.json == {"a": 1}
    assert request.headers["x-api-key"] == "tml-test"
    assert request.headers["x-stainless-retry-count"] == "0"
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["x-idempotency-key"]


@pytest.mark.parametrize("broken", BROKEN[:4])
def test_truncated_stream_is_connection_error(server, use, library, broken):
    server.on("POST /api/v1/stream_sample", Raw(broken))
    assert type(failed(use, read_stream(STREAM), **library)) is APIConnectionError


def test_stream_that_does_not_start_in_time_is_timeout(server, use, library):
    server.on("POST /api/v1/stream_sample", Hang())
    error = failed(use, read_stream(STREAM), timeout=0.05, **library)
    assert (type(error), str(error)) == (APITimeoutError, "No answer within 0.05 s")


def test_error_in_code_of_stream_reader_is_unchanged(server, use, library):
    server.on("POST /api/v1/stream_sample", Answer(b"data: 1\n\n"))

    async def work(transport: Transport) -> None:
        async with transport.stream(STREAM, {}):
            raise FileNotFoundError("my file")

    with pytest.raises(FileNotFoundError, match="my file"):
        use(work, **library)


def test_json_numbers_and_text_are_exact(server, service):
    body = {"big": 2**60, "small": 1e-300, "text": "☃", "deep": [[[]]]}
    server.on(f"GET {X}", Answer(json.dumps(body).encode()))
    assert service().http.get(X).result(10) == body
