"""The service as a process: how it starts and stops, and its errors when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from tinkex.errors import ConfigError
from tinkex.server.leases import Leases
from tinkex.server.serve import ADDRESS_FILE, ServiceThread, _serve
from tinkex.server.service import Settings, read_setting

TINY = "tinkex/tiny"
PATIENCE = 120.0
READY = re.compile(r"tinkex is serving (.+) at (http://\S+)\n")


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def settings(data_dir: Path, cache_home: Path) -> Settings:
    """Settings for a service in this process."""
    return Settings(
        data_dir=data_dir,
        base_models=(TINY,),
        engine="fake",
        engine_in_process=True,
        cache_dir=cache_home / "tinkex" / "models",
    )


def is_healthy(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", "/api/v1/healthz")
        return connection.getresponse().status == 200


class Running:
    """A service in its own process, started as the command line does."""

    def __init__(self, data_dir: Path, cache_home: Path, *arguments: str, shell: str = "") -> None:
        self.data_dir = data_dir
        command = [sys.executable, "-c", "from tinkex.cli.main import main; main()", "serve"]
        options = ["--engine=fake", "--port=0", f"--data-dir={data_dir}", *arguments]
        prefix = ["sh", "-c", f'{shell}; exec "$@"', "sh"] if shell else []
        self.process = subprocess.Popen(
            [*prefix, *command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XDG_CACHE_HOME": str(cache_home), "HF_HUB_OFFLINE": "1"},
        )
        self.address = ("", 0)

    def ready(self) -> str:
        """Wait until it listens and return its URL."""
        assert self.process.stdout is not None
        told = READY.fullmatch(self.process.stdout.readline())
        assert told is not None
        assert told[1] == TINY
        if "--leased" not in self.process.args:  # type: ignore[operator]  # a list
            for_others = self.process.stdout.readline()
            assert f"base_url={told[2]}/v1 " in for_others
            assert for_others.endswith(f"base_url={told[2]}\n")
            assert "dashboard" in self.process.stdout.readline()
        parts = urlsplit(told[2])
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)
        return told[2]

    def get(self, path: str, key: str = "") -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"x-api-key": key} if key else {})
            answer = connection.getresponse()
            return answer.status, answer.headers["content-type"], answer.read()

    def lease(self) -> http.client.HTTPResponse:
        """Hold a lease until the response is closed."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        connection.request("GET", "/lease", headers={"connection": "close"})
        answer = connection.getresponse()
        assert answer.readline() == b"held\n"
        return answer

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        """The exit code and the rest of the output, once service and engine have ended.

        The engine shares stderr with the service, so stderr ends only when both have ended.
        """
        if number is not None:
            self.process.send_signal(number)
        said, complained = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said, complained

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(cache_home, tmp_path) -> Iterator[Any]:
    made: list[Running] = []

    def start(*arguments: str, data_dir: Path = tmp_path / "data", shell: str = "") -> Running:
        made.append(Running(data_dir, cache_home, *arguments, shell=shell))
        return made[-1]

    yield start
    for running in made:
        running.close()


# -- start and stop ----------------------------------------------------------------------------------


def test_a_service_prints_its_url_serves_and_stops_on_a_signal(start):
    running = start(f"--base-model={TINY}")
    url = running.ready()
    address = running.data_dir / ADDRESS_FILE
    assert json.loads(address.read_text()) == {"url": url, "pid": running.process.pid}
    status, kind, body = running.get("/api/v1/healthz")
    assert (status, kind) == (200, "application/json")
    assert json.loads(body)["status"] == "ok"
    for path in ("/", "/docs"):
        status, kind, body = running.get(path)
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert b"tinkex" in body
    status, kind, body = running.get("/openapi.json")
    assert (status, kind) == (200, "application/json")
    assert "/api/v1/healthz" in json.loads(body)["paths"]
    assert running.get("/nowhere")[0] == 404
    assert running.end(signal.SIGTERM) == (0, "", "")
    assert not address.exists()
    # The next service continues with this data, and stops although connections are open.
    again = start(f"--base-model={TINY}")
    again.ready()
    idle = socket.create_connection(again.address, timeout=PATIENCE)
    half = socket.create_connection(again.address, timeout=PATIENCE)
    with idle, half, again.lease():
        half.sendall(
            b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
        )
        assert again.end(signal.SIGINT) == (0, "", "")
    assert not address.exists()


