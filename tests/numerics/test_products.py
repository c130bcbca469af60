"""Native products: equal to PyTorch's up to rounding, and no row affects another."""

from __future__ import annotations

import ctypes
import itertools
import math

import pytest
import torch

from tinkex.engine.native import NativeProducts
from tinkex.engine.products import AdaptedRows, Factors, TorchProducts

INPUTS, PARTS = 96, (64, 32, 50)  # the outputs are not a multiple of any block
REFERENCE = TorchProducts()


@pytest.fixture(scope="module")
def adapters(compiled: ctypes.CDLL) -> NativeProducts:
    """In float32, which every processor has."""
    return NativeProducts(compiled)


@pytest.fixture(scope="module")
def products(compiled: ctypes.CDLL) -> NativeProducts:
    if not hasattr(compiled, "tinkex_product"):
        pytest.skip("this processor has no AVX-512 BF16")
    return NativeProducts(compiled)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def factors(rank: int, seed: int = 1) -> Factors:
    """Factors of three layers that read the same input."""
    columns = 3 * rank + 3 * rank % 2
    a, b = drawn(columns, INPUTS, seed=seed), torch.zeros(sum(PARTS), columns).bfloat16()
    spans, row = [], 0
    for part, size in enumerate(PARTS):
        where = slice(part * rank, (part + 1) * rank)
        b[row : row + size, where] = drawn(size, rank, seed=seed + part)
        row += size
        spans.append((row, where.start, where.stop))
    return Factors(a, b, tuple(spans))


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether numbers are rounded correctly to bfloat16, up to the last bit."""
    return torch.allclose(found.double(), exact, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 33, 64, 80, 81, 130])
def test_a_product_is_that_of_pytorch_up_to_rounding(products, rows):
    x, weight, bias = drawn(rows, INPUTS), drawn(sum(PARTS), INPUTS), drawn(sum(PARTS))
    exact = x.double() @ weight.double().t() + bias.double()
    assert close(products.linear(x, weight, bias), exact)
    assert close(REFERENCE.linear(x, weight, bias), exact)
    wide = products.linear(x, weight, bias, dtype=torch.float32)
    assert torch.equal(wide, products.linear(x, weight, bias).float())


@pytest.mark.parametrize("inputs", [2, 30, 34, 2050, 4100])
def test_inputs_of_every_even_number(products, inputs):
    x, weight = drawn(20, inputs), drawn(40, inputs)
    exact = x.double() @ weight.double().t()
    assert close(products.linear(x, weight) / inputs**0.5, exact / inputs**0.5)


def test_odd_inputs_and_other_layouts_are_left_to_pytorch(products):
    for weight in (drawn(40, 33), drawn(32, 40).t()):
        x = drawn(3, weight.shape[1]).to(weight.dtype)
        assert torch.equal(products.linear(x, weight), REFERENCE.linear(x, weight))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_of_a_row_depend_on_nothing_else(products, threads):
    x, weight = drawn(130, INPUTS), drawn(sum(PARTS), INPUTS)
    expected = torch.cat([products.linear(row[None], weight) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (8, 20, 40, 64, 130):
            assert torch.equal(products.linear(x[:rows], weight), expected[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 5), (30, 16), (32, 33), (98, 100)])
def test_few_rows_have_the_bits_they_have_among_many(products, inputs, outputs, threads):
    x, weight, bias = drawn(512, inputs), drawn(outputs, inputs), drawn(outputs)
    expected = products.linear(x, weight, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in range(1, 18):
            assert torch.equal(products.linear(x[:rows], weight, bias), expected[:rows])
            wide = products.linear(x[-rows:], weight, bias, dtype=torch.float32)
            assert torch.equal(wide, expected[-rows:].float())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [2, 7, 16, 33, 64])
def test_few_rows_with_adapters_have_the_bits_they_have_among_many(products, rank, threads):
    x, weight, bias = drawn(512, INPUTS), drawn(sum(PARTS), INPUTS), drawn(sum(PARTS))
    adapters = [factors(rank, 1), factors(rank + 1, 5), factors(2, 9)]
    expected = [products.adapted_and_inner(x, weight, bias, each) for each in adapters]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in range(1, 17):
            # The first third has no adapter, and each adapter its own number of rows.
            cuts = [rows // 3, rows // 2, rows - rows // 4, rows]
            own = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
            groups = [
                each for each in zip(own, adapters, strict=True) if each[0].start < each[0].stop
            ]
            y = products.adapted(x[:rows], weight, bias, AdaptedRows(groups))
            plain = products.linear(x[: cuts[0]], weight, bias)
            adapted = [whole[part] for part, (whole, _) in zip(own, expected, strict=True)]
            assert torch.equal(y, torch.cat([plain, *adapted]))
            alone, inner = products.adapted_and_inner(x[:rows], weight, bias, adapters[0])
            assert torch.equal(alone, expected[0][0][:rows])
            assert torch.equal(inner, expected[0][1][:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rank", [1, 8, 20])
def test_rows_with_adapters(products, rank):
    x, weight = drawn(90, INPUTS), drawn(sum(PARTS), INPUTS)
    groups = [(slice(3, 21), factors(rank, 1)), (slice(21, 90), factors(rank + 1, 5))]
    y = products.adapted(x, weight, None, AdaptedRows(groups))
    plain = products.linear(x, weight)
    assert torch.equal(y[:3], plain[:3])
    for rows, each in groups:
        alone, inner = products.adapted_and_inner(x[rows], weight, None, each)
        assert torch.equal(y[rows], alone)
        assert close(inner, x[rows].double() @ each.a.double().t())
        exact = x[rows].double() @ weight.double().t() + inner.double() @ each.b.double().t()
        assert close(alone / rank**0.5, exact / rank**0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_factors_reach_no_other_of_few_rows(products, bad):
    x, weight = drawn(9, INPUTS), drawn(sum(PARTS), INPUTS)
    good, spoiled = factors(8, 1), factors(8, 5)
    expected = products.adapted(x, weight, None, AdaptedRows([(slice(0, 4), good)]))
    spoiled.a[0], spoiled.b[:, 0] = bad, bad
    x[8] = bad
    groups = [(slice(0, 4), good), (slice(4, 6), spoiled)]
    y = products.adapted(x, weight, None, AdaptedRows(groups))
    others = [0, 1, 2, 3, 6, 7]
    assert torch.equal(y[others], expected[others])
    assert not y[4:6].isfinite().all()
    assert not y[8].isfinite().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_factors_and_rows_reach_no_other_row(products, bad):
    x, weight = drawn(40, INPUTS), drawn(sum(PARTS), INPUTS)
    good, spoiled = factors(8, 1), factors(8, 5)
    expected = products.adapted(x, weight, None, AdaptedRows([(slice(0, 9), good)]))
    spoiled.a[0], spoiled.b[:, 0] = bad, bad
    x[30] = bad
    groups = [(slice(0, 9), good), (slice(9, 12), spoiled)]
    y = products.adapted(x, weight, None, AdaptedRows(groups))
    others = [row for row in range(40) if row not in {9, 10, 11, 30}]
    assert torch.equal(y[others], expected[others])
    assert not y[9:12].isfinite().all()
    assert not y[30].isfinite().any()


# -- float32 ---------------------------------------------------------------------------------------


def in_float32(each: Factors) -> Factors:
    return Factors(each.a.float() / 8, each.b.float() / 8, each.spans)


@pytest.mark.parametrize("rank", [1, 8, 20, 32])
def test_adapters_of_float32_rows_are_those_of_pytorch_up_to_rounding(adapters, rank):
    x, weight = drawn(90, INPUTS).float(), drawn(sum(PARTS), INPUTS).float()
    groups = [
        (slice(3, 4), in_float32(factors(rank, 1))),
        (slice(4, 21), in_float32(factors(rank + 1, 5))),
        (slice(30, 90), in_float32(factors(8, 9))),
    ]
    y = adapters.adapted(x, weight, None, AdaptedRows(groups))
    expected = REFERENCE.adapted(x, weight, None, AdaptedRows(groups))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(y[:3], REFERENCE.linear(x, weight)[:3])
    assert torch.equal(y[21:30], REFERENCE.linear(x, weight)[21:30])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_adapter_of_a_float32_row_depends_on_nothing_else(
    adapters: NativeProducts, threads: int
):
    x, weight, each = drawn(70, INPUTS).float(), torch.zeros(146, INPUTS), in_float32(factors(8))

    def update(rows: torch.Tensor) -> torch.Tensor:
        return adapters.adapted(rows, weight, None, AdaptedRows([(slice(None), each)]))

    expected = torch.cat([update(row[None]) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (2, 7, 8, 9, 30, 70):
            assert torch.equal(update(x[:rows]), expected[:rows])
    finally:
        torch.set_num_threads(before)


def test_a_layer_between_two_adapted_ones_stays_as_it_is(adapters):
    """The spans of an adapter of the first and the last part: the second span covers both others, with zeros."""
    x, weight, whole = drawn(5, INPUTS).float(), drawn(146, INPUTS).float(), in_float32(factors(8))
    b = whole.b.clone()
    b[64:96] = 0
    spans = (whole.spans[0], whole.spans[2])
    y = adapters.adapted(x, weight, None, AdaptedRows([(slice(None), Factors(whole.a, b, spans))]))
    plain = REFERENCE.linear(x, weight)
    assert torch.equal(y[:, 64:96], plain[:, 64:96])
    expected = REFERENCE.adapted(
        x, weight, None, AdaptedRows([(slice(None), Factors(whole.a, b, spans))])
    )
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_float32_factors_reach_no_other_row(adapters, bad):
    x, weight = drawn(40, INPUTS).float(), drawn(sum(PARTS), INPUTS).float()
    good, spoiled = in_float32(factors(8, 1)), in_float32(factors(8, 5))
    expected = adapters.adapted(x, weight, None, AdaptedRows([(slice(0, 9), good)]))
    spoiled.a[0], spoiled.b[:, 0] = bad, bad
    groups = [(slice(0, 9), good), (slice(9, 12), spoiled)]
    y = adapters.adapted(x, weight, None, AdaptedRows(groups))
    assert torch.equal(y[:9], expected[:9])
    assert torch.equal(y[12:], expected[12:])
    assert not y[9:12].isfinite().all()
