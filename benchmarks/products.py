"""The products of one pass: `functional.linear`, oneDNN and ours in C, on the shapes of SmolLM2-135M.

In float32 the last column is ours with weights that are stored as bfloat16. With `--dtype bfloat16` oneDNN is left out:
there it is `functional.linear`.

    python benchmarks/products.py [--rows 1,8,32,64,512] [--threads 2] [--rounds 8] [--processor haswell]
        [--dtype bfloat16]

The fastest round of each counts. From 128 rows on, the backward product of float32 is measured too and the
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

from tinkex.engine.native import NativeProducts, library
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
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as made:
        compiler = shutil.which("cc")
        assert compiler, "there is no C compiler"
        compiled = library.build(compiler, Path(made), [f"-march={options.processor}"])
    weights = [torch.randn(shape) for _ in range(LAYERS) for shape in LAYER]
    head = torch.randn(VOCABULARY)
    counts = [int(rows) for rows in options.rows.split(",")]
    with torch.inference_mode():
        if options.dtype == "bfloat16":
            in_bfloat16(NativeProducts(compiled), weights, head, counts, options.rounds)
        else:
            in_float32(FloatProducts(compiled), weights, head, counts, options.rounds)


def in_bfloat16(
    own: NativeProducts, weights: list[Tensor], head: Tensor, counts: list[int], rounds: int
) -> None:
    print(f"{'rows':>10} {'functional.linear':>18} {'in C':>8}   ms")
    for rows in counts:
        of_pass = [w.bfloat16() for w in (weights if rows >= MANY else [*weights, head])]
        products: list[Product] = [functional.linear, own.linear]
        times = [best(product, of_pass, rows, 1, rounds, torch.bfloat16) for product in products]
        show(f"{rows}", times)


def in_float32(
    own: FloatProducts, weights: list[Tensor], head: Tensor, counts: list[int], rounds: int
) -> None:
    print(f"{'rows':>10} {'functional.linear':>18} {'oneDNN':>8} {'in C':>8} {'half':>8}   ms")
    for rows in counts:
        forward: list[Product] = [
            functional.linear,
            onednn,
            lambda x, w: own.forward(x, w, None),
        ]
        of_pass = weights if rows >= MANY else [*weights, head]
        times = [best(product, of_pass, rows, 1, rounds) for product in forward]
        half = [weight.bfloat16() for weight in of_pass]
        show(f"{rows}", [*times, best(forward[-1], half, rows, 1, rounds)])
        if rows >= MANY:
            back: list[Product] = [
                lambda g, w: functional.linear(g, w.t()),
                lambda g, w: onednn(g, w.t()),
                own.back,
            ]
            times = [best(product, weights, rows, 0, rounds) for product in back]
            show(f"{rows} back", [*times, best(own.back, half, rows, 0, rounds)])


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def best(
    product: Product,
    weights: list[Tensor],
    rows: int,
    side: int,
    rounds: int,
    dtype: torch.dtype = torch.float32,
) -> float:
    widths = {weight.shape[side] for weight in weights}
    inputs = {width: torch.randn(rows, width).to(dtype) for width in widths}
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for weight in weights:
            product(inputs[weight.shape[side]], weight)
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def show(name: str, times: list[float]) -> None:
    print(f"{name:>10} {times[0]:18.1f}", *(f"{time:8.1f}" for time in times[1:]), flush=True)


if __name__ == "__main__":
    main()
