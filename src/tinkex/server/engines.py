"""Chooses the engines of a service; the rest of the service knows only their interface."""

from __future__ import annotations

from tinkex.engine.interface import Engines
from tinkex.engine.process import Setup

from .supervisor import Supervisor
from .worker import Worker

__all__ = ["make_engines"]


def make_engines(setup: Setup, *, in_process: bool, deadline: float, on_demand: bool) -> Engines:
    """One engine in a process of its own or, for tests, in a thread."""
    worker = Worker(setup, in_process=in_process, deadline=deadline)
    return Supervisor(worker, on_demand=on_demand)
