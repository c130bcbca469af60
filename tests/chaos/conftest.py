"""Fault injection. The tests are short by default; `make chaos` runs their long form."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))
