"""Speed of a pool of engines against one engine, on this machine; every figure is a ratio within one run.

    python benchmarks/pool.py [--model NAME] [--rounds 2] [--only training|sampling|dividing|one|threshold]
                            [--against 1|2]

Threads are fixed per engine, so that two engines with one thread are compared with one engine with one and with two
threads. Takes a few minutes and wants a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from tinkex.engine.interface import Engines
from tinkex.engine.process import Setup
from tinkex.engine.shards import divide
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, SampleJob
from tinkex.server.engines import make_engines
from tinkex.server.members import Member
from tinkex.server.pool import EnginePool
from tinkex.server.service import default_cache_dir
from tinkex.server.supervisor import Supervisor
from tinkex.server.worker import Worker

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


async def started(
    stack: AsyncExitStack, model: str, count: int, threads: int, *, pool_of_one: bool = False
) -> Engines:
    setup = Setup((model,), default_cache_dir(), dtype="float32", threads=threads)
    if pool_of_one:
        exchange = SharedMemory()
        worker = Worker(replace(setup, depot=exchange.directory), name="engine-0")
        engines: Engines = EnginePool([Member(Supervisor(worker, on_demand=True))], exchange)
    else:
        engines = make_engines(
            setup, count=count, in_process=False, deadline=600.0, on_demand=False
        )
    await engines.start()
    stack.push_async_callback(engines.stop)
    return engines


def batch(rows: int, length: int) -> PassJob:
    random = np.random.default_rng(0)
    examples = [
        Example(
            random.integers(0, 30_000, length),
            {"target_tokens": random.integers(0, 30_000, length)},
        )
        for _ in range(rows)
    ]
    return PassJob(examples, "cross_entropy")


async def train(engines: Engines, request: PassJob) -> None:
    await engines.trainer.run_pass("m", request)
    await engines.trainer.optim_step("m", AdamStep(1e-4))


async def sample(engines: Engines, count: int, tokens: int) -> None:
    jobs = [
        SampleJob("s", np.arange(5, 37), max_tokens=tokens, seed=number, stop_tokens=())
        for number in range(count)
    ]
    await asyncio.gather(*(engines.sampler.sample(job) for job in jobs))


async def compare(
    named: Sequence[tuple[str, Engines]],
    work: Callable[[Engines], Awaitable[None]],
    amount: int,
    rounds: int,
) -> dict[str, float]:
    """Median tokens per second of each, measured in turns."""
    rates: dict[str, list[float]] = {name: [] for name, _ in named}
    for number in range(rounds + 1):
        for name, engines in named if number % 2 else named[::-1]:
            began = time.perf_counter()
            await work(engines)
            if number:  # the first round warms up
                rates[name].append(amount / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in rates.items()}


def show(title: str, rates: dict[str, float]) -> None:
    print(f"\n{title}")
    first = next(iter(rates.values()))
    for name, rate in rates.items():
        print(f"  {name:24s} {rate:8.1f} tokens/s   {rate / first:5.2f} x")


async def prepare(stack: AsyncExitStack, named: list[tuple[str, Engines]], model: str) -> None:
    """Give all engines the same model `m` and a sampler `s` of it."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for _, engines in named:
        await engines.trainer.create_model("m", model, LoraSpec(8, seed=1))
    await named[0][1].trainer.save_state("m", scratch / "adapter", optimizer=False)
    for _, engines in named:
        await engines.sampler.open_sampler("s", model, scratch / "adapter")


async def compare_training(named: list[tuple[str, Engines]], rounds: int) -> None:
    request = batch(16, 128)
    rates = await compare(named, lambda each: train(each, request), 16 * 128, rounds)
    show("training 16 x 128, rank 8", rates)


async def compare_sampling(named: list[tuple[str, Engines]], rounds: int) -> None:
    rates = await compare(named, lambda each: sample(each, 32, 32), 32 * 32, rounds)
    show("sampling 32 at once, rank 8", rates)


async def home_and_helper(engines: EnginePool, name: str, model: str, rank: int) -> list[Member]:
    """Create a model; return the engine that holds it, and another one."""
    await engines.trainer.create_model(name, model, LoraSpec(rank, seed=1))
    home = engines.trainer.home(name)
    assert home is not None
    return [home, next(member for member in engines.members if member is not home)]


