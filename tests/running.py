"""Runs generators."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

R = TypeVar("R")


def finish(work: Generator[object, None, R]) -> R:
    """Run a pass to its end; return its result."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: R = end.value
        return result