@pytest.mark.heavy
def test_sighup_reads_the_key_file_again(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice: tml-alice-1\nbob: tml-bob-0002\n")
    running = start(f"--base-model={TINY}", f"--api-key-file={file}")
    running.ready()
    assert running.get("/api/v1/healthz", key="tml-bob-0002")[0] == 200
    for text, told in (("", "The keys stay as they were"), ("alice: tml-alice-1", "read again")):
        file.write_text(text)
        running.process.send_signal(signal.SIGHUP)
        assert told in running.process.stderr.readline()
    assert running.get("/api/v1/healthz", key="tml-bob-0002")[0] == 401
    assert running.get("/api/v1/healthz", key="tml-alice-1")[0] == 200


@pytest.mark.heavy
def test_a_service_can_be_stopped_while_it_starts(start, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "slow"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    endless = tmp_path / "model.safetensors.index.json"
    os.mkfifo(endless)
    running = start(f"--base-model=slow={tmp_path}")
    with endless.open("w"):  # opens once the engine is reading it
        assert running.end(signal.SIGINT) == (0, "", "")
    assert not (running.data_dir / ADDRESS_FILE).exists()


@pytest.mark.heavy
def test_more_connections_than_descriptors_do_not_break_a_service(start):
    running = start(f"--base-model={TINY}", shell="ulimit -Sn 64; ulimit -Hn 256")
    running.ready()
    with contextlib.ExitStack() as stack:
        for number in range(400):
            peer = stack.enter_context(socket.create_connection(running.address, timeout=PATIENCE))
            if number % 2:
                peer.sendall(b"GET / HTTP/1.1\r\n")
        assert running.get("/api/v1/healthz")[0] == 200
        assert running.get("/")[0] == 200
    assert running.end(signal.SIGTERM) == (0, "", "")


# -- leases ------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_leased_service_stops_with_its_last_holder(start):
    running = start(f"--base-model={TINY}", "--leased")
    running.ready()
    first, second = running.lease(), running.lease()
    first.close()
    third = running.lease()
    second.close()
    assert running.get("/api/v1/healthz")[0] == 200
    third.close()
    assert running.end() == (0, "", "")
    assert not (running.data_dir / ADDRESS_FILE).exists()


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can skip ahead."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


@pytest.mark.parametrize("leased", [True, False])
def test_only_a_leased_service_stops_without_holders(tmp_path, cache_home, leased):
    async def hold() -> None:
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            _serve(
                settings(tmp_path, cache_home),
                "127.0.0.1",
                0,
                stop,
                leased=leased,
                on_ready=ready.set_result,
            )
        )
        parts = urlsplit(await ready)
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"GET /lease HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"held\n")
        holding = asyncio.all_tasks() - before
        writer.close()
        await asyncio.wait(holding)
        assert not stop.is_set()
        loop.skipped += 30.0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stop.is_set() is leased
        stop.set()
        await serving

    loop = SkippingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.wait_for(hold(), 10 * PATIENCE))


class Holder:
    """A client that holds a lease until it disconnects."""

    def __init__(self, leases: Leases) -> None:
        self._gone = asyncio.Event()
        self._request = Request({"type": "http"}, self._receive)
        self._leases = leases

    async def __aenter__(self) -> None:
        response = await self._leases.endpoint(self._request)
        assert isinstance(response, StreamingResponse)
        self._stream = aiter(response.body_iterator)
        assert await anext(self._stream) == b"held\n"

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        with pytest.raises(StopAsyncIteration):
            await anext(self._stream)

    async def _receive(self) -> Any:
        if not self._gone.is_set():
            await self._gone.wait()
        return {"type": "http.disconnect"}


