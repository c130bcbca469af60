"""Two engines on a Ray cluster against the local pool of two, on this machine; every figure is a ratio within one run.

    python benchmarks/ray_pool.py [--ray ADDRESS|local] [--model NAME] [--rounds 2] [--only training|sampling|dividing]

Run it with the Python of an environment that has Ray, in a network namespace:

    unshare --net sh -c 'ip link set lo up && PYTHONPATH=src .scratch/ray/bin/python benchmarks/ray_pool.py'
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

from pool import SMOL, compare_sampling, compare_training, dividing, prepare
from tinkex.engine.interface import Engines
from tinkex.engine.process import Setup
from tinkex.server.engines import make_engines
from tinkex.server.ray_cluster import RayOptions
from tinkex.server.service import default_cache_dir


async def started(stack: AsyncExitStack, model: str, ray: RayOptions | None) -> Engines:
    setup = Setup((model,), default_cache_dir(), dtype="float32", threads=1)
    engines = make_engines(
        setup, count=2, in_process=False, deadline=600.0, on_demand=False, ray=ray
    )
    await engines.start()
    stack.push_async_callback(engines.stop)
    return engines


async def main(model: str, rounds: int, only: str | None, address: str) -> None:
    async with AsyncExitStack() as stack:
        named = [
            ("local, 2 x 1 thread", await started(stack, model, None)),
            ("on Ray, 2 x 1 thread", await started(stack, model, RayOptions(address))),
        ]
        await prepare(stack, named, model)
        if only in {None, "training"}:
            await compare_training(named, rounds)
        if only in {None, "sampling"}:
            await compare_sampling(named, rounds)
        if only in {None, "dividing"}:
            for name, engines in named:
                print(f"\n{name}")
                await dividing(engines, model, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", default="local", metavar="ADDRESS|local")
    parser.add_argument("--model", default=SMOL)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["training", "sampling", "dividing"])
    options = parser.parse_args()
    asyncio.run(main(options.model, options.rounds, options.only, options.ray))
