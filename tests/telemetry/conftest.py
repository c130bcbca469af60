from __future__ import annotations

from collections.abc import Iterator

import pytest

from tinkex.telemetry import bus


@pytest.fixture(autouse=True)
def nobody_listens_afterwards() -> Iterator[None]:
    yield
    assert bus._subscriptions == {}
    assert bus._listening == {}
