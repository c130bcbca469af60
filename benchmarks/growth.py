"""Does the time per token stay flat as adapters and finished requests add up?

    python benchmarks/growth.py [--adapters 1000] [--requests 100000]

Starts `tinkex serve` with the tiny model. First, 64 samples of one adapter are drawn again and again: with one adapter on disk, then
with all of them, then with 64 of them open and used in turn. Then that many small requests are sent, 256 at a time; the first
tenth is compared with the last. The fastest tenth of the rounds counts. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import tinkex

TINY = "tinkex/tiny"
OPEN, NEW, AT_ONCE = 64, 16, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args()
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    with tempfile.TemporaryDirectory(prefix="tinkex-growth-") as directory:
        command = [sys.executable, "-m", "tinkex", "serve", "--port=0", f"--data-dir={directory}"]
        service = subprocess.Popen(
            [*command, f"--base-model={TINY}"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert service.stdout is not None
            url = service.stdout.readline().rpartition(" ")[2].strip()
            asyncio.run(measure(url, options.adapters, options.requests))
        finally:
            service.terminate()
            service.wait()


async def measure(url: str, adapters: int, requests: int) -> None:
    client = tinkex.ServiceClient(base_url=url, api_key="tml-local")
    training = await client.create_lora_training_client_async(TINY, rank=8)

    async def saved(name: str) -> str:
        done = await (await training.save_weights_for_sampler_async(name))
        return str(done.path)

    async def opened(path: str) -> tinkex.SamplingClient:
        return await client.create_sampling_client_async(model_path=path)

    print(f"{'microseconds per token':44} {'time':>8} {'against the first':>18}")
    if adapters:
        paths = [await saved("a0")]
        sampler = await opened(paths[0])
        first = await per_token([sampler] * OPEN)
        show("1 adapter on disk", first, first)
        paths += [await saved(f"a{number}") for number in range(1, adapters)]
        show(f"{adapters:,} adapters on disk", await per_token([sampler] * OPEN), first)
        samplers = [sampler, *[await opened(path) for path in paths[1:OPEN]]]
        await per_token(samplers)  # read from disk at first use
        show(f"the same, {OPEN} in use in turn", await per_token(samplers), first)
        show(f"the same, one of {OPEN} open", await per_token([sampler] * OPEN), first)
    if requests:
        await many(await client.create_sampling_client_async(base_model=TINY), requests)


async def per_token(samplers: Sequence[tinkex.SamplingClient]) -> float:
    """Seconds per token of 64 samples at once, with each sampler in turn."""
    return quick([await one_round(sampler) for sampler in samplers])


async def one_round(sampler: tinkex.SamplingClient) -> float:
    prompt = tinkex.ModelInput.from_ints(list(range(1, 33)))
    params = tinkex.SamplingParams(max_tokens=NEW, stop=[])
    started = time.perf_counter()
    await sampler.sample_async(prompt, OPEN, params)
    return (time.perf_counter() - started) / (OPEN * NEW)


async def many(sampler: tinkex.SamplingClient, requests: int) -> None:
    prompt = tinkex.ModelInput.from_ints(list(range(1, 9)))
    params = tinkex.SamplingParams(max_tokens=1, stop=[])
    times = []
    for _ in range(requests // AT_ONCE):
        started = time.perf_counter()
        await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for _ in range(AT_ONCE)))
        times.append((time.perf_counter() - started) / AT_ONCE)
    tenth = max(1, len(times) // 10)
    first, last = quick(times[1 : tenth + 1]), quick(times[-tenth:])
    show(f"first tenth of {requests:,} requests", first, first)
    show("last tenth", last, first)


def quick(times: Sequence[float]) -> float:
    """The tenth part of the rounds is faster than this: other work only ever adds time."""
    return sorted(times)[len(times) // 10]


def show(name: str, seconds: float, first: float) -> None:
    print(f"{name:44} {seconds * 1e6:8.1f} {seconds / first:18.2f}", flush=True)


if __name__ == "__main__":
    main()
