"""Limits on bytes, time and number of connections for peers without a key."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.applications import Starlette

from tinkex.server.auth import Keys
from tinkex.server.connections import (
    MAX_PIPELINED,
    MIN_TAKEN_BYTES,
    BoundedProtocol,
    ConnectionLimits,
    Phase,
    affordable_connections,
)
from tinkex.server.serve import _serve
from tinkex.server.service import Settings
from tinkex.testing import service

from .test_serve import PATIENCE, SkippingLoop, is_healthy

HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = (
    b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


@pytest.fixture(scope="module")
def running():
    with service("fake") as started:
        yield started


@pytest.fixture(autouse=True)
def alive(running):
    yield
    assert is_healthy(running.url)


def exchange(url: str, *parts: bytes) -> bytes:
    """Everything that the service sends until it closes the connection."""
    parts_of_url = urlsplit(url)
    address = (parts_of_url.hostname or "", parts_of_url.port or 0)
    answer = b""
    with socket.create_connection(address, timeout=PATIENCE) as peer:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                peer.sendall(part)
        with contextlib.suppress(ConnectionError):
            while part := peer.recv(65536):
                answer += part
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# -- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"a: " + b"x" * (64 << 10) + b"\r\n",
        b"".join(b"a%d: %s\r\n" % (number, b"x" * 1000) for number in range(80)),
        b"".join(b"a%d: x\r\n" % number for number in range(300)),
    ],
    ids=["one long", "many long", "many"],
)
def test_a_request_head_over_the_limit_is_refused(running, head):
    answer = exchange(running.url, HEALTH + head + b"\r\n")
    assert status(answer) == 431
    assert b"connection: close" in answer
    assert b"--set max_head_bytes" in answer


def test_an_endless_head_is_refused_and_not_buffered(running):
    answer = exchange(running.url, HEALTH + b"a: ", *[b"x" * 65536] * 64)
    assert answer == b"" or status(answer) == 431


def test_a_head_of_a_usual_size_is_served(running):
    head = b"".join(b"a%d: %s\r\n" % (number, b"x" * 1000) for number in range(50))
    answer = exchange(running.url, HEALTH + head + b"connection: close\r\n\r\n")
    assert status(answer) == 200


def test_a_long_path_is_refused(running):
    answer = exchange(running.url, HEALTH.replace(b"healthz", b"x" * 20_000) + b"\r\n")
    assert status(answer) == 414


def test_endless_trailers_are_refused(running):
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
    answer = exchange(running.url, chunked, *[b"y" * 65536] * 64)
    assert answer == b"" or status(answer) == 431


def test_trailers_are_not_added_to_headers(running):
    body = b'{"tags": [], "sdk_version": "1"}'
    chunked = b"%x\r\n%s\r\n0\r\nhost: evil.example\r\nx: y\r\n\r\n" % (len(body), body)
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert status(exchange(running.url, head + chunked)) == 200


def test_few_pipelined_requests_are_served_and_many_are_refused(running):
    last = HEALTH + b"connection: close\r\n\r\n"
    answer = exchange(running.url, (HEALTH + b"\r\n") * 10 + last)
    assert answer.count(b"HTTP/1.1 200 ") == 11
    answer = exchange(running.url, (HEALTH + b"\r\n") * (MAX_PIPELINED + 50) + last)
    assert b"HTTP/1.1 400 " in answer


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -1\r\n",
        b"transfer-encoding: x\r\n",
    ],
)
def test_a_body_with_ambiguous_length_is_refused(running, head):
    assert status(exchange(running.url, POST + head + b"\r\n{}")) == 400


def test_an_upgrade_is_answered_as_a_plain_request(running):
    upgrade = b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert status(exchange(running.url, HEALTH + upgrade)) == 200


def test_http_1_0_is_served(running):
    answer = exchange(running.url, HEALTH.replace(b"1.1", b"1.0") + b"\r\n")
    assert status(answer) == 200


# -- time ----------------------------------------------------------------------------------------


class Peer:
    """A connection to a service on an event loop whose clock can skip ahead."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def rest(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


Connect = Callable[[], Coroutine[Any, Any, Peer]]


@asynccontextmanager
async def serving(data_dir: Path, **settings: Any) -> AsyncIterator[Connect]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    chosen = Settings(data_dir, ("tinkex/tiny",), engine="fake", engine_in_process=True, **settings)
    task = asyncio.create_task(_serve(chosen, "127.0.0.1", 0, stop, on_ready=ready.set_result))
    parts = urlsplit(await ready)
    peers: list[Peer] = []

    async def connect() -> Peer:
        peers.append(Peer(*await asyncio.open_connection(parts.hostname, parts.port)))
        return peers[-1]

    try:
        yield connect
    finally:
        for peer in peers:
            peer.writer.close()
        stop.set()
        await task


