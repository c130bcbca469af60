"""Training beside its limit: the matrix products of the same work alone, in the same process and type.

    python benchmarks/training_limit.py [--dtype float32] [--dtype bfloat16] [--only "8 x 128"] [--threads 2] [--kernels torch]

The limit is the product of every frozen matrix with its rows and with the gradients of its rows, with
`torch.nn.functional.linear`. It leaves out attention, the adapters' own products and everything between the products.
Work and limit take turns, and the best of the rounds counts: noise only ever adds time. With `--threads 1` the CPU time
of the process is measured, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from tinkex.engine import base_models
from tinkex.engine.engine import TorchEngine
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob
from tinkex.server.service import default_cache_dir

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WORK = {
    "8 x 128": [128] * 8,
    "32 x 512": [512] * 32,
    "4 x 512": [512] * 4,
    "8 rows of 16 to 512": [int(n) for n in np.random.default_rng(1).integers(16, 513, 8)],
    "1 x 4000": [4000],
    "1 x 8191": [8191],
}
LOGIT_ROWS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--only", action="append")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", choices=["native", "torch"], default="native")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.threads == 1:
        CLOCK[0] = time.process_time
    names = options.only or ["8 x 128", "32 x 512", "8 rows of 16 to 512"]
    found = {}
    for dtype in options.dtype or ["float32", "bfloat16"]:
        found[dtype] = measured(getattr(torch, dtype), names, options)
    print(json.dumps(found, indent=1))


def measured(
    dtype: torch.dtype, names: list[str], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    prepared = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
    engine = TorchEngine([prepared], dtype=dtype, native=options.kernels == "native")
    engine.create_model("m", SMOL, LoraSpec(8, train_unembed=False, seed=1))
    found = {}
    for name in names:
        data = examples(WORK[name])
        tokens = sum(WORK[name])
        products = Products(engine, min(tokens, engine.token_budget))
        ours, limit = [], []
        for _ in range(options.rounds):
            limit.append(products.seconds() * tokens / products.rows)
            ours.append(timed(lambda data=data: step(engine, data)))
        found[name] = {
            "ours": tokens / min(ours),
            "limit": tokens / min(limit),
            "share": min(limit) / min(ours),
            "resident MB": resident(),
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        figures = "  ".join(f"{key} {value:.2f}" for key, value in found[name].items())
        print(f"{dtype!s:16} {name:20} {figures}", file=sys.stderr, flush=True)
    return found


class Products:
    """The products of one micro-batch, with the matrices of all layers."""

    def __init__(self, engine: TorchEngine, rows: int) -> None:
        language = engine._base(SMOL).language
        assert language.llama is not None
        self.rows = rows
        self._weights = [
            projection.weight.to(language.dtype)
            for layer in language.llama.layers
            for projection in layer.projections
        ]
        self._unembedding = language.unembed.weight.to(language.dtype)

    def seconds(self) -> float:
        layers = best(lambda: self._run(self._weights, self.rows))
        whole, rest = divmod(self.rows, LOGIT_ROWS)
        head = best(lambda: self._run([self._unembedding], LOGIT_ROWS)) * whole
        if rest:
            head += best(lambda: self._run([self._unembedding], rest))
        return layers + head

    def _run(self, weights: list[torch.Tensor], rows: int) -> None:
        for weight in weights:
            outputs, inputs = weight.shape
            functional.linear(self._rows(rows, inputs, weight), weight)
            functional.linear(self._rows(rows, outputs, weight), weight.t())

    def _rows(self, rows: int, width: int, weight: torch.Tensor) -> torch.Tensor:
        key = (rows, width, weight.dtype)
        if key not in _ROWS:
            _ROWS[key] = torch.randn(rows, width).to(weight.dtype)
        return _ROWS[key]


CLOCK = [time.perf_counter]
_ROWS: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}


def examples(lengths: list[int]) -> list[Example]:
    random, made = np.random.default_rng(0), []
    for length in lengths:
        tokens = random.integers(10, 49_000, length + 1)
        weights = np.full(length, 1 / length, np.float32)
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        made.append(Example(tokens[:-1].astype(np.int32), inputs))
    return made


def step(engine: TorchEngine, data: list[Example]) -> None:
    for _ in engine.run_pass("m", PassJob(data, "cross_entropy")):
        pass
    engine.optim_step("m", AdamStep(learning_rate=1e-4))


def best(work: Callable[[], None], rounds: int = 3) -> float:
    work()
    return min(timed(work) for _ in range(rounds))


def timed(work: Callable[[], None]) -> float:
    started = CLOCK[0]()
    work()
    return CLOCK[0]() - started


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    main()
