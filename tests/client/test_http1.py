"""The HTTP/1.1 client, on asyncio and uvloop, against scripted sockets."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from tinkex._client.http1 import HTTP1Client, HTTP1Response
from tinkex.errors import InvalidInputError

from ..scripted import Answer, Hang, Raw, ScriptedServer

Run = Callable[[Coroutine[Any, Any, Any]], Any]
MEGABYTE = 1 << 20


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.run


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[HTTP1Client]:
    made = HTTP1Client(**options)
    try:
        yield made
    finally:
        await made.aclose()
        await settle()


async def settle() -> None:
    """Run callbacks that are ready on the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Run the loop until `condition` holds, for at most a minute."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


class Wire:
    """One connection of a hand-written server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        """The head and the body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.decode().lower().split("\r\n"):
            if line.startswith("content-length:"):
                length = int(line.partition(":")[2])
        return head + await self.reader.readexactly(length)

    def send(self, *parts: str | bytes) -> None:
        for part in parts:
            self.writer.write(part.encode() if isinstance(part, str) else part)


@asynccontextmanager
async def serving(
    serve: Callable[[Wire], Awaitable[None]], host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """A server on this loop that runs `serve` for every connection and then closes it.

    Leaving the block waits until all connections are closed, so the clients must be closed before.
    """
    tasks: list[asyncio.Task[None]] = []
    failures: list[BaseException] = []

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(Wire(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away
        except BaseException as error:
            failures.append(error)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(attend(reader, writer)))

    server = await asyncio.start_server(connected, host, 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        # asyncio calls `connected` two loop turns after it accepted a connection. If the server closed in between, the
        # socket would stay open. uvloop has no such gap.
        asyncio.get_running_loop().remove_reader(server.sockets[0])
        await settle()
        server.close()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
    assert not failures


def answering(*answers: str | bytes) -> Callable[[Wire], Awaitable[None]]:
    """Send these answers on one connection, whatever the requests are, then close it."""

    async def serve(wire: Wire) -> None:
        for answer in answers:
            await wire.request()
            wire.send(answer)

    return serve


async def answer_of(*answers: str | bytes) -> HTTP1Response:
    async with serving(answering(*answers)) as url, client() as http:
        return await http.get(url, {})


OK = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


# -- requests -------------------------------------------------------------------------------------


def test_each_method_sends_expected_request(run):
    seen = []

    async def serve(wire: Wire) -> None:
        while True:
            seen.append((await wire.request()).decode())
            wire.send(OK)

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            address = url.removeprefix("http://")
            await http.get(f"{url}/a?b=c", {"accept": "x"})
            await http.post(f"{url}/a", {}, b"body")
            await http.post(f"{url}/a", {})
            await http.put(f"{url}/a", {}, b"put")
            await http.delete(url, {})
        assert seen == [
            f"GET /a?b=c HTTP/1.1\r\nhost: {address}\r\naccept: x\r\n\r\n",
            f"POST /a HTTP/1.1\r\nhost: {address}\r\ncontent-length: 4\r\n\r\nbody",
            f"POST /a HTTP/1.1\r\nhost: {address}\r\ncontent-length: 0\r\n\r\n",
            f"PUT /a HTTP/1.1\r\nhost: {address}\r\ncontent-length: 3\r\n\r\nput",
            f"DELETE / HTTP/1.1\r\nhost: {address}\r\n\r\n",
        ]

    run(work())


@pytest.mark.parametrize("value", ["a\nb: c", "a\r\nb: c", "a\rb", "a\0b", "snow ☃"])
@pytest.mark.parametrize("where", ["name", "value"])
def test_header_with_line_break_is_refused(run, server, value, where):
    async def work() -> None:
        async with client() as http:
            headers = {value: "x"} if where == "name" else {"x": value}
            with pytest.raises(InvalidInputError):
                await http.get(server.url, headers)

    run(work())
    assert server.requests == []


def test_path_is_escaped_only_where_needed(run):
    seen = []

    async def serve(wire: Wire) -> None:
        while True:
            seen.append((await wire.request()).split(b" HTTP/1.1\r\n")[0].decode())
            wire.send(OK)

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            await http.get(f"{url}/a b/ü?q=x y", {})
            await http.get(f"{url}/run:1/a%20b?q=%2F&r=a+b", {})
        assert seen == ["GET /a%20b/%C3%BC?q=x%20y", "GET /run:1/a%20b?q=%2F&r=a+b"]

    run(work())


def test_host_header_of_caller_is_sent_once(run):
    heads = []

    async def serve(wire: Wire) -> None:
        heads.append((await wire.request()).decode())
        wire.send(OK)

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            await http.get(url, {"host": "example.org"})
        assert heads == ["GET / HTTP/1.1\r\nhost: example.org\r\n\r\n"]

    run(work())


def test_ipv6_address_is_in_brackets_in_host_header(run):
    heads = []

    async def serve(wire: Wire) -> None:
        heads.append((await wire.request()).decode())
        wire.send(OK)

    async def work() -> None:
        try:
            async with serving(serve, "::1") as url, client() as http:
                await http.get(url, {})
        except OSError:
            pytest.skip("no IPv6 here")
        assert f"host: {url.removeprefix('http://')}\r\n" in heads[0]
        assert "host: [::1]:" in heads[0]

    run(work())


@pytest.mark.heavy
def test_twenty_megabytes_are_sent_and_received(run, server):
    body = bytes(range(256)) * (20 * MEGABYTE // 256)
    server.on("POST /echo", lambda request: Answer(request.body))

    async def work() -> HTTP1Response:
        async with client() as http:
            return await http.post(f"{server.url}/echo", {}, body)

    assert run(work()).content == body


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_has_status_headers_in_lower_case_and_body(run):
    response = run(
        answer_of("HTTP/1.1 418 Tea\r\nX-One: 1\r\nx-one: 2\r\nContent-Length: 3\r\n\r\ntea")
    )
    assert response.status == 418
    assert response.headers == {"x-one": "1, 2", "content-length": "3"}
    assert response.content == b"tea"


@pytest.mark.parametrize("coding", ["chunked", "Chunked"])
def test_chunked_body_is_joined(run, coding):
    head = f"HTTP/1.1 200 OK\r\ntransfer-encoding: {coding}\r\n\r\n"
    response = run(answer_of(f"{head}3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nx-trailer: 1\r\n\r\n"))
    assert response.content == b"abcdefg"


def test_body_without_length_ends_with_connection(run):
    assert run(answer_of("HTTP/1.1 200 OK\r\n\r\nall of it")).content == b"all of it"
    assert run(answer_of("HTTP/1.0 200 OK\r\n\r\n")).content == b""


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_needs_no_length(run, status):
    async def work() -> None:
        async with serving(answering(f"HTTP/1.1 {status} X\r\n\r\n", OK)) as url, client() as http:
            assert (await http.get(url, {})).content == b""
            assert (await http.get(url, {})).content == b"ok"

    run(work())


def test_interim_answers_are_skipped(run):
    interim = "HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"
    response = run(answer_of(f"{interim}{OK}"))
    assert (response.status, response.content) == (200, b"ok")
    assert "x-early" not in response.headers


def test_answer_may_arrive_byte_by_byte(run):
    async def serve(wire: Wire) -> None:
        await wire.request()
        for byte in OK.encode():
            wire.send(bytes([byte]))
            await settle()

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            assert (await http.get(url, {})).content == b"ok"

    run(work())


def test_compressed_body_is_decompressed(run):
    body = gzip.compress(b"text" * 1000)
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
    assert run(answer_of(head.encode() + body)).content == b"text" * 1000


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "HTTP/1.1 200 O",
        "HTTP/1.1 200 OK\r\ncontent-le",
        "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n5\r\nabcde\r\n",
        "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope",
        "HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 4\r\n\r\nnope",
        "SSH-2.0-OpenSSH_9.6\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nwhatever",
    ],
)
def test_truncated_or_malformed_answer_is_connection_error(run, answer):
    with pytest.raises(ConnectionError):
        run(answer_of(answer))


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_error_answer_with_undecodable_body_keeps_its_status(run, encoding):
    head = f"HTTP/1.1 401 No\r\ncontent-encoding: {encoding}\r\ncontent-length: 4\r\n\r\n"
    response = run(answer_of(head + "nope"))
    assert (response.status, response.content) == (401, b"nope")

    async def work() -> int:
        async with (
            serving(answering(head + "nope")) as url,
            client() as http,
            http.stream("GET", url, {}) as stream,
        ):
            return stream.status

    assert run(work()) == 401


def test_body_ended_by_reset_is_not_complete(run):
    half = asyncio.Event()

    async def serve(wire: Wire) -> None:
        await wire.request()
        wire.send("HTTP/1.1 200 OK\r\n\r\nhalf of")
        await half.wait()
        raw = wire.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        wire.writer.transport.abort()

    async def work() -> None:
        async with (
            serving(serve) as url,
            client() as http,
            http.stream("GET", url, {}) as response,
        ):
            parts = response.content
            assert await anext(parts) == b"half of"
            half.set()
            with pytest.raises(ConnectionError):
                await anext(parts)

    run(work())


# -- connections ----------------------------------------------------------------------------------


def test_one_connection_serves_one_request_after_another(run, server):
    server.on("GET /", Answer())

    async def work() -> None:
        async with client() as http:
            for _ in range(5):
                await http.get(server.url, {})
                assert server.open_connections == 1

    run(work())


def test_concurrent_requests_use_separate_connections(run, server):
    server.on("GET /", Answer())

    async def work() -> None:
        async with client() as http:
            await asyncio.gather(*[http.get(server.url, {}) for _ in range(7)])
            assert server.open_connections == 7
            await asyncio.gather(*[http.get(server.url, {}) for _ in range(7)])
            assert server.open_connections == 7

    run(work())


def test_at_most_max_idle_connections_are_kept(run, server):
    server.on("GET /", Answer())

    async def work() -> None:
        async with client(max_idle=2) as http:
            await asyncio.gather(*[http.get(server.url, {}) for _ in range(7)])
            await until(lambda: server.open_connections == 2)

    run(work())


@pytest.mark.parametrize("version", ["HTTP/1.1 200 OK\r\nconnection: close", "HTTP/1.0 200 OK"])
def test_connection_close_header_prevents_reuse(run, version):
    served = 0

    async def serve(wire: Wire) -> None:
        nonlocal served
        served += 1
        await wire.request()
        wire.send(f"{version}\r\ncontent-length: 2\r\n\r\nok")
        assert await wire.reader.read() == b""

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            for _ in range(3):
                assert (await http.get(url, {})).content == b"ok"
        assert served == 3

    run(work())


def test_stale_connection_is_replaced_transparently(run):
    connections = 0

    async def serve(wire: Wire) -> None:
        nonlocal connections
        connections += 1
        await wire.request()
        wire.send(OK)
        if connections == 1:
            await wire.request()  # received, then closed without an answer

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            for _ in range(2):
                assert (await http.post(url, {}, b"x")).content == b"ok"
        assert connections == 2

    run(work())


def test_fresh_connection_closed_without_answer_is_error(run):
    connections = 0

    async def serve(wire: Wire) -> None:
        nonlocal connections
        connections += 1
        await wire.request()

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            with pytest.raises(ConnectionError, match="without an answer"):
                await http.get(url, {})
        assert connections == 1

    run(work())


@pytest.mark.parametrize("surplus", ["HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nno", OK, "???"])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_unsolicited_answer_is_never_used_for_next_request(run, surplus, when):
    said = asyncio.Event()
    connections = 0

    async def serve(wire: Wire) -> None:
        nonlocal connections
        connections += 1
        await wire.request()
        if connections == 2:
            wire.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmine")
            return
        wire.send(OK + surplus if when == "at once" else OK)
        if when == "later":
            await settle()
            wire.send(surplus)
        said.set()
        await wire.reader.read()

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            assert (await http.get(url, {})).content == b"ok"
            await said.wait()
            # The extra bytes may arrive later; the connection is closed because of them.
            await until(lambda: not http._open)
            assert (await http.get(url, {})).content == b"mine"

    run(work())


def test_a_cancelled_request_closes_its_connection(run, server):
    server.on("GET /", Hang())

    async def work() -> None:
        async with client() as http:
            task = asyncio.create_task(http.get(server.url, {}))
            await until(lambda: len(server.requests) == 1)
            task.cancel()
            await until(lambda: server.open_connections == 0)
            assert task.cancelled()

    run(work())


def test_idle_connections_survive_cancelled_request_and_can_be_dropped(run, server):
    async def work() -> None:
        async with client() as http:
            server.on("GET /x", Answer({}))
            await asyncio.gather(*(http.get(f"{server.url}/x", {}) for _ in range(5)))
            assert server.open_connections == 5
            server.on("GET /x", Hang())
            waiting = asyncio.ensure_future(http.get(f"{server.url}/x", {}))
            await asyncio.to_thread(server.wait_for, "GET /x", 6)
            waiting.cancel()  # does not mean that the network path is dead
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: server.open_connections == 4)
            http.drop_idle()
            await until(lambda: server.open_connections == 0)

    run(work())


def test_a_cancelled_upload_closes_its_connection_at_once(run):
    gone = asyncio.Event()

    async def serve(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await gone.wait()
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await wire.reader.read()) < 64 * MEGABYTE

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            task = asyncio.create_task(http.post(url, {}, bytes(64 * MEGABYTE)))
            await settle()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await settle()
            assert not http._open
            gone.set()
            await settle()

    run(work())


def test_answer_before_end_of_upload_is_accepted(run):
    async def serve(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.send("HTTP/1.1 413 No\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbig")
        await wire.reader.read()

    async def work() -> None:
        async with serving(serve) as url, client() as http:
            response = await http.post(url, {}, bytes(32 * MEGABYTE))
            assert (response.status, response.content) == (413, b"big")

    run(work())


def test_a_refused_connection_is_a_connection_error(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def work() -> None:
            async with client() as http:
                with pytest.raises(ConnectionRefusedError):
                    await http.get(url, {})

        run(work())


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_invalid_host_name_is_connection_error(run, host):
    async def work() -> None:
        async with client() as http:
            with pytest.raises(OSError, match="host"):
                await http.get(f"http://{host}/", {})

    run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems answer for a full backlog")
def test_connect_timeout_has_its_own_message(run):
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())

        async def work() -> None:
            async with client(connect_timeout=0.05) as http:
                with pytest.raises(TimeoutError, match=r"no connection within 0\.05 s"):
                    await http.get(f"http://127.0.0.1:{full.getsockname()[1]}", {})

        run(work())


def test_closing_ends_all_connections_and_requests_in_flight(run, server):
    server.on("GET /", Answer())
    server.on("GET /slow", Answer(), Hang())

    async def work() -> None:
        async with client() as http:
            await asyncio.gather(*[http.get(server.url, {}) for _ in range(3)])
            await http.get(f"{server.url}/slow", {})
            # This request uses a kept-alive connection.
            slow = asyncio.create_task(http.get(f"{server.url}/slow", {}))
            await until(lambda: len(server.asked("GET /slow")) == 2)
            await http.aclose()
            with pytest.raises(ConnectionError):
                await slow
            with pytest.raises(ConnectionError, match="closed"):
                await http.get(server.url, {})
            await until(lambda: server.open_connections == 0)

    run(work())
    assert len(server.requests) == 5


# -- streams --------------------------------------------------------------------------------------


def test_stream_yields_parts_as_they_arrive(run):
    async def work() -> None:
        taken = asyncio.Queue[bytes]()

        async def serve(wire: Wire) -> None:
            await wire.request()
            wire.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(3):
                wire.send(f"1\r\n{number}\r\n")
                # The server sends the next part only after this one is read.
                assert await taken.get() == str(number).encode()
            wire.send("0\r\n\r\n")

        async with (
            serving(serve) as url,
            client() as http,
            http.stream("GET", url, {"accept": "text/event-stream"}) as response,
        ):
            assert response.status == 200
            assert response.headers["transfer-encoding"] == "chunked"
            async for part in response.content:
                taken.put_nowait(part)

    run(work())


@pytest.mark.parametrize("length", [None, 64 * MEGABYTE])
def test_unread_stream_applies_backpressure(run, length):
    total = 64 * MEGABYTE
    sent = 0

    async def serve(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        announced = "" if length is None else f"content-length: {length}\r\n"
        wire.send(f"HTTP/1.1 200 OK\r\n{announced}\r\n")
        while sent < total:
            wire.send(bytes(MEGABYTE))
            await wire.writer.drain()
            sent += MEGABYTE

    async def work() -> None:
        async with (
            serving(serve) as url,
            client() as http,
            http.stream("GET", url, {}) as response,
        ):
            for _ in range(2000):
                await asyncio.sleep(0)
            assert sent < total / 2
            received = 0
            async for part in response.content:
                received += len(part)
            assert received == total

    run(work())


def test_the_end_of_a_stream_may_arrive_before_its_parts_are_read(run):
    async def serve(wire: Wire) -> None:
        await wire.request()
        wire.send("HTTP/1.1 200 OK\r\n\r\n", bytes(100_000))

    async def work() -> None:
        async with (
            serving(serve) as url,
            client() as http,
            http.stream("GET", url, {}) as response,
        ):
            await until(lambda: response._connection._closed)
            parts = [part async for part in response.content]
            assert sum(map(len, parts)) == 100_000

    run(work())


def test_truncated_stream_raises_after_received_parts(run):
    async def work() -> None:
        answer = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
        async with (
            serving(answering(answer)) as url,
            client() as http,
            http.stream("POST", url, {}, b"x") as response,
        ):
            parts = response.content
            assert await anext(parts) == b"half"
            with pytest.raises(ConnectionError, match="in the middle"):
                await anext(parts)

    run(work())


@pytest.mark.parametrize("answer", ["", "SSH-2.0\r\n"])
def test_stream_without_answer_is_connection_error(run, answer):
    async def work() -> None:
        async with serving(answering(answer)) as url, client() as http:
            with pytest.raises(ConnectionError):
                async with http.stream("GET", url, {}):
                    pass

    run(work())


def test_a_compressed_stream_is_refused_rather_than_misread(run):
    async def work() -> None:
        answer = "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nxx"
        async with serving(answering(answer)) as url, client() as http:
            with pytest.raises(ConnectionError, match="gzip"):
                async with http.stream("GET", url, {}):
                    pass

    run(work())


def test_leaving_a_stream_closes_its_connection(run, server: ScriptedServer):
    server.on("GET /", Answer(bytes(MEGABYTE)))

    async def work() -> None:
        async with client() as http:
            async with http.stream("GET", server.url, {}) as response:
                assert response.status == 200
            await until(lambda: server.open_connections == 0)

    run(work())


def test_a_cancelled_stream_closes_its_connection(run, server: ScriptedServer):
    server.on("GET /", Raw(b""), Hang())

    async def work() -> None:
        async with client() as http:

            async def read() -> None:
                async with http.stream("GET", server.url, {}) as response:
                    async for _ in response.content:
                        pass

            with pytest.raises(ConnectionError):
                await read()
            task = asyncio.create_task(read())
            await until(lambda: len(server.requests) == 2)
            task.cancel()
            await until(lambda: server.open_connections == 0)
            assert task.cancelled()

    run(work())
