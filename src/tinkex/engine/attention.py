"""Attention of one step over the paged cache; every sequence reads its own positions only.

In C, each row reads the pages of its sequence in place. With PyTorch, rows that draw (one token per sequence) are
gathered in bands of similar length and computed together; a long sequence in adjacent pages is read in place; chunks of
prompts are computed by sequence, those of equal shape together. The plan of a step is made once and used by all layers.

Shapes: N rows, B sequences, T positions, H query heads, G key-value heads, R = H / G, E head size, S positions per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from .continuations import Chunk
from .kv_cache import KeyValueCache, Source, are_adjacent
from .llama import LlamaBody, LlamaLayer, rotate
from .native.attention import NativeAttention, QueryRows
from .packed_attention import attend
from .values import Array

__all__ = ["StepAttention", "attention_of_step"]

#: Sequences share a band if the longest has at most this many times the pages of the shortest.
_BAND: Final = 2.0
#: A sequence of at least this many adjacent pages is read in place: three more operations cost less than copying it.
_LONG: Final = 8


class StepAttention(Protocol):
    """Attention over the rows of one step, the same for all layers."""

    def attend(self, index: int, layer: LlamaLayer, qkv_ND: Tensor) -> Tensor:
        """Store the new keys and values of a layer, and return the mixed values of every row: N × H·E.

        They have the type of the cache, which is that of the product they go into.
        """


def attention_of_step(
    body: LlamaBody, chunks: Sequence[Chunk], cache: KeyValueCache, rotation: tuple[Tensor, Tensor]
) -> StepAttention:
    """The attention of a step; `rotation` holds cosines and sines of the rows' positions, each N × E."""
    if body.attention is not None:
        return _InPlace(body.attention, chunks, cache, rotation)
    return _Gathered(body.layers[0], chunks, cache, rotation)


class _InPlace:
    """Attention in C that reads the pages in place; the same code as the trainer's, with the same bits."""

    def __init__(
        self,
        attention: NativeAttention,
        chunks: Sequence[Chunk],
        cache: KeyValueCache,
        rotation: tuple[Tensor, Tensor],
    ) -> None:
        self._attention, self._cache, self._rotation = attention, cache, rotation
        self._written = _written_rows(chunks, cache)
        pages: list[int] = []
        self._rows = (QueryRows * len(chunks))()
        row = 0
        for rows, chunk in zip(self._rows, chunks, strict=True):
            rows.row, rows.count, rows.first, rows.keys = row, chunk.count, chunk.start, len(pages)
            pages += chunk.continuation.pages[: _pages_of(chunk, cache.page)]
            row += chunk.count
        self._table = torch.tensor(pages)

    def attend(self, index: int, layer: LlamaLayer, qkv_ND: Tensor) -> Tensor:
        cache = self._cache.whole(index)
        kept = cache, self._written
        rotated = self._attention.rotate(qkv_ND, layer.shape, *self._rotation, kept)
        return self._attention.attend_pages(rotated, layer.shape, self._rows, cache, self._table)


@dataclass(frozen=True)
class _Band:
    """Sequences of similar length that read one token each."""

    rows_B: Tensor | None  # None: all rows of the step
    source: Source
    mask: Tensor  # B·G × 1 × T


@dataclass(frozen=True)
class _Prompts:
    """Chunks of equal start and length."""

    rows_BT: Tensor
    start: int
    source: Source | None = None  # None: nothing was read before


