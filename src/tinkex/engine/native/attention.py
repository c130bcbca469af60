"""The attention of `attention.c`, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int, c_int64, c_long, c_void_p
from typing import Final

import torch
from torch import Tensor

__all__ = ["HeadShape", "NativeAttention", "QueryRows", "packed_rows"]

#: Largest head size: `LARGEST` in `attention.c`.
_LARGEST: Final = 512
#: Keys that are packed together, and positions of a long sequence: `TILE` and `LONG` in `attention.c`.
_TILE: Final = 64
_LONG: Final = 1024


class HeadShape(Structure):
    """The number of query heads and of key-value heads, and the size of a head."""

    _fields_ = (("heads", c_int64), ("groups", c_int64), ("size", c_int64))
    heads: int
    groups: int
    size: int

    @property
    def width(self) -> int:
        """Elements of a row of queries, keys and values."""
        return (self.heads + 2 * self.groups) * self.size

    @property
    def is_served(self) -> bool:
        return self.size % 16 == 0 and self.size <= _LARGEST


class QueryRows(Structure):
    """Adjacent queries of a sequence: their first row, how many, the position of the first, and where the keys are.

    `keys` is the first row of the keys, or where the sequence's pages begin in the table of pages.
    """

    _fields_ = (("row", c_int64), ("count", c_int64), ("first", c_int64), ("keys", c_int64))


class _Heads(Structure):
    _fields_ = (
        *(("q", c_void_p), ("k", c_void_p), ("v", c_void_p)),
        *(("q_stride", c_int64), ("k_stride", c_int64), ("k_group", c_int64), ("page", c_int64)),
        *(("table", c_void_p), ("shape", HeadShape)),
    )


class NativeAttention:
    """Rotation, and causal attention over packed rows or over the pages of a cache.

    The result of a query has the same bits in both, whatever other rows are in the batch.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        heads, rows = ctypes.POINTER(_Heads), ctypes.POINTER(QueryRows)
        self._rotate = compiled["tinkex_rotate"]
        self._rotate.argtypes = [
            *(c_int, c_int, c_void_p, c_void_p, c_void_p, c_float, c_void_p),
            *(c_long, c_long, c_long, c_long, c_void_p, c_void_p),
        ]
        self._attend = compiled["tinkex_attend"]
        self._attend.argtypes = [c_int, c_int, heads, rows, c_long, c_void_p, c_void_p]
        self._attend_back = compiled["tinkex_attend_back"]
        self._attend_back.argtypes = [
            *(c_int, c_int, heads, rows, c_long, c_void_p, c_void_p, c_void_p),
            *(c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_long),
        ]
        for function in (self._rotate, self._attend, self._attend_back):
            function.restype = None

    def rotate(
        self,
        qkv_ND: Tensor,
        shape: HeadShape,
        cos_NE: Tensor,
        sin_NE: Tensor,
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Rows of rotated and scaled queries, rotated keys, and values, in the type of `qkv_ND`.

        Keys and values are also written to a cache if `kept` names it, with the place of each head of each row.
        """
        out = torch.empty_like(qkv_ND)
        self._rotate(
            *_begin(qkv_ND),
            *(qkv_ND.data_ptr(), cos_NE.data_ptr(), sin_NE.data_ptr(), shape.size**-0.5),
            *(out.data_ptr(), shape.heads, shape.groups, shape.size, len(qkv_ND)),
            *((None, None) if kept is None else (kept[0].data_ptr(), kept[1].data_ptr())),
        )
        return out

    def attend(
        self, rotated_ND: Tensor, shape: HeadShape, rows: ctypes.Array[QueryRows]
    ) -> tuple[Tensor, Tensor]:
        """Mixed values of packed rows, N × H·E, and N × H × 2 numbers of the softmax, for `attend_back`.

        Each sequence's keys and values stand in its own rows.
        """
        softmax = torch.empty(len(rotated_ND), shape.heads, 2)
        return self._mixed(rotated_ND, rows, _packed(rotated_ND, shape), softmax), softmax

    def attend_pages(
        self,
        rotated_ND: Tensor,
        shape: HeadShape,
        rows: ctypes.Array[QueryRows],
        cache_2GPSE: Tensor,
        table: Tensor,
    ) -> Tensor:
        """Mixed values of rows whose keys and values lie in pages; `table` lists the pages of all sequences."""
        keys, group = cache_2GPSE.data_ptr(), cache_2GPSE.stride(1)
        values = keys + cache_2GPSE.stride(0) * cache_2GPSE.element_size()
        heads = _Heads(
            *(rotated_ND.data_ptr(), keys, values),
            *(rotated_ND.shape[1], shape.size, group, cache_2GPSE.shape[3]),
            *(table.data_ptr(), shape),
        )
        return self._mixed(rotated_ND, rows, heads)

    def _mixed(
        self,
        rotated_ND: Tensor,
        rows: ctypes.Array[QueryRows],
        heads: _Heads,
        softmax: Tensor | None = None,
    ) -> Tensor:
        out = rotated_ND.new_empty(len(rotated_ND), heads.shape.heads * heads.shape.size)
        kept = None if softmax is None else softmax.data_ptr()
        self._attend(*_begin(out), heads, rows, len(rows), out.data_ptr(), kept)
        return out

    def attend_back(
        self,
        rotated_ND: Tensor,
        shape: HeadShape,
        rows: ctypes.Array[QueryRows],
        mixed: tuple[Tensor, Tensor],
        mixed_g: Tensor,
        cos_NE: Tensor,
        sin_NE: Tensor,
    ) -> Tensor:
        """Gradients of queries, keys and values as they were before `rotate`; `mixed` is what `attend` returned."""
        out = torch.empty_like(rotated_ND)
        count = len(rotated_ND)
        chunks = 2 if any(row.count >= _LONG for row in rows) else 1
        tiles = sum(-(-row.count // _TILE) for row in rows)
        cells = 3 * _TILE * shape.size * tiles * shape.groups
        space = torch.empty(2 * chunks * shape.heads * count * shape.size + cells)
        self._attend_back(
            *_begin(out),
            *(_packed(rotated_ND, shape), rows, len(rows)),
            *(mixed[0].data_ptr(), mixed[1].data_ptr(), mixed_g.data_ptr()),
            *(cos_NE.data_ptr(), sin_NE.data_ptr(), shape.size**-0.5),
            *(out.data_ptr(), space.data_ptr(), count),
        )
        return out


def packed_rows(lengths: Sequence[int]) -> ctypes.Array[QueryRows]:
    """Sequences of these lengths, one after another."""
    rows, start = (QueryRows * len(lengths))(), 0
    for row, length in zip(rows, lengths, strict=True):
        row.row, row.count, row.first, row.keys = start, length, 0, start
        start += length
    return rows


def _packed(rotated_ND: Tensor, shape: HeadShape) -> _Heads:
    start, size = rotated_ND.data_ptr(), rotated_ND.element_size()
    width = rotated_ND.shape[1]
    keys = start + shape.heads * shape.size * size
    values = keys + shape.groups * shape.size * size
    return _Heads(start, keys, values, width, width, shape.size, 0, None, shape)


def _begin(products: Tensor) -> tuple[int, int]:
    return torch.get_num_threads(), int(products.dtype == torch.bfloat16)
