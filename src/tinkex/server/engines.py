"""Chooses the engines of a service; the rest of the service knows only their interface."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Final, Literal

from tinkex.config import read_env
from tinkex.engine.interface import Engines
from tinkex.engine.process import Setup
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.vllm_engine import can_draw

from .members import Member
from .other_python import check_python
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

logger = logging.getLogger("tinkex.server")

#: Longest pause in seconds between two attempts to start an engine on Ray: an attempt costs little.
_RAY_PAUSE: Final = 5.0
#: Files of which a machine with a GPU has at least one: of NVIDIA's driver, in WSL, of a Jetson, of AMD's driver.
_DRIVERS: Final = (
    "/proc/driver/nvidia",
    "/dev/nvidiactl",
    "/dev/dxg",
    "/dev/nvhost-ctrl",
    "/dev/kfd",
)


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
        freeing = SharedMemory().remove_abandoned  # what a killed pool has left
        worker = Worker(setup, in_process=in_process, prepare=freeing, deadline=deadline)
        return Supervisor(worker, on_demand=on_demand)
    exchange = SharedMemory()
    members = []
    shares = share_out(setup, count)
    if count > usable_processors() and not shares[0].device.startswith("cuda"):
        logger.warning(
            "%d engines share %d processors: they take more memory and compute no faster than %d.",
            count,
            usable_processors(),
            usable_processors(),
        )
    for number, share in enumerate(shares):
        worker = Worker(
            replace(share, depot=exchange.directory),
            name=f"engine-{number}",
            in_process=in_process,
            prepare=exchange.keep,  # it may be gone since the pool was started
            deadline=deadline,
        )
        members.append(Member(Supervisor(worker, on_demand=True), samples=not vllm))
    if vllm:
        members.append(vllm_member(setup, vllm_python, deadline=deadline))
    return EnginePool(members, exchange, on_demand=on_demand)


def vllm_member(setup: Setup, python: Path | None, *, deadline: float) -> Member:
    """A sampler that is a process of this machine, run by an interpreter that has vLLM."""
    own, python = replace(setup, engine="vllm"), python or Path(sys.executable)
    check = partial(check_python, python)
    worker = Worker(own, name="vllm", python=python, prepare=check, deadline=deadline)
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
        gpus = resources.get("GPU")
        share = None if gpus is None else min(1.0, gpus)
        own = replace(setup, device=device, threads=threads, memory_share=share)
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


def share_out(setup: Setup, count: int) -> list[Setup]:
    """The engines of a pool: they get the GPUs in turn, or equal shares of the processors and the memory."""
    gpus = visible_gpus()
    if setup.device == "cuda" or (setup.device == "auto" and gpus):
        share = 1 / ceil(count / max(1, gpus))
        return [
            replace(setup, device=f"cuda:{number % max(1, gpus)}", memory_share=share)
            for number in range(count)
        ]
    threads = setup.threads or max(1, usable_processors() // count)
    return [replace(setup, threads=threads, memory_share=1 / count)] * count


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> int:
    """CUDA devices of this machine, without loading torch."""
    visible = read_env("CUDA_VISIBLE_DEVICES")
    if visible is not None and any(map(os.path.exists, _DRIVERS)):  # it may be set on any machine
        return len([name for name in visible.split(",") if name.strip() not in {"", "-1"}])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
