"""For tests of training code: a pytest plugin with fixtures that run a service.

pytest loads the plugin itself once tinkex is installed.

    def test_my_loop(tinkex_fake):
        client = tinkex_fake.client()
        assert my_training_loop(client).final_loss < 1.0

`tinkex_fake` is a service with a fake engine: no model, no torch, ready in a fraction of a second, the same numbers on
every run, and losses that fall when a loop trains. `tinkex_tiny` really trains and samples `tinkex/tiny`, a Llama of
two layers. Both run for the whole test session; every `client()` has its own session, models and checkpoints.

Outside pytest, the context manager `service()` does the same.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from tinkex._client.service import ServiceClient

__all__ = ["RunningService", "service", "tinkex_fake", "tinkex_tiny"]


class RunningService:
    """A running service at `url`; it needs no key."""

    api_key = "tml-local"

    def __init__(self, url: str, data_dir: Path, base_model: str) -> None:
        self.url = url
        self.data_dir = data_dir
        self.base_model = base_model
        self._clients: list[ServiceClient] = []

    def client(self, **options: Any) -> ServiceClient:
        """A new client; it is closed with the service if the test does not close it."""
        from tinkex._client.service import ServiceClient

        client = ServiceClient(base_url=self.url, api_key=self.api_key, **options)
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        for client in self._clients:
            client.close("success").result()


@contextmanager
def service(
    engine: Literal["fake", "torch"] = "fake",
    base_models: Sequence[str] = ("tinkex/tiny",),
    *,
    data_dir: str | Path | None = None,
    **settings: Any,
) -> Iterator[RunningService]:
    """Run a service in this process; `settings` are fields of `tinkex.server.service.Settings`."""
    from tinkex.server.serve import ServiceThread
    from tinkex.server.service import Settings

    directory = Path(tempfile.mkdtemp(prefix="tinkex-")) if data_dir is None else Path(data_dir)
    fake = engine == "fake"
    running = ServiceThread(
        Settings(
            data_dir=directory,
            base_models=tuple(base_models),
            engine=engine,
            **{"engine_in_process": fake, **settings},
        )
    )
    try:
        url = running.start()
        served = RunningService(url, directory, base_models[0].partition("=")[0])
        try:
            yield served
        finally:
            served.close_clients()
            running.close()
    finally:
        if data_dir is None:
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def tinkex_fake() -> Iterator[RunningService]:
    """A running service with the fake engine."""
    with service("fake") as running:
        yield running


@pytest.fixture(scope="session")
def tinkex_tiny() -> Iterator[RunningService]:
    """A running service that really trains `tinkex/tiny`."""
    with service("torch") as running:
        yield running
