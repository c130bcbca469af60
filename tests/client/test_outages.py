"""Clients during temporary outages: name resolution, network, and a machine that sleeps."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest

import tinkex
from tinkex._client.http1 import HTTP1Client
from tinkex._client.runtime import SampleFuture, TaskGroup, runtime
from tinkex.errors import APIConnectionError, APITimeoutError

from ..scripted import Answer, FakeClock, Hang, Raw, promise
from .helpers import POLL, STEP, answer_training, new_trainer, until

DONE = Answer({"metrics": {"x": 1.0}})
RUNS = "GET /api/v1/training_runs"
CURSOR = {"offset": 0, "limit": 20, "total_count": 0}


class Nameless:
    """An HTTP client whose first requests fail to resolve the host name."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._client = HTTP1Client()

    def _resolve(self) -> None:
        if self._failures:
            self._failures -= 1
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def post(self, url: str, headers: Mapping[str, str], content: bytes | None = None) -> Any:
        self._resolve()
        return await self._client.post(url, headers, content)

    async def get(self, url: str, headers: Mapping[str, str]) -> Any:
        self._resolve()
        return await self._client.get(url, headers)

    async def delete(self, url: str, headers: Mapping[str, str]) -> Any:
        self._resolve()
        return await self._client.delete(url, headers)

    async def aclose(self) -> None:
        await self._client.aclose()


# -- host names------------------------------------------------------------------------------------


def test_call_succeeds_once_host_name_resolves_again(server, service, clock):
    answer_training(server)
    client = service(http_client=Nameless(4))
    new_trainer(client).optim_step().result(10)
    assert len(clock.slept) == 4


def test_host_name_that_never_resolves_ends_as_connection_error(service):
    patient = FakeClock(long=float("inf"))
    client = service(http_client=Nameless(10**9), clock=patient)
    with pytest.raises(APIConnectionError, match="name resolution"):
        client.get_server_capabilities()
    assert len(patient.slept) == 10


def test_timeout_before_the_session_is_open_names_what_prevents_it(service):
    waiting = FakeClock(long=0.0)  # the first retry waits for ever
    client = service(http_client=Nameless(10**9), clock=waiting)
    session = client.holder
    opening = runtime().submit(session.opened(), SampleFuture(), TaskGroup())
    until(lambda: session.transport.unopened is not None)
    with pytest.raises(
        APITimeoutError, match=r"session could be opened.*name resolution"
    ) as caught:
        client.get_server_capabilities(timeout=0.05)
    opening.cancel()
    assert isinstance(caught.value.__cause__, APIConnectionError)


def test_timeout_after_the_service_answered_names_no_earlier_failure(server, service):
    server.on(RUNS, Answer({}, 500), Answer({"training_runs": [], "cursor": CURSOR}), Hang())
    rest = service().create_rest_client()
    rest.list_training_runs().result(10)  # retried; reading opens no session
    for _ in range(50):  # as many as there are connections
        rest.list_training_runs()
    with pytest.raises(APITimeoutError, match=r"not finished within 0\.05 s") as caught:
        rest.list_training_runs(timeout=0.05).result(10)
    assert "session" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_invalid_host_name_is_connection_error(clock):
    client = tinkex.ServiceClient(
        base_url="http://nobody.invalid", api_key="tml-test", clock=clock, max_retries=1
    )
    with pytest.raises(APIConnectionError):
        client.get_server_capabilities(timeout=30)
    client.close().result(10)


# -- sleeping machine ----------------------------------------------------------------------------


def leap(clock: FakeClock, seconds: float, answer: Any) -> Any:
    """An answer before which the clock jumps forward."""

    def reply(_: Any) -> Any:
        clock.now += seconds
        return answer

    return reply


def test_poll_continues_after_machine_slept(server, service, clock):
    answer_training(server)
    trainer = new_trainer(service())
    server.on(STEP, promise("r"))
    server.on_future("r", leap(clock, 9 * 3600, Raw()), Raw(), Raw(), DONE)
    assert trainer.optim_step().result(10).metrics == {"x": 1.0}


def test_dispatch_continues_after_machine_slept(server, service, clock):
    answer_training(server)
    trainer = new_trainer(service())
    server.on(STEP, leap(clock, 9 * 3600, Raw()), Raw(), promise("r"))
    server.on_future("r", DONE)
    assert trainer.optim_step().result(10).metrics == {"x": 1.0}


def test_timeout_that_ended_during_sleep_is_raised_at_once(server, service, clock):
    answer_training(server)
    trainer = new_trainer(service())
    server.on(STEP, promise("r"))
    server.on_future("r", leap(clock, 9 * 3600, Answer({}, 408)))
    with pytest.raises(APITimeoutError):
        trainer.optim_step(timeout=600).result(10)
    assert len(server.asked(POLL)) == 2  # one for the model and one for the step