def on_skipping_loop(scenario: Callable[[SkippingLoop], Coroutine[Any, Any, None]]) -> None:
    loop = SkippingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.wait_for(scenario(loop), 100 * PATIENCE))


async def is_open(peer: Peer) -> bool:
    """Whether an idle connection still gets a response."""
    peer.send(HEALTH + b"\r\n")
    head = await peer.reader.readuntil(b"\r\n\r\n")
    await peer.reader.readexactly(_length(head))
    return status(head) == 200


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next(
        int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length")
    )


async def drained(peer: socket.socket) -> bytes:
    """The remaining bytes of a connection until its end."""
    loop, answer = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while part := await loop.sock_recv(peer, 1 << 20):
            answer += part
    return answer


def test_slow_senders_are_disconnected(tmp_path):
    async def scenario(loop: SkippingLoop) -> None:
        async with serving(tmp_path) as connect:
            kept, silent, half, body, empty = [await connect() for _ in range(5)]
            assert await is_open(kept)
            half.send(HEALTH + b"a: b")
            body.send(POST + b"content-length: 100\r\n\r\n{")
            empty.send(b"\r\n")  # not the start of a request
            assert await is_open(kept)  # by now all of it has arrived
            loop.skipped += 21.0
            assert await silent.rest() == b""
            assert await empty.rest() == b""
            assert status(await half.rest()) == 408
            assert await is_open(kept)
            loop.skipped += 31.0
            assert status(await body.rest()) == 408
            assert await is_open(kept)

    on_skipping_loop(scenario)


def test_a_slow_but_steady_body_is_read(tmp_path):
    async def scenario(loop: SkippingLoop) -> None:
        async with serving(tmp_path) as connect:
            steady, probe = await connect(), await connect()
            content = b'{"tags": [], "sdk_version": "1"}'.ljust(80_000)
            steady.send(POST + b"content-length: %d\r\n\r\n" % len(content))
            for start in range(0, len(content), 20_000):
                steady.send(content[start : start + 20_000])
                loop.skipped += 25.0
                assert await is_open(probe)
            assert status(await steady.reader.readuntil(b"\r\n\r\n")) == 200

    on_skipping_loop(scenario)


