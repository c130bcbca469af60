"""Small Ray clusters on this machine, and processes of theirs to kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ray.cluster_utils import Cluster

__all__ = ["Machines", "eventually"]

T = TypeVar("T")


def eventually(holds: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait until something holds, and return it."""
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, f"did not come true within {seconds:.0f} s"
        time.sleep(0.1)
    return found


def started(start: Callable[[], T]) -> T:
    """Start a node, again if it is not there after 30 s: on a busy machine Ray's processes give up on each other."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


class Machines:
    """A head without processors for engines, and nodes with one each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = []

    @classmethod
    @contextmanager
    def running(cls, nodes: int, **resources: float) -> Iterator[Machines]:
        head = {"num_cpus": 0, "include_dashboard": False, **_SMALL}
        cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
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
        node = started(lambda: self._cluster.add_node(num_cpus=num_cpus, **_SMALL, **resources))
        self.nodes.append(node)

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
