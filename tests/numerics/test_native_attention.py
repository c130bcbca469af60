"""Attention in C equals PyTorch's, and a query has the same bits in packed rows and in pages."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional

from tinkex.engine.native.attention import HeadShape, NativeAttention, QueryRows, packed_rows

TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
PAGE = 8


@pytest.fixture(scope="module")
def native(compiled: ctypes.CDLL) -> NativeAttention:
    return NativeAttention(compiled)


def rotation(lengths, size):
    positions = torch.cat([torch.arange(length) for length in lengths]).double()
    angles = positions[:, None] * torch.exp(-torch.arange(size // 2) / 4).double()
    angles = torch.cat([angles, angles], 1)
    return angles.cos(), angles.sin()


def reference(qkv, shape, lengths, cos, sin):
    heads = qkv.view(len(qkv), -1, shape.size)
    turned = heads[:, : shape.heads + shape.groups]
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    mixed, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        repeated = shape.heads // shape.groups
        q = turned[rows, : shape.heads].transpose(0, 1)
        k = turned[rows, shape.heads :].transpose(0, 1).repeat_interleave(repeated, 0)
        v = heads[rows, shape.heads + shape.groups :].transpose(0, 1).repeat_interleave(repeated, 0)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed.append(found.transpose(0, 1).reshape(length, -1))
        start += length
    return torch.cat(mixed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 16), (4, 1, 80), (1, 1, 128)])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 3], [130, 64, 65, 37], [70, 1101]])
def test_attention_and_its_gradient_equal_those_of_torch(native, dtype, heads, lengths):
    shape = HeadShape(*heads)
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), shape.width, generator=random).to(dtype)
    g = torch.randn(sum(lengths), shape.heads * shape.size, generator=random).to(dtype)
    cos, sin = rotation(lengths, shape.size)
    rows = packed_rows(lengths)
    rotated = native.rotate(qkv, shape, cos.float(), sin.float())
    mixed = native.attend(rotated, shape, rows)
    qkv_g = native.attend_back(rotated, shape, rows, mixed, g, cos.float(), sin.float())
    wide = qkv.double().requires_grad_()
    expected = reference(wide, shape, lengths, cos, sin)
    expected.backward(g.double())
    assert wide.grad is not None
    for found, wanted in ((mixed[0], expected.detach()), (qkv_g, wide.grad)):
        difference = (found.double() - wanted).abs().max()
        assert difference <= CLOSE[dtype] * wanted.abs().max().clamp_min(1)


@pytest.mark.parametrize("dtype", TYPES)
def test_queries_in_pages_have_the_bits_of_packed_rows(native, dtype):
    """A prompt read in chunks, then tokens one by one, with pages in any order beside those of another sequence."""
    shape, length = HeadShape(6, 2, 32), 75
    random = torch.Generator().manual_seed(0)
    rotated = torch.randn(length, shape.width, generator=random).to(dtype)
    whole, _ = native.attend(rotated, shape, packed_rows([length]))
    pages = torch.randperm(20, generator=random)
    cache = torch.full((2, shape.groups, 20, PAGE, shape.size), torch.nan, dtype=dtype)
    heads = rotated.view(length, -1, shape.size)
    for position in range(length):
        page, offset = pages[position // PAGE], position % PAGE
        cache[0, :, page, offset] = heads[position, 6:8]
        cache[1, :, page, offset] = heads[position, 8:10]
    found, start = [], 0
    for count in [33, 7, 20, *([1] * 15)]:
        rows = (QueryRows * 1)(QueryRows(0, count, start, 0))
        part = rotated[start : start + count].contiguous()
        found.append(native.attend_pages(part, shape, rows, cache, pages))
        start += count
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("lengths", [[130, 20], [1100, 20]])
def test_gradients_have_the_same_bits_with_any_number_of_threads(native, lengths):
    shape, count = HeadShape(9, 3, 64), sum(lengths)
    rotated = torch.randn(count, shape.width).bfloat16()
    g = torch.randn(count, shape.heads * shape.size).bfloat16()
    cos, sin = (table.float() for table in rotation(lengths, shape.size))
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        rows = packed_rows(lengths)
        mixed = native.attend(rotated, shape, rows)
        found.append(native.attend_back(rotated, shape, rows, mixed, g, cos, sin))
    torch.set_num_threads(1)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_a_sequence_do_not_depend_on_its_neighbours(
    native: NativeAttention, dtype: torch.dtype
):
    shape, lengths = HeadShape(6, 2, 32), [75, 1100, 33]
    rotated = torch.randn(sum(lengths), shape.width).to(dtype)
    g = torch.randn(sum(lengths), shape.heads * shape.size).to(dtype)
    cos, sin = (table.float() for table in rotation(lengths, shape.size))

    def gradients(part: slice, own: list[int]) -> torch.Tensor:
        rows = packed_rows(own)
        mixed = native.attend(rotated[part], shape, rows)
        return native.attend_back(rotated[part], shape, rows, mixed, g[part], cos[part], sin[part])

    together, start = gradients(slice(None), lengths), 0
    for length in lengths:
        part = slice(start, start + length)
        assert torch.equal(gradients(part, [length]), together[part])
        start += length
