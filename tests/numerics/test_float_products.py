"""Products of float32 in C: equal to PyTorch's up to rounding, and no row affects another."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from tinkex.engine.native import NativeProducts
from tinkex.engine.native.float_products import FloatProducts
from tinkex.engine.products import Factors, TorchProducts

#: On both sides of every limit: of the rows in registers, of a block, of what is packed at once.
ROWS = [1, 2, 5, 6, 7, 11, 12, 13, 16, 17, 40, 64, 65, 130, 260]
#: Outputs and inputs: less than a block, whole blocks, and one more; more inputs than a panel has.
SHAPES = [(1, 1), (7, 100), (48, 64), (50, 33), (97, 577), (146, 1200)]


@pytest.fixture(scope="module")
def products(compiled: ctypes.CDLL) -> FloatProducts:
    found = FloatProducts.of(compiled)
    if found is None:
        pytest.skip("without AVX2 PyTorch computes them")
    return found


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


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (40, 32), (146, 1201)])
def test_weights_stored_as_bfloat16_give_the_bits_of_the_same_weights_in_float32(
    products, outputs, inputs
):
    half, bias = drawn(outputs, inputs).bfloat16(), drawn(outputs, seed=1)
    weight, a, b = half.float(), drawn(8, inputs, seed=2), drawn(outputs, 8, seed=3)
    for rows in ROWS:
        x, g = drawn(rows, inputs, seed=rows), drawn(rows, outputs, seed=rows)
        assert torch.equal(products.forward(x, half, bias), products.forward(x, weight, bias))
        assert torch.equal(products.back(g, half), products.back(g, weight))
        for found, expected in (
            (
                products.forward_beside(x, half, bias, a),
                products.forward_beside(x, weight, bias, a),
            ),
            (products.back_beside(g, half, b), products.back_beside(g, weight, b)),
        ):
            assert all(map(torch.equal, found, expected))


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


def test_weights_of_every_size_are_multiplied_in_c(compiled, products):
    native = NativeProducts(compiled)
    for outputs, inputs in SHAPES:
        weight, x, g = drawn(outputs, inputs), drawn(5, inputs), drawn(5, outputs)
        assert torch.equal(native.linear(x, weight), products.forward(x, weight, None))
        assert torch.equal(native.back(g, weight), products.back(g, weight))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_added_to_given_rows(products, outputs, inputs):
    weight, x, g = drawn(outputs, inputs), drawn(40, inputs, seed=1), drawn(40, outputs, seed=2)
    for rows in (1, 9, 40):
        y, x_g = drawn(rows, outputs, seed=3), drawn(rows, inputs, seed=4)
        exact = y.double() + x[:rows].double() @ weight.double().t()
        exact_back = x_g.double() + g[:rows].double() @ weight.double()
        products.add(y, x[:rows], weight)
        products.add_back(x_g, g[:rows], weight)
        assert close(y, exact, inputs)
        assert close(x_g, exact_back, outputs)


def test_an_adapted_product_and_its_gradients_are_those_of_pytorch_up_to_rounding(compiled):
    weight = drawn(512, 512)
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
