"""What happens to a client when names, networks and machines go away for a while and come back."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest

import tinkex
from tinkex._client.http1 import HTTP1Client
from tinkex.errors import APIConnectionError, APITimeoutError

from ..scripted import Answer, FakeClock, Raw, promise
from .helpers import POLL, STEP, answer_training, new_trainer

DONE = Answer({"metrics": {"x": 1.0}})


class Nameless:
    """An HTTP client whose resolver does not know the service, until it does."""

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


# -- names ---------------------------------------------------------------------------------------


def test_a_name_that_resolves_again_is_only_a_delay(server, service, clock):
    answer_training(server)
    client = service(http_client=Nameless(4))
    new_trainer(client).optim_step().result(10)
    assert len(clock.slept) == 4


def test_a_name_that_never_resolves_is_a_connection_error_in_the_end(service):
    patient = FakeClock(long=float("inf"))
    client = service(http_client=Nameless(10**9), clock=patient)
    with pytest.raises(APIConnectionError, match="name resolution"):
        client.get_server_capabilities()
    assert len(patient.slept) == 10


def test_a_name_that_cannot_be_looked_up_is_a_connection_error(clock):
    client = tinkex.ServiceClient(
        base_url="http://nobody.invalid", api_key="tml-test", clock=clock, max_retries=1
    )
    with pytest.raises(APIConnectionError):
        client.get_server_capabilities(timeout=30)
    client.close().result(10)


# -- a machine that slept ------------------------------------------------------------------------


def leap(clock: FakeClock, seconds: float, answer: Any) -> Any:
    """An answer before which the clock leaps."""

    def reply(_: Any) -> Any:
        clock.now += seconds
        return answer

    return reply


def test_a_poll_goes_on_after_a_night_in_which_nobody_answered(server, service, clock):
    answer_training(server)
    trainer = new_trainer(service())
    server.on(STEP, promise("r"))
    server.on_future("r", leap(clock, 9 * 3600, Raw()), Raw(), Raw(), DONE)
    assert trainer.optim_step().result(10).metrics == {"x": 1.0}


def test_a_dispatch_goes_on_after_a_night_in_which_nobody_answered(server, service, clock):
    answer_training(server)
    trainer = new_trainer(service())
    server.on(STEP, leap(clock, 9 * 3600, Raw()), Raw(), promise("r"))
    server.on_future("r", DONE)
    assert trainer.optim_step().result(10).metrics == {"x": 1.0}


def test_a_timeout_that_passed_in_the_sleep_is_told_at_once(server, service, clock):
    answer_training(server)
    trainer = new_trainer(service())
    server.on(STEP, promise("r"))
    server.on_future("r", leap(clock, 9 * 3600, Answer({}, 408)))
    with pytest.raises(APITimeoutError):
        trainer.optim_step(timeout=600).result(10)
    assert len(server.asked(POLL)) == 2  # of the model and of the step
