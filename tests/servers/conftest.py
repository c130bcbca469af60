from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex

from ..scripted import FakeClock
from .dialect import Dialect
from .skyrl import SkyRL
from .tuft import TuFT


@pytest.fixture
def skyrl() -> Iterator[SkyRL]:
    with SkyRL() as running:
        yield running


@pytest.fixture
def tuft() -> Iterator[TuFT]:
    with TuFT() as running:
        yield running


@pytest.fixture
def client_of(clock: FakeClock) -> Iterator[Callable[..., tinkex.ServiceClient]]:
    """Creates clients of a dialect and closes them at the end of the test."""
    made: list[tinkex.ServiceClient] = []

    def make(server: Dialect, **options: Any) -> tinkex.ServiceClient:
        options = {"api_key": "tml-test", "clock": clock, "telemetry_enabled": False, **options}
        made.append(tinkex.ServiceClient(base_url=server.url, **options))
        return made[-1]

    yield make
    for client in made:
        client.close().result(10)


@pytest.fixture
def trainer(client: tinkex.ServiceClient) -> tinkex.TrainingClient:
    """A new model on the server that the test module selects with its fixture `client`."""
    return client.create_lora_training_client("some/model", rank=4)