def test_the_service_stops_after_the_last_of_several_holders():
    async def hold() -> None:
        ended = asyncio.Event()
        leases = Leases(ended.set, grace=0.0)
        leases.start()
        async with Holder(leases):
            async with Holder(leases):
                pass
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not ended.is_set()
        await asyncio.wait_for(ended.wait(), PATIENCE)

    asyncio.run(hold())


def test_a_holder_within_the_grace_period_keeps_the_service_running():
    async def hold() -> None:
        ended = asyncio.Event()
        leases = Leases(ended.set, grace=0.0)
        for _ in range(3):
            async with Holder(leases):
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not ended.is_set()
        await asyncio.wait_for(ended.wait(), PATIENCE)

    asyncio.run(hold())


# -- configuration errors ----------------------------------------------------------------------------


def complaint(running: Running) -> str:
    """The one-line error of a service that cannot start."""
    code, said, complained = running.end()
    assert code == 1
    assert said == ""
    assert complained.startswith("Error: ")
    assert complained.count("\n") == 1
    return complained


@pytest.mark.heavy
def test_a_port_in_use_is_reported(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = complaint(start(f"--base-model={TINY}", f"--port={port}"))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert "--port" in told


@pytest.mark.heavy
def test_a_data_directory_in_use_is_reported_and_its_service_keeps_running(
    start, tmp_path, cache_home
):
    running = ServiceThread(settings(tmp_path, cache_home))
    url = running.start()
    try:
        told = complaint(start(f"--base-model={TINY}", data_dir=tmp_path))
        assert f"{tmp_path} is in use by another service, process {os.getpid()};" in told
        assert json.loads((tmp_path / ADDRESS_FILE).read_text())["url"] == url
        assert is_healthy(url)
    finally:
        running.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--base-model=./not there"], "./not there", marks=pytest.mark.heavy),
        ([f"--base-model={TINY}", "--host=0.0.0.0"], "--api-key-file"),
        pytest.param(
            [f"--base-model={TINY}", "--port=70000"],
            "cannot listen on 127.0.0.1:70000",
            marks=pytest.mark.heavy,
        ),
    ],
)
def test_an_invalid_configuration_is_reported_in_one_line(start, arguments, message):
    assert message in complaint(start(*arguments))


@pytest.mark.heavy
def test_a_data_directory_that_cannot_be_created_is_reported(start, tmp_path):
    (tmp_path / "file").touch()
    told = complaint(start(f"--base-model={TINY}", data_dir=tmp_path / "file" / "data"))
    assert f"cannot create {tmp_path / 'file' / 'data'}" in told


# -- in a thread -------------------------------------------------------------------------------------


def test_a_service_can_run_in_a_thread(tmp_path, cache_home):
    for _ in range(2):
        service = ServiceThread(settings(tmp_path, cache_home))
        assert is_healthy(service.start())
        with pytest.raises(ConfigError, match="in use"):
            ServiceThread(settings(tmp_path, cache_home)).start()
        service.close()
        assert not (tmp_path / ADDRESS_FILE).exists()


def test_numeric_settings_can_be_set_by_name():
    assert read_setting("max_stop_strings=7") == ("max_stop_strings", 7)
    assert read_setting("hold=0.5") == ("hold", 0.5)


@pytest.mark.parametrize(
    "text",
    ["", "max_stops=1", "keys=1", "hold", "hold=soon", "hold=nan", "hold=-1", "max_topk=1.5"],
)
def test_an_unknown_or_invalid_setting_is_refused_by_name(text):
    with pytest.raises(ConfigError) as refused:
        read_setting(text)
    assert refused.value.field == text.partition("=")[0]
