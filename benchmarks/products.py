"""The products of one pass in float32: `functional.linear`, oneDNN and ours in C, on the shapes of SmolLM2-135M.

    python benchmarks/products.py [--rows 1,8,32,64,512] [--threads 2] [--rounds 8] [--processor haswell]

The fastest round of each counts. From 128 rows on, the backward product is measured too and the
unembedding is left out. With `--processor haswell` ours are compiled for AVX2 alone.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tinkex.engine.native import library
from tinkex.engine.native.float_products import FloatProducts

LAYERS, LAYER, VOCABULARY = 30, [(960, 576), (576, 576), (3072, 576), (576, 1536)], (49152, 576)
MANY = 128

Product = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,12,16,32,64,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--processor", default="native")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as made:
        compiler = shutil.which("cc")
        assert compiler, "there is no C compiler"
        own = FloatProducts(library.build(compiler, Path(made), options.processor))
    weights = [torch.randn(shape) for _ in range(LAYERS) for shape in LAYER]
    head = torch.randn(VOCABULARY)
    print(f"{'rows':>10} {'functional.linear':>18} {'oneDNN':>8} {'in C':>8}   ms")
    with torch.inference_mode():
        for rows in map(int, options.rows.split(",")):
            forward: list[Product] = [
                functional.linear,
                onednn,
                lambda x, w: own.forward(x, w, None),
            ]
            of_pass = weights if rows >= MANY else [*weights, head]
            show(
                f"{rows}", [best(product, of_pass, rows, 1, options.rounds) for product in forward]
            )
            if rows >= MANY:
                back: list[Product] = [
                    lambda g, w: functional.linear(g, w.t()),
                    lambda g, w: onednn(g, w.t()),
                    own.back,
                ]
                times = [best(product, weights, rows, 0, options.rounds) for product in back]
                show(f"{rows} back", times)


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def best(product: Product, weights: list[Tensor], rows: int, side: int, rounds: int) -> float:
    inputs = {width: torch.randn(rows, width) for width in {w.shape[side] for w in weights}}
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for weight in weights:
            product(inputs[weight.shape[side]], weight)
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def show(name: str, times: list[float]) -> None:
    print(f"{name:>10} {times[0]:18.1f} {times[1]:8.1f} {times[2]:8.1f}", flush=True)


if __name__ == "__main__":
    main()
