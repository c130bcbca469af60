"""Small Ray clusters on this machine, and processes of theirs to kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import services
from ray.cluster_utils import Cluster

__all__ = ["Machines", "eventually"]


def eventually(holds: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait until something holds, and return it."""
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, f"did not come true within {seconds:.0f} s"
        time.sleep(0.1)
    return found


_get_node = services.get_node


def _patient_get_node(*args: Any) -> Any:
    """Look for a node that starts. Ray itself gives up after 30 s, which a busy machine may need."""
    until = time.monotonic() + 300.0
    while True:
        try:
            return _get_node(*args)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


services.get_node = _patient_get_node


class Machines:
    """A head without processors for engines, and nodes with one each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = []

    @classmethod
    @contextmanager
    def running(cls, nodes: int, **resources: float) -> Iterator[Machines]:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, **_SMALL},
        )
        made = cls(cluster)
        try:
            for _ in range(nodes):
                made.join(**resources)
            yield made
        finally:
            cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def join(self, num_cpus: float = 1, **resources: float) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=num_cpus, **_SMALL, **resources))

    def kill_node(self, number: int) -> None:
        """Kill the raylet of a node: its actors die with it."""
        node = self.nodes.pop(number % len(self.nodes))
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_actor(self, number: int) -> bool:
        """Kill the process of one engine; False if none runs."""
        actors = [pid for node in self.nodes for pid in _actors(_raylet(node))]
        if not actors:
            return False
        os.kill(actors[number % len(actors)], signal.SIGKILL)
        return True

    def kill_head(self) -> None:
        """Kill the head's processes, as a crash of its machine would."""
        for kind in ("gcs_server", "raylet"):
            for process in self._cluster.head_node.all_processes[kind]:
                os.kill(process.process.pid, signal.SIGKILL)


_SMALL = {"object_store_memory": 100 << 20}


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _actors(raylet: int) -> list[int]:
    """The engines among the children of a raylet."""
    found = []
    for task in Path(f"/proc/{raylet}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
            if name.startswith(b"ray::EngineActor"):
                found.append(pid)
    return found
