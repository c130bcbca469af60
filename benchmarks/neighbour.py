"""Training and sampling beside one process that keeps a core busy: what does it cost, and what does it get?

    python benchmarks/neighbour.py [--dtype bfloat16] [--threads 2] [--spins 1000] [--spins default]

Each row runs in a process of its own, because the OpenMP runtime reads its settings at start: how long a thread spins
before it sleeps (`GOMP_SPINCOUNT`; the engine's process sets 1,000), and the number of threads. On two cores, a share
of 0.5 leaves the neighbour a core of its own, and 0.67 is the fair share of two threads out of three. Prints a table.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SPIN = "import time\nwhile True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--spins", action="append", help="rounds before a thread sleeps, or default"
    )
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.dtype, options.threads)))
        return
    print(f"{'spins':18} {'work':18} {'alone':>8} {'beside':>8} {'share':>6}   neighbour's cores")
    inherited = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    for name in options.spins or ["1000", "default"]:
        environment = {} if name == "default" else {"GOMP_SPINCOUNT": name}
        done = subprocess.run(
            [sys.executable, __file__, "--child", *sys.argv[1:]],
            env=inherited | environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        for work, (alone, beside, cores) in json.loads(done.stdout).items():
            print(
                f"{name:18} {work:18} {alone:8.1f} {beside:8.1f} {beside / alone:6.2f}   {cores:.2f}",
                flush=True,
            )


def measured(dtype: str, threads: int) -> dict[str, tuple[float, float, float]]:
    """Tokens/s alone and beside the neighbour, and the cores that the neighbour got."""
    import torch

    from sampling_limit import Bench
    from tinkex.engine import base_models
    from tinkex.engine.engine import TorchEngine
    from tinkex.engine.values import LoraSpec
    from tinkex.server.service import default_cache_dir
    from training_limit import SMOL, examples, step

    bench = Bench(getattr(torch, dtype), rounds=1)
    torch.set_num_threads(threads)
    prepared = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
    engine = TorchEngine([prepared], dtype=getattr(torch, dtype))
    engine.create_model("m", SMOL, LoraSpec(8, train_unembed=False, seed=1))
    data = examples([128] * 4)
    return {
        "training 4 x 128": both(lambda: step(engine, data), 512, rounds=3),
        "sampling 8": both(lambda: bench.many(8), 8 * 32, rounds=3),
        "sampling 1": both(lambda: bench.many(1), 32, rounds=3),
    }


def both(work: Callable[[], object], tokens: int, rounds: int) -> tuple[float, float, float]:
    work()
    alone = seconds(work, rounds)
    with busy() as used:
        started = time.perf_counter()
        beside = seconds(work, rounds)
        lasted = time.perf_counter() - started
    return tokens * rounds / alone, tokens * rounds / beside, used[0] / lasted


def seconds(work: Callable[[], object], rounds: int) -> float:
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    return time.perf_counter() - started


@contextmanager
def busy() -> Iterator[list[float]]:
    """A process that keeps a core busy; gives its CPU seconds after the block."""
    used = [0.0]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen([sys.executable, "-S", "-c", SPIN]) as process:
        try:
            yield used
        finally:
            process.kill()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used[0] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
