"""Keys and values of all layers, in pages.

Sequences of different users share a batch, and the values of one may be NaN. So a page is cleared before it is reused:
a masked position still takes part in the arithmetic, and 0 · NaN is NaN. Page 0 is always zero.

Shapes: N rows, B sequences, P pages of S positions, G key-value heads, E head size, C pages per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .values import Array

__all__ = ["KeyValueCache", "Source", "are_adjacent"]

#: The cache grows by at least this factor, because growing copies it.
_GROWTH: Final = 1.5


@dataclass(frozen=True)
class Source:
    """Where keys and values of B sequences are: in adjacent pages, or in pages to be gathered."""

    first: int
    count: int
    rows: Tensor | None = None
    scratch: Tensor | None = None


class KeyValueCache:
    """One tensor per layer, 2 × G × P × S × E: keys, then values.

    Adjacent pages of a head are adjacent in memory, so a sequence in such pages is read without copying.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        size: int,
        page: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page = page
        self.dtype = dtype
        self._heads, self._size, self._device = heads, size, device
        self._layers = [self._zeros(0)] * layers

    def _zeros(self, pages: int) -> Tensor:
        shape = (2, self._heads, pages, self.page, self._size)
        return torch.zeros(shape, dtype=self.dtype, device=self._device)

    @property
    def page_bytes(self) -> int:
        numbers = 2 * self._heads * self.page * self._size
        return len(self._layers) * numbers * self.dtype.itemsize

    @property
    def capacity(self) -> int:
        """Pages in memory, page 0 included."""
        return self._layers[0].shape[2]

    def release(self) -> None:
        self._layers = [self._zeros(0)] * len(self._layers)

    @torch.inference_mode()
    def prepare(self, fresh: Sequence[int]) -> None:
        """Clear pages that were just given out, and make room for them."""
        if not fresh:
            return
        before = self.capacity
        if max(fresh) >= before:
            wanted = max(max(fresh) + 1, int(before * _GROWTH))
            for index, old in enumerate(
                self._layers
            ):  # one layer at a time, to need little more memory
                grown = self._zeros(wanted)
                grown[:, :, :before] = old
                self._layers[index] = grown
        used_before = [page for page in fresh if page < before]
        if used_before:
            where = torch.tensor(used_before, device=self._device)
            for layer in self._layers:
                layer.index_fill_(2, where, 0)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        self.prepare([target])
        for layer in self._layers:
            layer[:, :, target] = layer[:, :, source]

    # -- places in the layers' tensors, the same for all layers ------------------------------

    def rows_of_positions(self, pages_N: Array, offsets_N: Array) -> Tensor:
        """Where `write` puts keys and values of positions, given by page and offset in the page."""
        heads = np.arange(2 * self._heads) * self.capacity
        rows = (pages_N[:, None] + heads) * self.page + offsets_N[:, None]
        return torch.from_numpy(rows.reshape(-1)).to(self._device)

    def source(self, pages_BC: Array) -> Source:
        """Where `read` finds keys and values of sequences, given by their pages."""
        count, pages = pages_BC.shape
        if count == 1 and are_adjacent(pages_BC[0]):
            return Source(int(pages_BC[0, 0]), pages)
        heads_2G = np.arange(2 * self._heads).reshape(2, 1, self._heads, 1) * self.capacity
        rows = torch.from_numpy((pages_BC[None, :, None, :] + heads_2G).reshape(-1))
        shape = (2, count * self._heads, pages * self.page, self._size)
        scratch = torch.empty(shape, dtype=self.dtype, device=self._device)
        return Source(0, pages, rows.to(self._device), scratch)

    def write(self, layer: int, rows: Tensor, heads_N2GE: Tensor) -> None:
        flat = self._layers[layer].view(-1, self._size)
        flat.index_copy_(0, rows, heads_N2GE.reshape(-1, self._size).to(self.dtype))

    def whole(self, layer: int) -> Tensor:
        """Keys and values of all pages, 2 × G × P × S × E."""
        return self._layers[layer]

    def read(self, layer: int, source: Source) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences, each B·G × T × E."""
        whole = self._layers[layer]
        if source.rows is None or source.scratch is None:
            found = whole[:, :, source.first : source.first + source.count].flatten(2, 3)
        else:
            flat = whole.view(-1, self.page * self._size)
            torch.index_select(flat, 0, source.rows, out=source.scratch.view(len(source.rows), -1))
            found = source.scratch
        keys, values = found.unbind(0)
        return keys, values


def are_adjacent(pages: Array) -> bool:
    return int(pages[-1] - pages[0]) == len(pages) - 1 and bool((np.diff(pages) == 1).all())
