from __future__ import annotations

from collections.abc import Iterator

import pytest

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