class _Gathered:
    """Attention with PyTorch."""

    def __init__(
        self,
        layer: LlamaLayer,
        chunks: Sequence[Chunk],
        cache: KeyValueCache,
        rotation: tuple[Tensor, Tensor],
    ) -> None:
        self._cache = cache
        self._heads, self._groups, self._size = layer.heads, layer.groups, layer.size
        self._device = rotation[0].device
        # N × (H + G) × E; those of the queries have the scale of attention, as in training.
        scales = torch.ones(self._heads + self._groups, 1, device=self._device)
        scales[: self._heads] = self._size**-0.5
        self._cos, self._sin = (table_NE[:, None] * scales for table_NE in rotation)
        starts = np.cumsum([0, *(chunk.count for chunk in chunks)])
        self._count = int(starts[-1])
        self._written = _written_rows(chunks, cache)
        drawing = [
            (int(first), chunk)
            for first, chunk in zip(starts, chunks, strict=False)
            if chunk.count == 1
        ]
        drawing.sort(key=lambda each: each[1].start)
        self._bands = [self._band(band) for band in _bands(drawing, cache.page)]
        shapes: dict[tuple[int, int], list[tuple[int, Chunk]]] = {}
        for first, chunk in zip(starts, chunks, strict=False):
            if chunk.count > 1:
                shapes.setdefault((chunk.start, chunk.count), []).append((int(first), chunk))
        self._prompts = [self._prompt(*shape, members) for shape, members in shapes.items()]

    def _band(self, members: Sequence[tuple[int, Chunk]]) -> _Band:
        pages_BC = _table([chunk for _, chunk in members], self._cache.page)
        lengths_B = np.array([chunk.start + 1 for _, chunk in members])
        positions = np.arange(pages_BC.shape[1] * self._cache.page)
        beyond_BT = torch.from_numpy(positions >= lengths_B[:, None])
        mask_BT = torch.zeros(beyond_BT.shape).masked_fill_(beyond_BT, -torch.inf)
        mask = mask_BT.repeat_interleave(self._groups, 0)[:, None].to(self._device)
        rows = [first for first, _ in members]
        alone = rows == list(range(self._count))
        return _Band(
            None if alone else torch.tensor(rows, device=self._device),
            self._cache.source(pages_BC),
            mask,
        )

    def _prompt(self, start: int, count: int, members: Sequence[tuple[int, Chunk]]) -> _Prompts:
        rows = np.array([first for first, _ in members])[:, None] + np.arange(count)
        rows_BT = torch.from_numpy(rows).to(self._device)
        if start == 0:
            return _Prompts(rows_BT, start)
        pages_BC = _table([chunk for _, chunk in members], self._cache.page)
        return _Prompts(rows_BT, start, self._cache.source(pages_BC))

    def attend(self, index: int, layer: LlamaLayer, qkv_ND: Tensor) -> Tensor:
        heads_NHE = self._rotated(layer, qkv_ND.float())
        self._cache.write(index, self._written, heads_NHE[:, self._heads :])
        mixed_NHE: Tensor | None = None
        for band in self._bands:
            found = self._draw(index, band, heads_NHE)
            if band.rows_B is None:
                return found
            if mixed_NHE is None:
                mixed_NHE = found.new_empty(self._count, self._heads * self._size)
            mixed_NHE.index_copy_(0, band.rows_B, found)
        for prompts in self._prompts:
            found = self._read(index, prompts, heads_NHE)
            if prompts.rows_BT.numel() == self._count:
                return found
            if mixed_NHE is None:
                mixed_NHE = found.new_empty(self._count, self._heads * self._size)
            mixed_NHE.index_copy_(0, prompts.rows_BT.flatten(), found)
        assert mixed_NHE is not None
        return mixed_NHE

    def _rotated(self, layer: LlamaLayer, qkv_ND: Tensor) -> Tensor:
        """Queries, keys and values, N × heads × E; changes `qkv_ND`."""
        heads = qkv_ND.view(len(qkv_ND), -1, layer.size)
        turned = heads[:, : layer.heads + layer.groups]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = torch.split(turned, [layer.heads, layer.groups], dim=1)
            q.copy_(layer.q_norm(q))
            k.copy_(layer.k_norm(k))
        turned.copy_(rotate(turned, self._cos, self._sin))
        return heads

    def _draw(self, layer: int, band: _Band, heads_NHE: Tensor) -> Tensor:
        queries = heads_NHE[:, : self._heads]
        if band.rows_B is not None:
            queries = queries.index_select(0, band.rows_B)
        queries = queries.reshape(-1, self._heads // self._groups, self._size)
        keys, values = self._cache.read(layer, band.source)
        if keys.dtype == queries.dtype:
            scores = torch.baddbmm(band.mask, queries, keys.transpose(1, 2))
        else:
            scores = torch.bmm(queries.to(keys.dtype), keys.transpose(1, 2)).float()
            scores.add_(band.mask)
        mixed = torch.bmm(scores.softmax(-1).to(values.dtype), values)
        return mixed.view(-1, self._heads * self._size)

    def _read(self, layer: int, prompts: _Prompts, heads_NHE: Tensor) -> Tensor:
        batch, count = prompts.rows_BT.shape
        whole = batch * count == self._count
        heads = heads_NHE if whole else heads_NHE.index_select(0, prompts.rows_BT.flatten())
        heads = heads.view(batch, count, -1, self._size).transpose(1, 2).to(self._cache.dtype)
        q, k, v = torch.split(heads, [self._heads, self._groups, self._groups], dim=1)
        if prompts.source is not None:
            keys, values = self._cache.read(layer, prompts.source)
            k, v = (each.view(batch, self._groups, -1, self._size) for each in (keys, values))
        q_BGRTE = q.reshape(batch, self._groups, -1, count, self._size)
        mixed = attend(q_BGRTE, k.contiguous(), v.contiguous(), first=prompts.start)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch * count, -1)


def _written_rows(chunks: Sequence[Chunk], cache: KeyValueCache) -> Tensor:
    """Where the keys and values of all rows are stored."""
    size, pages, offsets = cache.page, [], []
    for chunk in chunks:
        own = chunk.continuation.pages
        if chunk.count == 1:
            pages.append(own[chunk.start // size])
            offsets.append(chunk.start % size)
        else:
            positions = np.arange(chunk.start, chunk.start + chunk.count)
            pages += np.array(own)[positions // size].tolist()
            offsets += (positions % size).tolist()
    return cache.rows_of_positions(np.array(pages), np.array(offsets))


def _pages_of(chunk: Chunk, size: int) -> int:
    """Number of pages up to the chunk's end."""
    return -(-(chunk.start + chunk.count) // size)


def _table(chunks: Sequence[Chunk], size: int) -> Array:
    """The pages of each chunk's sequence up to the chunk's end, padded with the page of zeros."""
    counts = [_pages_of(chunk, size) for chunk in chunks]
    table = np.zeros((len(chunks), max(counts)), np.int64)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        table[row, :count] = chunk.continuation.pages[:count]
    return table


def _bands(members: Sequence[tuple[int, Chunk]], size: int) -> list[list[tuple[int, Chunk]]]:
    """Split members, sorted by length, so that little is padded and long sequences are not copied."""
    bands: list[list[tuple[int, Chunk]]] = []
    shortest = inf
    for first, chunk in members:
        pages = chunk.start // size + 1
        alone = pages >= _LONG and are_adjacent(np.array(chunk.continuation.pages[:pages]))
        if not bands or alone or pages > max(4, _BAND * shortest):
            bands.append([])
            shortest = -inf if alone else pages  # a sequence that is read in place has its own band
        bands[-1].append((first, chunk))
    # In the order of the rows, so that a band of all rows needs no index.
    return [sorted(band, key=lambda each: each[0]) for band in bands]