async def dividing(engines: Engines, model: str, rounds: int) -> None:
    """What travels for one divided pass, and how long publishing and adding take at the model's home."""
    assert isinstance(engines, EnginePool)
    for rank in (8, 32):
        home, helper = await home_and_helper(engines, "d", model, rank)
        request, seconds, size = batch(16, 128), [], 0
        for _ in range(rounds):
            began = time.perf_counter()
            adapter = await home.engine.publish("d")
            published = time.perf_counter() - began
            theirs = await helper.engine.help_pass(adapter, request, [2, 3])
            own = await home.engine.run_shards("d", request, [0, 1])
            size = adapter.parcel.size + sum(block.total.size for block in theirs.blocks)
            began = time.perf_counter()
            await home.engine.finish_pass("d", request, [own, theirs])
            seconds.append(published + time.perf_counter() - began)
            await engines.trainer.optim_step("d", AdamStep(1e-4))
        print(
            f"  dividing, rank {rank}: {size / 1e6:.1f} MB moved, "
            f"{statistics.median(seconds):.3f} s at the home per pass"
        )
        await engines.trainer.unload_model("d")


async def threshold(engines: Engines, model: str, rounds: int) -> None:
    """A pass of two engines against the same on its home alone, by size: where dividing begins to pay."""
    assert isinstance(engines, EnginePool)
    for rank in (8, 32):
        home, helper = await home_and_helper(engines, "t", model, rank)
        for tokens in (512, 1024, 2048):
            request, alone, divided = batch(tokens // 128, 128), [], []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                await home.engine.run_pass("t", request)
                alone.append(time.perf_counter() - began)
                await engines.trainer.optim_step("t", AdamStep(1e-4))
                began = time.perf_counter()
                publishing = asyncio.ensure_future(home.engine.publish("t"))
                shards = range(len(divide(request.examples, home.engine.ready.token_budget)))
                half = len(shards) // 2
                own = asyncio.ensure_future(home.engine.run_shards("t", request, shards[:half]))
                adapter = await publishing
                theirs = await helper.engine.help_pass(adapter, request, shards[half:])
                await home.engine.finish_pass("t", request, [await own, theirs])
                divided.append(time.perf_counter() - began)
                await engines.trainer.optim_step("t", AdamStep(1e-4))
            ratio = statistics.median(alone[1:]) / statistics.median(divided[1:])
            print(f"  {tokens} tokens, rank {rank}: two engines {ratio:.2f} x one")
        await engines.trainer.unload_model("t")


async def main(model: str, rounds: int, only: str | None, against: int | None) -> None:
    async with AsyncExitStack() as stack:
        if only == "one":
            named = [
                ("single engine", await started(stack, model, 1, 2)),
                ("pool of one", await started(stack, model, 1, 2, pool_of_one=True)),
            ]
        elif only in {"dividing", "threshold"}:
            named = [("2 engines x 1 thread", await started(stack, model, 2, 1))]
        else:
            named = [("2 engines x 1 thread", await started(stack, model, 2, 1))]
            if against in {None, 1}:
                named.insert(0, ("1 engine x 1 thread", await started(stack, model, 1, 1)))
            if against in {None, 2}:
                named.append(("1 engine x 2 threads", await started(stack, model, 1, 2)))
        await prepare(stack, named, model)
        if only in {None, "one", "training"}:
            await compare_training(named, rounds)
        if only in {None, "sampling"}:
            await compare_sampling(named, rounds)
            # What two engines could reach at most: each has half of the batch, and reads all weights for it.
            halves = await compare(named[:1], lambda each: sample(each, 16, 32), 16 * 32, rounds)
            show("sampling 16 at once", halves)
        if only in {None, "dividing"}:
            await dividing(dict(named)["2 engines x 1 thread"], model, rounds)
        if only == "threshold":
            await threshold(named[0][1], model, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOL)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["training", "sampling", "dividing", "one", "threshold"])
    parser.add_argument(
        "--against", type=int, choices=[1, 2], help="compare with one engine of this many threads"
    )
    options = parser.parse_args()
    asyncio.run(main(options.model, options.rounds, options.only, options.against))
