"""The sampler beside its limit: the matrix products of the same work alone, in the same process and type.

    python benchmarks/sampling_limit.py [base] [adapters] [prompts] [requests] [constraints] [prefix] [unshared]
        [--dtype float32] [--rounds 3] [--kernels torch] [--cpu]

The limit is `torch.nn.functional.linear` on the shapes of the model. Ours and the limit take turns step by step, and the
fastest tenth of the steps counts: noise only ever adds time. Prints a table. With `--cpu`, times are CPU seconds of all
threads: for ratios on a machine that has other work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from tinkex.engine import base_models
from tinkex.engine.engine import TorchEngine
from tinkex.engine.grammars import Grammars
from tinkex.engine.lora import Adapter
from tinkex.engine.sampler import Sampler
from tinkex.engine.values import Constraint, LoraSpec, SampleJob

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT, NEW = 32, 32


class Bench:
    """One model and a sampler on it."""

    def __init__(self, dtype: torch.dtype, rounds: int, *, native: bool = True) -> None:
        from tinkex.server.service import default_cache_dir

        torch.set_num_threads(2)
        prepared = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
        engine = TorchEngine([prepared], dtype=dtype, native=native)
        self.language = engine._base(SMOL).language
        self.grammars = Grammars(prepared.directory, prepared.vocab_size, prepared.eos_token_ids)
        self.sampler = self.new_sampler()
        self.rounds = rounds
        self._number = 0
        self.weights = [
            projection.weight.to(dtype)
            for layer in self.language.llama.layers
            for projection in layer.projections
        ]
        self.head = self.language.unembed.weight.to(dtype)

    def new_sampler(self) -> Sampler:
        return Sampler(self.language, end_tokens=(), cache_bytes=4e9, grammars=self.grammars)

    # -- the limit ---------------------------------------------------------------------------

    def products(self, rows: int, unembedded: int) -> None:
        """All products of one pass over so many rows."""
        weights = self.weights
        inputs = {
            weight.shape[1]: torch.ones(rows, weight.shape[1], dtype=weight.dtype)
            for weight in weights[:4]
        }
        for weight in weights:
            functional.linear(inputs[weight.shape[1]], weight)
        head = self.head
        if unembedded:
            functional.linear(torch.ones(unembedded, head.shape[1], dtype=head.dtype), head)

    @torch.inference_mode()
    def products_of(self, rows: int) -> float:
        return timed(lambda: self.products(rows, rows))

    @torch.inference_mode()
    def prompt_limit(self, count: int, length: int) -> float:
        return timed(lambda: [self.products(length, 1) for _ in range(count)])

    # -- ours --------------------------------------------------------------------------------

    def adapter(self, rank: int, seed: int) -> Adapter:
        spec = LoraSpec(rank, seed=seed, train_unembed=False)
        adapter = Adapter.fresh(self.language.layers, spec, "cpu")
        for pair in adapter.pairs.values():
            torch.nn.init.normal_(pair.b, 0, 0.01)
        return adapter.frozen_copy()

    def job(self, prompt: np.ndarray | None = None, **options) -> SampleJob:
        """A job whose prompt shares nothing with earlier ones, unless it is given."""
        self._number += 1
        if prompt is None:
            prompt = tokens(self._number, options.pop("length", PROMPT))
        given = {"max_tokens": NEW, "stop_tokens": (), "seed": self._number, **options}
        return SampleJob("s", prompt, **given)

    def run(self, jobs: list[tuple[SampleJob, Adapter | None]]) -> float:
        def work() -> None:
            for number, (job, adapter) in enumerate(jobs):
                self.sampler.add(str(number), job, adapter)
            while self.sampler.busy:
                self.sampler.step()

        return timed(work)

    def many(self, count: int, adapter: Adapter | None = None) -> float:
        return self.run([(self.job(num_samples=count), adapter)])

    def steps(self, *batches: list[tuple[SampleJob, Adapter | None]], rows: int = 0) -> list[float]:
        """Seconds of a step of each batch, and of the products of `rows` rows, taking turns."""
        samplers = [self.new_sampler() for _ in batches]
        for sampler, jobs in zip(samplers, batches, strict=True):
            for number, (job, adapter) in enumerate(jobs):
                sampler.add(str(number), job, adapter)
            for _ in range(3):
                sampler.step()
        works: list[Callable[[], float]] = [
            partial(lambda sampler: timed(sampler.step), sampler) for sampler in samplers
        ]
        if rows:
            works.append(partial(self.products_of, rows))
        times = [[work() for work in works] for _ in range(self.rounds * 10)]
        return [float(np.quantile(own, 0.1)) for own in zip(*times, strict=True)]

    def batch(
        self, count: int, adapter: Adapter | None = None
    ) -> list[tuple[SampleJob, Adapter | None]]:
        return [(self.job(num_samples=count, max_tokens=400), adapter)]

    def best(self, *works: Callable[[], float]) -> list[float]:
        """The shortest time of each, taking turns."""
        for work in works:
            work()
        times = [[work() for work in works] for _ in range(self.rounds)]
        return [min(own) for own in zip(*times, strict=True)]


clock = time.perf_counter


def timed(work: Callable[[], object]) -> float:
    started = clock()
    work()
    return clock() - started


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 49_000, length).astype(np.int32)


def show(name: str, ours: float, reference: float, asked: float, what: str) -> None:
    print(
        f"  {name:44} {ours:8.1f} {reference:8.1f} {ours / reference:6.2f} of {what} (asked {asked})",
        flush=True,
    )


# -- rows ------------------------------------------------------------------------------------------


def measure_base(bench: Bench, narrow: bool) -> None:
    asked = (0.8, 0.75, 0.75, 0.7) if narrow else (0.85,) * 4
    for count, share in zip((1, 8, 32, 64), asked, strict=True):
        ours, limit = bench.steps(bench.batch(count), rows=count)
        show(f"base, {count} samples, tokens/s", count / ours, count / limit, share, "limit")


def measure_adapters(bench: Bench, narrow: bool) -> None:
    small, large = bench.adapter(8, 0), bench.adapter(32, 0)
    for count in (1, 8, 32):
        base, eight, more = bench.steps(
            bench.batch(count), bench.batch(count, small), bench.batch(count, large)
        )
        name = f"{count} samples, tokens/s"
        show(f"adapter of rank 8, {name}", count / eight, count / base, 0.9, "base")
        show(f"adapter of rank 32, {name}", count / more, count / base, 0.9, "base")
    several = [bench.adapter(8, seed) for seed in range(8)]
    one, eight = bench.steps(
        [each for _ in several for each in bench.batch(4, small)],
        [each for adapter in several for each in bench.batch(4, adapter)],
    )
    show("8 adapters in a batch of 32, tokens/s", 32 / eight, 32 / one, 0.8, "one adapter")


def measure_prompts(bench: Bench, narrow: bool) -> None:
    ours, limit = bench.best(
        lambda: bench.run([(bench.job(length=512, max_tokens=1), None) for _ in range(8)]),
        lambda: bench.prompt_limit(8, 512),
    )
    asked = 0.6 if narrow else 0.8
    show("prompts of 8 x 512, tokens/s", 4096 / ours, 4096 / limit, asked, "limit")


def arrivals(
    random: np.random.Generator, count: int, rate: float
) -> Iterator[tuple[float, int, int]]:
    """Time in steps, prompt length and new tokens of requests that come and go."""
    now = 0.0
    for _ in range(count):
        now += random.exponential(1 / rate)
        yield now, int(random.integers(16, 49)), int(random.integers(16, 49))


def measure_requests(bench: Bench, narrow: bool) -> None:
    def separate() -> float:
        prompt = tokens(bench._number + 10**6, PROMPT)
        return bench.run([(bench.job(prompt), None) for _ in range(32)])

    together, apart = bench.best(lambda: bench.many(32), separate)
    work = 32 * NEW
    show("32 requests of one, tokens/s", work / apart, work / together, 0.95, "one of 32")

    def coming_and_going() -> float:
        """About 32 in the batch at any time; counted are the tokens drawn while it is full."""
        queue = list(arrivals(np.random.default_rng(1), 100, rate=1.0))
        step = number = drawn = 0
        seconds = 0.0
        while queue:
            while queue and queue[0][0] <= step:
                _, length, new = queue.pop(0)
                job = bench.job(length=length, max_tokens=new, stream=True)
                bench.sampler.add(f"p{number}", job, None)
                number += 1
            started = time.perf_counter()
            events = bench.sampler.step() if bench.sampler.busy else []
            if step >= 40:
                seconds += time.perf_counter() - started
                drawn += sum(event.token is not None for event in events)
            step += 1
        for index in range(number):
            bench.sampler.cancel(f"p{index}")
        return seconds / drawn

    def all_at_once() -> float:
        """As many prompt tokens per new token, on average, but read and drawn together."""
        return bench.run([(bench.job(), None) for _ in range(32)]) / work

    static, flowing = bench.best(all_at_once, coming_and_going)
    show("Poisson arrivals, tokens/s", 1 / flowing, 1 / static, 0.85, "32 requests at once")


def measure_prefix(bench: Bench, narrow: bool) -> None:
    def turns(cached: bool) -> float:
        """Time to the first token of the eighth turn of a conversation of 1,500 tokens."""
        text = tokens(bench._number + 2 * 10**6, 1500)
        if cached:
            bench.run([(bench.job(text[: 1500 * 7 // 8], max_tokens=1), None)])
        return bench.run([(bench.job(text, max_tokens=1), None)])

    cold, warm = bench.best(lambda: turns(False), lambda: turns(True))
    print(
        f"  eighth turn, seconds to first token: {warm:.3f}, uncached {cold:.3f}: {warm / cold:.2f} (asked 0.25)"
    )

    def candidates(count: int, shared: bool, known: bool = False) -> float:
        """Seconds of a candidate of 8 tokens after 1,008; its first 1,000 may be `shared`, and read before."""
        start = tokens(bench._number + 3 * 10**6, 1000)
        texts = [
            np.concatenate(
                [start if shared else tokens(bench._number + 10**7 + n, 1000), tokens(n, 8)]
            )
            for n in range(count)
        ]
        if known:
            bench.run([(bench.job(start, max_tokens=1), None)])
        return bench.run([(bench.job(text, max_tokens=8), None) for text in texts]) / count

    cold = candidates(4, shared=False)  # a few: their rate does not depend on their number
    warm, new = candidates(32, shared=True, known=True), candidates(32, shared=True)
    print(
        f"  32 candidates over 1,000 shared tokens: {cold / warm:.1f} x the uncached rate (asked 5); "
        f"{cold / new:.1f} x if the first of them has to read these tokens"
    )


def measure_unshared(bench: Bench, narrow: bool) -> None:
    """Prompts that share nothing, with and without the cache of prefixes."""

    def distinct(cached: bool) -> float:
        bench.sampler = bench.new_sampler()
        bench.sampler._scheduler._share_prefixes = cached
        return bench.run([(bench.job(length=128, max_tokens=16), None) for _ in range(8)])

    without, cached = bench.best(lambda: distinct(False), lambda: distinct(True))
    print(
        f"  8 prompts that share nothing: {cached / without - 1:+.1%} with the cache (asked +2 %)"
    )


def measure_constraints(bench: Bench, narrow: bool) -> None:
    """Answers that follow a JSON schema; none ends before its last token."""
    items = {"type": "string", "maxLength": 12}
    name = {"type": "string", "minLength": 24, "maxLength": 60}
    tags = {"type": "array", "items": items, "minItems": 300}
    schema = {
        "type": "object",
        "properties": {"name": name, "tags": tags},
        "required": ["name", "tags"],
    }
    bound = Constraint("json_schema", json.dumps({**schema, "additionalProperties": False}))
    bench.grammars.check(bound)
    free, formed = bench.steps(
        bench.batch(32), [(bench.job(num_samples=32, max_tokens=400, constraint=bound), None)]
    )
    show("JSON schema, 32 samples, tokens/s", 32 / formed, 32 / free, 0.95, "free")


PARTS = ("base", "adapters", "prompts", "requests", "constraints", "prefix", "unshared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", choices=["native", "torch"], default="native")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU seconds instead of the time that passes"
    )
    options = parser.parse_args()
    if options.cpu:
        global clock
        clock = time.process_time
    native = options.kernels == "native"
    bench = Bench(getattr(torch, options.dtype), options.rounds, native=native)
    kernels = bench.language.kernels.name
    print(f"{SMOL}, {options.dtype}, {torch.get_num_threads()} threads, {kernels} kernels:")
    for part in options.parts or [*PARTS]:
        globals()[f"measure_{part}"](bench, options.dtype == "bfloat16")


if __name__ == "__main__":
    main()
