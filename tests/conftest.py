from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

import tinkex
from tinkex._client.runtime import runtime
from tinkex.telemetry import bus
from tinkex.telemetry.events import Event

from .quick import Quick
from .scripted import FakeClock, ScriptedServer

pytest_plugins = ["pytester"]

# A background job of a shell ignores Ctrl-C, and its children inherit that: tests could not interrupt commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes: without compiled modules each would compile what it imports, and pytest every test.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadline: the time of an example depends on the machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the long form of tests/chaos")
    parser.addoption("--engines", default="1", help="engines of the service of tests/contract")
    parser.addoption("--browser", action="store_true", help="all of tests/browser, not only a look")
    parser.addoption(
        "--vllm", action="store_true", help="also tests/vllm, in an environment it makes"
    )
    parser.addoption(
        "--ray", action="store_true", help="also tests/ray, in an environment it makes"
    )
    parser.addoption("--vllm-python", help="tests/vllm with the Python of an existing environment")
    parser.addoption(
        "--device", default="cpu", help="where tests/engine/test_both.py and test_engine.py compute"
    )
    parser.addoption("--wheel", action="store_true", help="also the wheel with the extra [local]")
    parser.addoption(
        "--quick", action="store_true", help="only what needs no torch, official client or database"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        config.pluginmanager.register(Quick())


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of the engine suite: cpu, or `pytest tests/engine --device cuda` on a machine that has one."""
    chosen: str = request.config.getoption("--device")
    return chosen


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def only_own_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that other tests left open, which have a real clock, send nothing in the background meanwhile."""
    from tinkex._client.heartbeat import Heartbeat
    from tinkex._client.session import Session

    beat, refresh = Heartbeat.beat, Session._refresh

    async def own_beat(heartbeat: Heartbeat) -> bool:
        return await beat(heartbeat) if _is_fake(heartbeat.transport.clock) else True

    async def own_refresh(session: Session) -> float | None:
        return await refresh(session) if _is_fake(session.clock) else 60.0

    monkeypatch.setattr(Heartbeat, "beat", own_beat)
    monkeypatch.setattr(Session, "_refresh", own_refresh)


def _is_fake(clock: object) -> bool:
    return isinstance(clock, FakeClock)


@pytest.fixture
def quiet_bus(only_own_clients: None) -> Iterator[None]:
    """Only subscriptions of this test exist, and it leaves none behind; those of other tests' clients do not count."""
    from tinkex.telemetry import bus

    subscriptions, listening = dict(bus._subscriptions), dict(bus._listening)
    bus._subscriptions.clear()
    bus._listening.clear()
    yield
    left = dict(bus._subscriptions), dict(bus._listening)
    bus._subscriptions.clear()
    bus._subscriptions.update(subscriptions)
    bus._listening.clear()
    bus._listening.update(listening)
    assert left == ({}, {})


@pytest.fixture
def paused_loop() -> Iterator[None]:
    """The event loop of all clients waits: clients that other tests left open send no heartbeat meanwhile."""
    paused, resumed = threading.Event(), threading.Event()

    def wait() -> None:
        paused.set()
        resumed.wait()

    runtime().post(wait)
    paused.wait()
    yield
    resumed.set()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(
    server: ScriptedServer, clock: FakeClock
) -> Iterator[Callable[..., tinkex.ServiceClient]]:
    """Creates service clients of the scripted server; they are closed at the end of the test."""
    made: list[tinkex.ServiceClient] = []

    def make(**options: Any) -> tinkex.ServiceClient:
        # Without telemetry, so that the server gets only the requests of the test.
        options = {
            "base_url": server.url,
            "api_key": "tml-test",
            "clock": clock,
            "telemetry_enabled": False,
            **options,
        }
        made.append(tinkex.ServiceClient(**options))
        return made[-1]

    yield make
    for client in made:
        client.close().result(10)


@pytest.fixture
def heard() -> Iterator[Callable[..., list[Any]]]:
    """Subscribe to events of the given classes, or of all; returns the list of received events."""
    numbers: list[int] = []

    def listen(*kinds: type[Event]) -> list[Any]:
        events: list[Any] = []
        numbers.append(bus.attach(events.append, *kinds))
        return events

    yield listen
    for number in numbers:
        bus.detach(number)
