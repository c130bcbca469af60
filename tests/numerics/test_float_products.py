"""Products of float32 in C: equal to PyTorch's up to rounding, and no row affects another."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from tinkex.engine.native import NativeProducts, library
from tinkex.engine.native.float_products import FloatProducts
from tinkex.engine.products import LARGE, Factors, TorchProducts

#: On both sides of every limit: of the rows in registers, of a block, of what is packed at once.
ROWS = [1, 2, 5, 6, 7, 11, 12, 13, 16, 17, 40, 64, 65, 130, 260]
#: Outputs and inputs: less than a block, whole blocks, and one more; more inputs than a panel has.
SHAPES = [(1, 1), (7, 100), (48, 64), (50, 33), (97, 577), (146, 1200)]


@pytest.fixture(scope="module", params=["native", "haswell"])
def products(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """For this processor, and as they are compiled for one that has AVX2 alone."""
    compiler = shutil.which("cc")
    assert compiler is not None, "these tests need a C compiler"
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file() or " avx2 " not in cpuinfo.read_text():
        pytest.skip("this processor has no AVX2")
    directory = tmp_path_factory.mktemp("kernels", numbered=True)
    return FloatProducts(library.build(compiler, directory, request.param))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, exact: torch.Tensor, inputs: int) -> bool:
    return torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_exact_up_to_rounding(products, outputs, inputs):
    weight, bias = drawn(outputs, inputs), drawn(outputs, seed=1)
    for rows in ROWS:
        x = drawn(rows, inputs, seed=rows)
        exact = x.double() @ weight.double().t()
        assert close(products.forward(x, weight, None), exact, inputs)
        assert close(products.forward(x, weight, bias), exact + bias.double(), inputs)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_gradient_of_rows_has_the_bits_of_a_product_with_the_transposed_weight(
    products, outputs, inputs
):
    weight = drawn(outputs, inputs)
    for rows in ROWS:
        g = drawn(rows, outputs, seed=rows)
        assert torch.equal(
            products.back(g, weight), products.forward(g, weight.t().contiguous(), None)
        )


def test_no_rows(products):
    weight = drawn(50, 64)
    assert products.forward(drawn(0, 64), weight, None).shape == (0, 50)
    assert products.back(drawn(0, 50), weight).shape == (0, 64)


@pytest.mark.parametrize("rank", [1, 8, 16, 24, 60])
def test_two_products_of_the_same_rows(products, rank):
    weight, a, b = drawn(146, 100), drawn(rank, 100, seed=1), drawn(146, rank, seed=2)
    for rows in ROWS:
        x, g = drawn(rows, 100, seed=3), drawn(rows, 146, seed=4)
        y, inner = products.forward_beside(x, weight, None, a)
        assert torch.equal(y, products.forward(x, weight, None))
        assert torch.equal(inner, products.forward(x, a, None))
        x_g, inner_g = products.back_beside(g, weight, b)
        assert torch.equal(x_g, products.back(g, weight))
        assert torch.equal(inner_g, products.back(g, b))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_the_bits_of_a_row_depend_on_nothing_else(products, threads):
    x, weight = drawn(600, 600), drawn(100, 600, seed=1)
    expected = torch.cat([products.forward(row[None], weight, None) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (*ROWS, 600):
            assert torch.equal(products.forward(x[:rows], weight, None), expected[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [3, 40, 200])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_row_reaches_no_other(products, rows, bad):
    x, weight = drawn(rows, 64), drawn(50, 64, seed=1)
    expected = products.forward(x, weight, None)
    x[1] = bad
    found = products.forward(x, weight, None)
    assert not found[1].isfinite().any()
    assert torch.equal(found[:1], expected[:1])
    assert torch.equal(found[2:], expected[2:])


def test_large_weights_are_multiplied_in_c_and_small_ones_by_pytorch():
    compiled = library.library()
    assert compiled is not None
    native, torch_products, own = (
        NativeProducts(compiled),
        TorchProducts(),
        FloatProducts.of(compiled),
    )
    if own is None:
        pytest.skip("this processor has no AVX2")
    small, large = drawn(10, 64), drawn(LARGE // 512, 512)
    x = drawn(5, 64)
    assert torch.equal(native.linear(x, small), torch_products.linear(x, small))
    x = drawn(5, 512)
    assert torch.equal(native.linear(x, large), own.forward(x, large, None))
    g = drawn(5, len(large))
    assert torch.equal(native.back(g, large), own.back(g, large))


def test_an_adapted_product_and_its_gradients_are_those_of_pytorch_up_to_rounding():
    compiled = library.library()
    assert compiled is not None
    weight = drawn(LARGE // 512, 512)
    factors = Factors(drawn(8, 512, seed=1), drawn(len(weight), 8, seed=2), ((len(weight), 0, 8),))
    x, g = drawn(20, 512, seed=3), drawn(20, len(weight), seed=4)
    for found, expected in zip(
        _both_ways(NativeProducts(compiled), x, g, weight, factors),
        _both_ways(TorchProducts(), x, g, weight, factors),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)


def _both_ways(
    products: TorchProducts,
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    factors: Factors,
) -> tuple[torch.Tensor, ...]:
    return (
        *products.adapted_and_inner(x, weight, None, factors),
        *products.adapted_back(g, weight, factors),
    )
