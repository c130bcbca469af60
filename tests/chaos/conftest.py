"""Faults on purpose. Short by default; `make chaos` runs the long form of the same tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))
