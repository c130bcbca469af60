"""Gradients of adapters in C: exact up to rounding, and the same bits with any number of threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tinkex.engine.llama import blocks_of, fuse
from tinkex.engine.native import NativeProducts
from tinkex.engine.products import Factors, PairGradients, TorchProducts

TYPES = [torch.float32, torch.bfloat16]
#: One row, an odd number, and more than are packed at once.
ROWS = [1, 3, 8, 21, 513]
#: On both sides of a vector and of a strip.
INPUTS = [1, 30, 32, 50, 96, 147]
#: Outputs of the layers of a projection, and the ranks of their pairs; a layer of rank 0 has no adapter.
LAYERS = [
    ((64,), (8,)),
    ((50,), (1,)),
    ((64, 33, 18), (1, 1, 1)),
    ((64, 33, 18), (20, 20, 20)),
    ((64, 33, 18), (0, 8, 0)),
    ((3, 40, 2), (8, 0, 9)),
    ((35, 70), (64, 64)),
]
SCALE = 0.75


@pytest.fixture(scope="module")
def products(compiled: ctypes.CDLL) -> NativeProducts:
    return NativeProducts(compiled)


@pytest.fixture(scope="module")
def half_products(compiled: ctypes.CDLL) -> NativeProducts:
    if not hasattr(compiled, "tinkex_adapted_back"):
        pytest.skip("this processor has no AVX-512 BF16")
    return NativeProducts(compiled)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Rows, gradients and factors of a projection."""

    def __init__(
        self,
        rows: int,
        inputs: int,
        layers: tuple[Sequence[int], Sequence[int]],
        dtype: torch.dtype,
    ) -> None:
        self.sizes, ranks = layers
        tensors = [
            (drawn(rank, inputs, seed=rank), drawn(size, rank, seed=size)) if rank else None
            for size, rank in zip(self.sizes, ranks, strict=True)
        ]
        self.blocks = blocks_of(tensors, self.sizes)
        self.factors: Factors = fuse(tensors, self.sizes, SCALE, dtype)
        columns = self.factors.a.shape[0]
        self.x, self.g = drawn(rows, inputs).to(dtype), drawn(rows, sum(self.sizes)).to(dtype)
        self.inner, self.inner_g = (drawn(rows, columns, seed=seed).to(dtype) for seed in (3, 4))
        self.weight = drawn(sum(self.sizes), inputs, seed=5).to(dtype)

    def gradients(self, products: TorchProducts) -> list[PairGradients]:
        """Those of the pairs, added to others."""
        pairs = [
            PairGradients(rows, columns, torch.full_like(a, 7), torch.full_like(b, -7))
            for rows, columns, (a, b) in self.blocks
        ]
        products.add_gradients(self.g, self.x, self.inner, self.inner_g, SCALE, pairs)
        return pairs

    def exact(self) -> list[tuple[Tensor, Tensor]]:
        x, g, inner, inner_g = (
            each.double() for each in (self.x, self.g, self.inner, self.inner_g)
        )
        return [
            (7 + inner_g[:, columns].t() @ x, -7 + SCALE * g[:, rows].t() @ inner[:, columns])
            for rows, columns, _ in self.blocks
        ]

    def back(self, products: TorchProducts, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weight = self.weight if weight is None else weight
        return products.adapted_back(self.g, weight, self.factors)


def same_with_threads(found: Callable[[], Sequence[Tensor]]) -> bool:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(found())
    finally:
        torch.set_num_threads(before)
    return all(all(map(torch.equal, results[0], other)) for other in results[1:])


def assert_exact(found: Tensor, exact: Tensor, *, bits: int = 18) -> None:
    difference = (found.double() - exact).abs().max()
    assert difference <= 2.0**-bits * exact.abs().max()


# -- of the factors --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layers", LAYERS)
def test_gradients_of_the_factors_are_sums_in_float32(products, layers, dtype):
    if dtype == torch.bfloat16 and not products.adds_half_gradients:
        pytest.skip("PyTorch computes them, and rounds them to bfloat16")
    for rows in ROWS:
        for inputs in INPUTS:
            case = Case(rows, inputs, layers, dtype)
            for pair, (a, b) in zip(case.gradients(products), case.exact(), strict=True):
                assert_exact(pair.a, a)
                assert_exact(pair.b, b)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layers", LAYERS)
def test_pytorch_adds_the_same_gradients(layers, dtype):
    case = Case(21, 50, layers, dtype)
    for pair, (a, b) in zip(case.gradients(TorchProducts()), case.exact(), strict=True):
        assert_exact(pair.a, a, bits=18 if dtype == torch.float32 else 7)
        assert_exact(pair.b, b, bits=18 if dtype == torch.float32 else 7)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layers", LAYERS)
def test_the_bits_of_a_factors_gradient_do_not_depend_on_the_threads(products, layers, dtype):
    case = Case(700, 147, layers, dtype)

    def found() -> list[Tensor]:
        return [each for pair in case.gradients(products) for each in (pair.a, pair.b)]

    if dtype == torch.float32 or products.adds_half_gradients:
        assert same_with_threads(found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_number_reaches_only_the_gradients_that_read_it(products, dtype, bad):
    case = Case(21, 50, ((64, 33, 18), (8, 8, 8)), dtype)
    case.x[20, 49], case.g[20, 70] = bad, bad
    if dtype == torch.bfloat16 and not products.adds_half_gradients:
        pytest.skip("a product of PyTorch computes all layers together")
    for number, pair in enumerate(case.gradients(products)):
        assert not pair.a[:, 49].isfinite().any()
        assert pair.a[:, :49].isfinite().all()
        assert pair.b.isfinite().all(1).tolist() == [
            (number, output) != (1, 6) for output in range(len(pair.b))
        ]


# -- of the rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS)
def test_gradients_of_bfloat16_rows_are_rounded_once_more_than_without_an_adapter(
    half_products, layers
):
    for rows in ROWS:
        for inputs in (2, 30, 32, 50, 96):
            case = Case(rows, inputs, layers, torch.bfloat16)
            x_g, inner_g = case.back(half_products)
            factors = case.factors
            assert_exact(inner_g, case.g.double() @ factors.b.double(), bits=8)
            plain = half_products.back(case.g, case.weight).double()
            assert_exact(x_g, plain + inner_g.double() @ factors.a.double(), bits=8)


@pytest.mark.parametrize("layers", LAYERS)
def test_the_bits_of_a_bfloat16_rows_gradient_depend_on_nothing_else(half_products, layers):
    case = Case(70, 50, layers, torch.bfloat16)
    nothing = torch.zeros_like(case.weight)
    expected = case.back(half_products, nothing)
    assert same_with_threads(lambda: case.back(half_products, nothing))
    for rows in (1, 7, 8, 9, 70):
        found = half_products.adapted_back(case.g[:rows], nothing, case.factors)
        assert all(
            torch.equal(some, whole[:rows]) for some, whole in zip(found, expected, strict=True)
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_reaches_no_other_row(half_products, bad):
    case = Case(21, 50, ((64, 33, 18), (9, 9, 9)), torch.bfloat16)
    expected = case.back(half_products)
    case.g[11, 96] = bad
    others = [row for row in range(21) if row != 11]
    for found, before in zip(case.back(half_products), expected, strict=True):
        assert torch.equal(found[others], before[others])
        assert not found[11].isfinite().all()


def test_rows_in_another_layout(products):
    case = Case(21, 50, LAYERS[0], torch.float32)
    expected = case.gradients(products)
    case.x, case.g = (each.t().contiguous().t() for each in (case.x, case.g))
    for pair, before in zip(case.gradients(products), expected, strict=True):
        assert torch.equal(pair.a, before.a)
        assert torch.equal(pair.b, before.b)
