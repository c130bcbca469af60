"""A client behind a faulty network: every request runs exactly once, and every result is correct."""

from __future__ import annotations

import asyncio
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import tinkex
from tinkex._retry import Clock

from .proxy import FaultPlan, FaultyProxy
from .served import Served

#: The clients' waits and timeouts are divided by this factor.
HURRY = 50
DIFFERENT = 1000  # number of distinct prompts and seeds


def hurried() -> Clock:
    return Clock(
        monotonic=lambda: time.monotonic() * HURRY,
        sleep=lambda seconds: asyncio.sleep(seconds / HURRY),
        timeout=lambda seconds: asyncio.timeout(seconds / HURRY),
    )


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[Served]:
    service = Served(directory, *arguments)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def client(url: str, clock: Clock | None = None) -> Iterator[tinkex.ServiceClient]:
    made = tinkex.ServiceClient(base_url=url, api_key="tml-local", clock=clock)
    try:
        yield made
    finally:
        made.close().result(60)


def done(service: Served) -> Counter[str]:
    """Number of executed operations by name, from the service's metrics."""
    with urlopen(f"{service.url}/metrics", timeout=60) as page:
        text = page.read().decode()
    found = re.findall(r'^tinkex_work_seconds_count\{operation="(\w+)"\} (\S+)', text, re.MULTILINE)
    return Counter({name: int(float(count)) for name, count in found})


def report(plan: FaultPlan, wanted: int, seconds: float, what: str) -> None:
    counts = plan.counts
    print(f"\n{wanted} {what} in {seconds:.0f} s:")
    for name, count in counts.most_common():
        print(f"  {count:9} {name}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  client, proxy and test: {peak:.0f} MB at most", flush=True)


# -- sampling ------------------------------------------------------------------------------------


async def draw(sampler: tinkex.SamplingClient, number: int) -> tuple[list[int], list[float]]:
    kind = number % DIFFERENT
    prompt = tinkex.ModelInput.from_ints([1 + kind % 200, 1 + kind // 200, 7])
    params = tinkex.SamplingParams(max_tokens=6, seed=kind, stop=[])
    response = await sampler.sample_async(prompt, 1, params)
    (sequence,) = response.sequences
    return list(sequence.tokens), list(sequence.logprobs or ())


async def draw_all(sampler: tinkex.SamplingClient, count: int) -> list[Any]:
    results: list[Any] = [None] * count
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            results[number] = await draw(sampler, number)

    await asyncio.gather(*(work() for _ in range(min(count, 1000))))
    return results


def test_every_sample_is_drawn_once_and_is_correct(tmp_path: Path, long: bool) -> None:
    count = 100_000 if long else 300
    plan = FaultPlan(seed=1, outage_every=5000 if long else 300, slow=0.05)
    with served(tmp_path, "--engine=fake") as service:
        with client(service.url) as undisturbed:
            sampler = undisturbed.create_sampling_client(base_model="tinkex/tiny")
            expected = asyncio.run(draw_all(sampler, min(count, DIFFERENT)))
        before = done(service)["asample"]
        began = time.monotonic()
        with FaultyProxy(service.url, plan) as proxy, client(proxy.url, hurried()) as disturbed:
            sampler = disturbed.create_sampling_client(base_model="tinkex/tiny")
            results = asyncio.run(draw_all(sampler, count))
        seconds = time.monotonic() - began
        drawn = done(service)["asample"] - before
    wrong = [n for n, result in enumerate(results) if result != expected[n % DIFFERENT]]
    report(plan, count, seconds, f"samples, {len(wrong)} wrong, drawn by the service {drawn} times")
    assert not wrong
    assert drawn == count


# -- training ------------------------------------------------------------------------------------


def example(number: int) -> tinkex.Datum:
    tokens = [(number * 31 + place * 17) % 256 for place in range(13)]
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 12},
    )


async def train(client: tinkex.ServiceClient, steps: int) -> dict[str, Any]:
    """Train with several steps in flight; return all results."""
    training = await client.create_lora_training_client_async("tinkex/tiny", rank=4, seed=5)
    adam = tinkex.AdamParams(learning_rate=1e-3)
    metrics: list[Any] = []
    in_flight: list[Any] = []
    for step in range(steps):
        data = [example(4 * step + place) for place in range(4)]
        in_flight.append(await training.forward_backward_async(data, "cross_entropy"))
        in_flight.append(await training.optim_step_async(adam))
        if len(in_flight) >= 16 or step == steps - 1:
            metrics += [(await each).metrics for each in in_flight]
            in_flight.clear()
    saved = await training.save_state_async("end", overwrite=True)
    final = await (await training.forward_async([example(0)], "cross_entropy"))
    return {
        "metrics": metrics,
        "saved": (await saved).path.rpartition("/")[2],
        "logprobs": list(final.loss_fn_outputs[0]["logprobs"].data),
    }


def test_every_training_step_runs_once(tmp_path: Path, long: bool) -> None:
    steps = 1000 if long else 15
    plan = FaultPlan(seed=2, outage_every=500 if long else 50, slow=0.05)
    with served(tmp_path) as service:
        with client(service.url) as undisturbed:
            expected = asyncio.run(train(undisturbed, steps))
        before = done(service)
        began = time.monotonic()
        with FaultyProxy(service.url, plan) as proxy, client(proxy.url, hurried()) as disturbed:
            outcome = asyncio.run(train(disturbed, steps))
        seconds = time.monotonic() - began
        again = done(service) - before
    report(plan, 2 * steps, seconds, "training requests")
    assert outcome == expected
    assert again == before  # `before` counts the operations of the undisturbed run