def test_a_lease_and_an_open_poll_are_not_closed(tmp_path):
    async def scenario(loop: SkippingLoop) -> None:
        async with serving(tmp_path) as connect:
            lease, probe = await connect(), await connect()
            lease.send(b"GET /lease HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await lease.reader.readuntil(b"held\n")
            for _ in range(5):
                loop.skipped += 100.0
                assert await is_open(probe)
            assert not lease.reader.at_eof()

    on_skipping_loop(scenario)


@pytest.mark.heavy
def test_a_peer_that_does_not_read_its_response_is_disconnected(tmp_path):
    async def scenario(loop: SkippingLoop) -> None:
        async with serving(tmp_path) as connect:
            probe = await connect()
            assert await is_open(probe)
            port = probe.writer.get_extra_info("peername")[1]
            with socket.socket() as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.setblocking(False)
                await loop.sock_connect(deaf, ("127.0.0.1", port))
                # More responses than the socket buffers can hold.
                docs = b"GET /docs HTTP/1.1\r\nhost: localhost\r\n\r\n"
                await loop.sock_sendall(deaf, docs * MAX_PIPELINED)
                for _ in range(45):  # one server tick each; deadlines are checked every ten ticks
                    loop.skipped += 10.0
                    assert await is_open(probe)
                answer = await drained(deaf)
                assert 0 < answer.count(b"HTTP/1.1 200 OK") < MAX_PIPELINED

    on_skipping_loop(scenario)


@pytest.mark.parametrize(("taken", "whole"), [(2_000, False), (100_000, True)])
def test_a_peer_that_reads_a_large_answer_too_slowly_is_disconnected(tmp_path, taken, whole):
    async def scenario(loop: SkippingLoop) -> None:
        async with serving(tmp_path) as connect:
            probe = await connect()
            assert await is_open(probe)
            port = probe.writer.get_extra_info("peername")[1]
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.setblocking(False)
                await loop.sock_connect(slow, ("127.0.0.1", port))
                docs = b"GET /docs HTTP/1.1\r\nhost: localhost\r\n"
                asked = (docs + b"\r\n") * (MAX_PIPELINED - 1) + docs + b"connection: close\r\n\r\n"
                await loop.sock_sendall(slow, asked)
                answer = b""
                with contextlib.suppress(ConnectionError):
                    for _ in range(
                        25
                    ):  # one server tick each; deadlines are checked every ten ticks
                        loop.skipped += 10.0
                        assert await is_open(probe)
                        answer += await at_most(slow, taken)
                answer += await drained(slow)
                assert (answer.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED) == whole

    on_skipping_loop(scenario)


async def at_most(peer: socket.socket, size: int) -> bytes:
    loop, answer = asyncio.get_running_loop(), b""
    while len(answer) < size and (part := await loop.sock_recv(peer, size - len(answer))):
        answer += part
    return answer


class SmallBuffers(asyncio.Transport):
    """A transport whose peer takes what a test says: no kernel takes the bytes in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent, self.aborted = 0, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.unsent += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("taken", "ended"), [(500, True), (MIN_TAKEN_BYTES // 50, False)])
def test_a_peer_must_take_enough_of_an_answer_in_every_period(taken, ended):
    async def scenario() -> None:
        config = uvicorn.Config(Starlette(), log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        limits = ConnectionLimits()
        protocol = BoundedProtocol(limits, config=config, server_state=state, app_state={})
        transport = SmallBuffers()
        protocol.connection_made(transport)
        protocol.phase = Phase.ANSWER
        start = protocol.since
        for second in range(100):
            if transport.unsent < MIN_TAKEN_BYTES:
                protocol.transport.write(bytes(MIN_TAKEN_BYTES))
            transport.unsent -= taken
            protocol.close_if_overdue(start + second)
        assert transport.aborted == ended

    asyncio.run(scenario())


# -- number --------------------------------------------------------------------------------------


def test_at_the_connection_limit_the_longest_idle_connection_is_closed(tmp_path):
    async def scenario(_: SkippingLoop) -> None:
        async with serving(tmp_path, max_connections=3) as connect:
            first, second, third = [await connect() for _ in range(3)]
            assert await is_open(first)
            assert await is_open(second)
            assert await is_open(third)
            fourth = await connect()
            assert await is_open(fourth)
            assert await first.rest() == b""
            assert await is_open(second)

    on_skipping_loop(scenario)


def test_at_the_limit_a_refused_request_without_its_body_is_closed(tmp_path):
    async def scenario(_: SkippingLoop) -> None:
        async with serving(tmp_path, max_connections=2) as connect:
            refused = [await connect() for _ in range(2)]
            for peer in refused:
                peer.send(POST.replace(b"json", b"x") + b"content-length: 100\r\n\r\n")
                assert status(await peer.reader.readuntil(b"\r\n\r\n")) == 415
            assert await is_open(await connect())

    on_skipping_loop(scenario)


def test_an_idle_connection_is_closed_after_a_late_body(tmp_path):
    async def scenario(loop: SkippingLoop) -> None:
        async with serving(tmp_path) as connect:
            late = await connect()
            late.send(POST.replace(b"json", b"x") + b"content-length: 5\r\n\r\n")
            head = await late.reader.readuntil(b"\r\n\r\n")
            await late.reader.readexactly(_length(head))
            late.send(b"12345")
            assert await is_open(late)
            late.send(POST.replace(b"json", b"x") + b"content-length: 5\r\n\r\n")
            head = await late.reader.readuntil(b"\r\n\r\n")
            await late.reader.readexactly(_length(head))
            late.send(b"12345")
            assert await is_open(await connect())  # by now the body has arrived
            loop.skipped += 301.0
            assert await late.rest() == b""

    on_skipping_loop(scenario)


def test_a_request_without_a_key_is_refused_before_its_body(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\n")

    async def scenario(_: SkippingLoop) -> None:
        async with serving(tmp_path / "data", keys=Keys.from_file(file)) as connect:
            stranger = await connect()
            stranger.send(POST + b"content-length: 50000000\r\n\r\n")
            assert status(await stranger.reader.readuntil(b"\r\n\r\n")) == 401

    on_skipping_loop(scenario)


def test_a_new_connection_is_refused_when_all_are_busy(tmp_path):
    async def scenario(_: SkippingLoop) -> None:
        async with serving(tmp_path, max_connections=2) as connect:
            leases = [await connect() for _ in range(2)]
            for lease in leases:
                lease.send(b"GET /lease HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await lease.reader.readuntil(b"held\n")
            refused = await connect()
            assert status(await refused.rest()) == 503
            leases[0].writer.close()
            await leases[0].writer.wait_closed()
            assert await is_open(await connect())

    on_skipping_loop(scenario)


@pytest.mark.parametrize(
    ("wanted", "descriptors", "connections"),
    [
        (10_000, 1024, 768),
        (10_000, 200, 72),
        (10_000, 65_536, 10_000),
        (10_000, resource.RLIM_INFINITY, 10_000),
        (10_000, 50, 1),
    ],
)
def test_the_connection_limit_reserves_file_descriptors(wanted, descriptors, connections):
    assert affordable_connections(wanted, descriptors) == connections
