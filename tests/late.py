"""Time limits of functions that an executor runs; they run out where a test says so, however slow the machine is."""

from __future__ import annotations

import concurrent.futures
from itertools import count
from typing import Any

import pytest

from tinkex.regularizers import executor


def only_late(monkeypatch: pytest.MonkeyPatch, *late: int) -> None:
    """Wait for every function until it returns, except for those of these numbers: in the order of their outcomes."""
    numbers = count()

    def wait(pending: Any, left: float | None) -> Any:
        return concurrent.futures.wait(pending, left if next(numbers) in late else None)

    monkeypatch.setattr(executor, "wait", wait)
