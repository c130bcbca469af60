"""Chooses the engines of a service; the rest of the service knows only their interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from tinkex.config import read_env
from tinkex.engine.interface import Engines
from tinkex.engine.process import Setup
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.vllm_engine import can_draw

from .members import Member
from .pool import EnginePool
from .ray_cluster import RayCluster, RayOptions
from .ray_pool import RayPool
from .supervisor import Supervisor
from .worker import Worker

__all__ = [
    "engine_count",
    "make_engines",
    "ray_members",
    "share_out",
    "visible_gpus",
    "vllm_member",
]

#: Longest pause in seconds between two attempts to start an engine on Ray: an attempt costs little.
_RAY_PAUSE: Final = 5.0


def make_engines(
    setup: Setup,
    *,
    count: int | Literal["auto"],
    in_process: bool,
    deadline: float,
    on_demand: bool,
    vllm: bool = False,
    vllm_python: Path | None = None,
    ray: RayOptions | None = None,
) -> Engines:
    """One engine in a process of its own or, for tests, in a thread; or a pool of several, perhaps with vLLM or on Ray."""
    if ray is not None:
        cluster = RayCluster(ray)
        make = ray_members(setup, cluster, samples=not vllm, deadline=deadline)
        beside = [vllm_member(setup, vllm_python, deadline=deadline)] if vllm else []
        return RayPool(cluster, make, count, beside=beside, on_demand=on_demand)
    count = engine_count(count, setup.device)
    if count == 1 and not vllm:
        worker = Worker(setup, in_process=in_process, deadline=deadline)
        return Supervisor(worker, on_demand=on_demand)
    exchange = SharedMemory()
    members = []
    for number, (device, threads) in enumerate(share_out(setup, count)):
        own = replace(setup, device=device, threads=threads, depot=exchange.directory)
        worker = Worker(own, name=f"engine-{number}", in_process=in_process, deadline=deadline)
        members.append(Member(Supervisor(worker, on_demand=True), samples=not vllm))
    if vllm:
        members.append(vllm_member(setup, vllm_python, deadline=deadline))
    return EnginePool(members, exchange, on_demand=on_demand)


def vllm_member(setup: Setup, python: Path | None, *, deadline: float) -> Member:
    """A sampler that is a process of this machine, run by an interpreter that has vLLM."""
    own = replace(setup, engine="vllm")
    worker = Worker(own, name="vllm", python=python or Path(sys.executable), deadline=deadline)
    return Member(Supervisor(worker), trains=False, draws=can_draw, reads_again=True)


def ray_members(
    setup: Setup, cluster: RayCluster, *, samples: bool = True, deadline: float
) -> Callable[[str, Mapping[str, float]], Member]:
    """Makes engines of a cluster, each with a name and resources; each has a pipe to the bridge."""

    def member(name: str, resources: Mapping[str, float]) -> Member:
        device = setup.device
        if device == "auto" and "GPU" not in resources:
            device = "cpu"
        threads = setup.threads or max(1, int(resources.get("CPU", 1)))
        own = replace(setup, device=device, threads=threads)
        launcher = partial(cluster.launch, resources, name)
        worker = Worker(own, name=name, launcher=launcher, deadline=deadline)
        engine = Supervisor(worker, on_demand=True, longest_pause=_RAY_PAUSE)
        return Member(engine, samples=samples)

    return member


def engine_count(asked: int | Literal["auto"], device: str) -> int:
    """How many engines a service has: with `auto`, one per GPU."""
    if asked != "auto":
        return asked
    return max(1, visible_gpus()) if device in {"auto", "cuda"} else 1


def share_out(setup: Setup, count: int) -> list[tuple[str, int | None]]:
    """Device and threads of each engine of a pool: the GPUs in turn, or an equal share of the processors."""
    gpus = visible_gpus()
    if setup.device == "cuda" or (setup.device == "auto" and gpus):
        return [(f"cuda:{number % max(1, gpus)}", setup.threads) for number in range(count)]
    threads = setup.threads or max(1, usable_processors() // count)
    return [(setup.device, threads)] * count


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> int:
    """CUDA devices of this machine, without loading torch."""
    visible = read_env("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in {"", "-1"}])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
