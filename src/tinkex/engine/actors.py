"""Engines as actors of a cluster: what the bridge and the engines ask of the library that places and reaches them.

`RayActors` implements this with Ray. Tests implement it with threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "ActorHandle",
    "ActorLostError",
    "ActorSilentError",
    "Actors",
    "NodeView",
    "StoreFullError",
    "fits",
    "impossible",
    "lacking",
]


class ActorLostError(Exception):
    """The actor has died or cannot be reached; the message says why, as far as is known."""


class ActorSilentError(Exception):
    """The actor has not answered in time, or was not placed in time."""


class StoreFullError(Exception):
    """There is no room in the object store."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine of the cluster: its resources, such as CPU and GPU, and those that are free."""

    node_id: str
    name: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)


class ActorHandle(Protocol):
    """A live actor."""

    @property
    def name(self) -> str: ...

    def send(self, method: str, *args: object) -> None:
        """Call a method and do not wait; calls of the same method arrive in order."""

    def ask(self, method: str, *args: object, timeout: float | None = None) -> Any:
        """Call a method and wait for its result."""


class Actors(Protocol):
    """A cluster."""

    def connect(self) -> None:
        """Raises `ConfigError` if the cluster cannot be reached."""

    def nodes(self) -> Sequence[NodeView]:
        """The machines that are alive."""

    def place(
        self, name: str, resources: Mapping[str, float], avoid: Collection[str] = ()
    ) -> ActorHandle:
        """Start an `EngineActor` where the resources are free, but not on the nodes `avoid`; does not wait."""

    def here(self) -> str:
        """The id of the node on which this process runs."""

    def find(self, name: str) -> ActorHandle:
        """An actor by its name; raises `ActorLostError` if there is none."""

    def kill(self, actor: ActorHandle) -> None: ...

    def close(self) -> None: ...


def fits(nodes: Sequence[NodeView], need: Mapping[str, float]) -> int:
    """How many engines the free resources are enough for."""
    return sum(
        min(int(node.free.get(kind, 0.0) / amount + 1e-9) for kind, amount in need.items())
        for node in nodes
    )


def lacking(nodes: Sequence[NodeView], need: Mapping[str, float]) -> str | None:
    """Why one more engine cannot be placed: which resource is missing, and what there is; None if there is room."""
    if fits(nodes, need):
        return None
    wanted = " and ".join(f"{amount:g} {kind}" for kind, amount in need.items())
    reasons = []
    for kind, amount in need.items():
        most = max((node.total.get(kind, 0.0) for node in nodes), default=0.0)
        free = max((node.free.get(kind, 0.0) for node in nodes), default=0.0)
        if most < amount:
            reasons.append(f"no node has {amount:g} {kind}; the most is {most:g}")
        elif free < amount:
            reasons.append(f"no node has {amount:g} {kind} free; the most is {free:g}")
    listed = "; ".join(
        f"{node.name} "
        + ", ".join(
            f"{node.free.get(kind, 0.0):g} of {node.total.get(kind, 0.0):g} {kind} free"
            for kind in need
        )
        for node in nodes
    )
    why = " and ".join(reasons) or "no single node has all of it free"
    return (
        f"an engine needs {wanted} on one node, but {why} ({listed or 'the cluster has no nodes'})"
    )


def impossible(nodes: Sequence[NodeView], need: Mapping[str, float]) -> bool:
    """Whether no node could hold an engine, even if nobody else used it."""
    whole = [NodeView(node.node_id, node.name, node.total, node.total) for node in nodes]
    return not fits(whole, need)
