from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _bus_of_its_own(quiet_bus: None) -> None:
    """What is listened to here is what a test attaches."""
