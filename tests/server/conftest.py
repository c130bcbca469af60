from __future__ import annotations

from collections.abc import Iterator

import pytest

from tinkex.server.auth import Keys
from tinkex.testing import RunningService, service

from .api import Api


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    """A service with the fake engine, for the tests of one module."""
    with service("fake") as started:
        yield started


@pytest.fixture(scope="module")
def api(running: RunningService) -> Iterator[Api]:
    with Api(running.url) as user:
        yield user


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Api]]:
    """Two users of one service, Ann and Bob, each with a key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    with (
        service("fake", keys=Keys.from_file(file)) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        yield ann, bob
