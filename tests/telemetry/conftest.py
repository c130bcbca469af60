from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _bus_of_its_own(quiet_bus: None) -> None:
    """Only subscriptions of the test itself exist."""
