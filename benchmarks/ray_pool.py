"""Two engines on a Ray cluster against the local pool of two, on this machine; every figure is a ratio within one run.

    python benchmarks/ray_pool.py [--ray ADDRESS|local] [--model NAME] [--rounds 2] [--only training|sampling|dividing]

Run it with the Python of an environment that has Ray, in a network namespace:

    unshare --net sh -c 'ip link set lo up && PYTHONPATH=src .scratch/ray/bin/python benchmarks/ray_pool.py'
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from pool import SMOL, batch, compare, dividing, sample, show, train
from tinkex.engine.interface import Engines
from tinkex.engine.process import Setup
from tinkex.engine.values import LoraSpec
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
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for _, engines in named:
            await engines.trainer.create_model("m", model, LoraSpec(8, seed=1))
        await named[0][1].trainer.save_state("m", scratch / "adapter", optimizer=False)
        for _, engines in named:
            await engines.sampler.open_sampler("s", model, scratch / "adapter")
        if only in {None, "training"}:
            request = batch(16, 128)
            rates = await compare(named, lambda each: train(each, request), 16 * 128, rounds)
            show("training 16 x 128, rank 8", rates)
        if only in {None, "sampling"}:
            rates = await compare(named, lambda each: sample(each, 32, 32), 32 * 32, rounds)
            show("sampling 32 at once, rank 8", rates)
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
