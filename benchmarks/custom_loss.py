"""Cost of a custom loss: a custom step compared with a built-in one, and parallel regularizers.

python benchmarks/custom_loss.py [--base-url local] [--base-model tinkex/tiny] [--steps 10] [--batch 8] [--tokens 128]

A custom step takes two passes at the service, so twice a built-in step is what to expect. Steps are taken in turns,
and of each kind the best counts, because the machines these run on are noisy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter, sleep

import numpy as np
import torch

import tinkex
from tinkex import objectives
from tinkex.regularizers import L2, Pipeline, RegularizerSpec


def seconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def steps(service: tinkex.ServiceClient, options: argparse.Namespace) -> None:
    training = service.create_lora_training_client(options.base_model, rank=8)
    tokens = np.random.default_rng(0).integers(0, 256, (options.batch, options.tokens + 1))
    data = [objectives.completion(row[:1].tolist(), row[1:].tolist()) for row in tokens]
    terms = [RegularizerSpec(L2(reduction="mean"), 0.01, f"l2-{index}") for index in range(8)]

    def step(forward_backward: Callable[[], tinkex.APIFuture]) -> None:
        result = forward_backward()
        training.optim_step().result()
        result.result()

    kinds = {
        "built-in step": lambda: training.forward_backward(data, "cross_entropy"),
        "custom step": lambda: training.forward_backward_custom(data, objectives.cross_entropy),
        "custom step, 8 regularizers": lambda: training.forward_backward_custom(
            data, objectives.cross_entropy, regularizers=terms
        ),
    }
    best = dict.fromkeys(kinds, float("inf"))
    step(kinds["custom step"])  # warm-up: the first step is slower
    for _ in range(options.steps):
        for name, kind in kinds.items():
            best[name] = min(best[name], seconds(lambda kind=kind: step(kind)))
    for name, value in best.items():
        print(f"{name:34}{value * 1000:10.1f} ms{value / best['built-in step']:8.2f} times")


def side_by_side(rounds: int) -> None:
    """Eight regularizers that wait, as for a reward model, the slowest longest."""

    def waits(duration: float) -> Callable:
        return lambda data, logprobs: (sleep(duration), (logprobs.square().sum(), {}))[1]

    durations = [0.05 + 0.05 * index / 7 for index in range(8)]
    terms = [RegularizerSpec(waits(each), 1, f"{each:.3f}") for each in durations]
    logprobs = torch.randn(1024).log_softmax(-1)

    def compute(pipeline: Pipeline) -> None:
        pipeline.evaluate([], logprobs, lambda data, x: (x.sum(), {}), differentiate=True)

    def best(pipeline: Pipeline) -> float:
        return min(seconds(lambda: compute(pipeline)) for _ in range(rounds))

    slowest = best(Pipeline(terms[-1:]))
    kinds = {
        "the slowest regularizer alone": slowest,
        "8 regularizers side by side": best(Pipeline(terms, max_concurrency=8)),
        "8 regularizers one after another": best(Pipeline(terms, parallel=False)),
    }
    for name, value in kinds.items():
        print(f"{name:34}{value * 1000:10.1f} ms{value / slowest:8.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--base-model", default="tinkex/tiny")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        steps(service, options)
    side_by_side(rounds=3)


if __name__ == "__main__":
    main()
