"""Actors of a Ray cluster. Only the bridge and the actors themselves import Ray, when they first need it.

Tried with Ray 2.60. Every wait has a timeout, and Ray's errors become those of `actors`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tinkex.errors import ConfigError

from .actor import EngineActor
from .actors import ActorHandle, ActorLostError, ActorSilentError, NodeView, StoreFullError

__all__ = ["RayActors"]

#: Threads of an actor: calls arrive and replies leave while the engine computes and others fetch parcels.
_GROUPS: Final = {"arriving": 1, "leaving": 1, "parcels": 2}
_GROUP_OF: Final = {"push": "arriving", "pull": "leaving", "fetch": "parcels", "forget": "parcels"}
_ANSWERING: Final = 5.0
_OPEN: Final = (
    "This Ray cluster has no token: it runs code for anyone who reaches its ports. "
    "The guide on several engines says how to secure it."
)


@contextmanager
def _our_errors() -> Iterator[None]:
    from ray import exceptions

    try:
        yield
    except exceptions.GetTimeoutError as error:
        raise ActorSilentError(str(error)) from None
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise StoreFullError(f"no room in Ray's object store: {_first_line(error)}") from None
    except (exceptions.RayError, ValueError) as error:  # a name that is not found is a ValueError
        raise ActorLostError(_reason(str(error))) from None


def _reason(text: str) -> str:
    """What is useful of Ray's description of a death: the line that gives the cause."""
    if "No module named 'tinkex" in text:
        return "tinkex is not installed there: pip install 'tinkex[local,ray]'"
    lines = [line.strip() for line in text.strip().splitlines()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    return (causes or lines or ["Ray gave no reason"])[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@dataclass(frozen=True, slots=True)
class _RayHandle:
    name: str
    handle: Any

    def send(self, method: str, *args: object) -> None:
        with _our_errors():
            self._call(method, args)

    def ask(self, method: str, *args: object, timeout: float | None = None) -> Any:
        import ray

        with _our_errors():
            return ray.get(self._call(method, args), timeout=timeout)

    def _call(self, method: str, args: Sequence[object]) -> Any:
        bound = getattr(self.handle, method)
        if group := _GROUP_OF.get(method):
            bound = bound.options(concurrency_group=group)
        return bound.remote(*args)


class RayActors:
    """A Ray cluster: an address, `auto` for the one that this machine belongs to, or `local` for a new one."""

    def __init__(self, address: str, namespace: str) -> None:
        self._address, self._namespace = address, namespace
        self._found: dict[str, _RayHandle] = {}

    def __reduce__(self) -> tuple[type[RayActors], tuple[str, str]]:
        return RayActors, (self._address, self._namespace)

    # -- the cluster -------------------------------------------------------------------------

    def connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._address == "local":
            # Ray then takes the loopback address for everything that listens, also on Linux.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            # On a busy machine Ray's own processes take longer to start than the 30 s that it waits.
            os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
            # Ray lowers the priority of actors to 15; beside other programs an engine would hardly run.
            os.environ.setdefault("RAY_worker_niceness", "0")
        else:
            _check_address(self._address)
        import ray

        options: dict[str, Any] = {
            "address": self._address,
            "namespace": self._namespace,
            "logging_level": logging.ERROR,
        }
        if self._address == "local":
            options |= {"include_dashboard": False, "num_cpus": _processors()}
        try:
            ray.init(**options)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster was found: {_first_line(error)} Start one with `ray start --head`, give its "
                "address, or use --ray local",
                field="ray",
            ) from None
        except Exception as error:
            raise ConfigError(
                f"cannot use the Ray cluster {self._address}: {str(error).strip()}", field="ray"
            ) from None
        if os.environ.get("RAY_AUTH_MODE") != "token":  # Ray sets it if it finds a token
            print(_OPEN, file=sys.stderr, flush=True)  # noqa: T201 - the service's log

    def nodes(self) -> list[NodeView]:
        from ray._private import state

        import ray

        free = state.available_resources_per_node()
        return [
            NodeView(
                node["NodeID"],
                f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}",
                dict(node["Resources"]),
                free.get(node["NodeID"], {}),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def close(self) -> None:
        import ray

        ray.shutdown()

    # -- actors ------------------------------------------------------------------------------

    def place(
        self, name: str, resources: Mapping[str, float], avoid: Collection[str] = ()
    ) -> ActorHandle:
        import ray

        options: dict[str, Any] = {
            "name": name,
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        if avoid:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}
        with _our_errors():
            made = ray.remote(concurrency_groups=_GROUPS)(EngineActor).options(**options)
            return _RayHandle(name, made.remote(name, self))

    def here(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def find(self, name: str) -> ActorHandle:
        import ray

        if name not in self._found:
            with _our_errors():
                self._found[name] = _RayHandle(name, ray.get_actor(name, self._namespace))
        return self._found[name]

    def kill(self, actor: ActorHandle) -> None:
        import ray

        assert isinstance(actor, _RayHandle)
        self._found.pop(actor.name, None)
        with contextlib.suppress(Exception):  # it has died before
            ray.kill(actor.handle, no_restart=True)


def _check_address(address: str) -> None:
    """Raise at once if nothing listens at an address: Ray would try for minutes."""
    if address == "auto":
        return
    if "://" in address:
        raise ConfigError(
            f"{address!r:.100} is an address of the Ray client; give HOST:PORT of the head, which is 6379 by default",
            field="ray",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r:.100} is not HOST:PORT, auto or local", field="ray")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERING).close()
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {address}: {error.strerror or error}; is the head of the Ray cluster running there?",
            field="ray",
        ) from None


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
