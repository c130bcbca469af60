"""Draw tokens from logits.

One uniform random number per row picks a token by cumulative probability, which is much cheaper than adding noise to
the whole vocabulary. The cumulative sum has two levels: the sums of blocks select a block, then a sum within that block
selects the token. Tokens are drawn on the CPU, even if the model is on another device.

Shapes: B rows, V vocabulary, K blocks of C tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .processors import Shaping
from .values import Array, SampleJob

__all__ = ["Drawn", "choose", "topk"]

#: Lowest temperature: only the most likely token has a nonzero probability, and dividing by less could overflow.
_COLDEST: Final = 1e-30
#: Tokens per block: C in the shapes.
_BLOCK: Final = 256
#: A sum of probabilities below this is rounded too much to draw from.
_SMALL: Final = 1e-30


class Drawn(NamedTuple):
    """A token of each row, its logprob, and the probability that the filters and the constraint kept.

    The logprob is that of the temperature-scaled distribution before filters and constraint.
    """

    tokens: list[int]
    logprobs: list[float]
    kept_mass: list[float]


@torch.inference_mode()
def choose(
    logits_BV: Tensor,
    jobs: Sequence[SampleJob],
    randoms: Sequence[np.random.Generator],
    shapings: Sequence[Shaping | None] = (),
) -> Drawn:
    """Draw a token for each row. Applies penalties, biases and temperatures to the logits in place."""
    for row, shaping in enumerate(shapings):
        if shaping is not None:
            shaping.adjust(logits_BV[row])
    temperatures = [max(job.temperature, _COLDEST) if job.temperature > 0 else 1.0 for job in jobs]
    if any(temperature != 1 for temperature in temperatures):
        logits_BV.div_(torch.tensor(temperatures)[:, None])
    chances_BV, ends_BK = _chances(logits_BV)
    whole_B = ends_BK[:, -1].copy()
    masked = _Masked.of(logits_BV, chances_BV, ends_BK, shapings)
    vocabulary = logits_BV.shape[1]
    chosen_B, kept_B = np.zeros(len(jobs), np.int64), np.ones(len(jobs))
    greedy = [row for row, job in enumerate(jobs) if job.temperature <= 0]
    if greedy:
        rows_BV = logits_BV if len(greedy) == len(jobs) else logits_BV[greedy]
        chosen_B[greedy] = rows_BV.argmax(-1).numpy()
        for row in masked.rows.intersection(greedy):
            banned_V = torch.from_numpy(~masked.allowed[row])
            chosen_B[row] = int(logits_BV[row].masked_fill(banned_V, -inf).argmax())
    free = []
    for row, job in enumerate(jobs):
        if job.temperature > 0 and (0 < job.top_k < vocabulary or job.top_p < 1 or job.min_p > 0):
            chances_V = chances_BV[row, :vocabulary]
            kept = _kept(chances_V, float(ends_BK[row, -1]), job.top_k, job.top_p, job.min_p)
            if job.kept_mass:
                kept_B[row] = chances_V[kept].sum(dtype=np.float64) / ends_BK[row, -1]
            chosen_B[row] = _of_few(chances_V, kept, randoms[row].random())
        elif job.temperature > 0:
            free.append(row)
    if free:
        fractions = np.array([randoms[row].random() for row in free])
        chosen_B[free] = _by_blocks(chances_BV, ends_BK[free], np.array(free), fractions)
    # Softmax sums in float32, so the probabilities may not add up to one; dividing by their sum corrects that.
    chances_B = chances_BV[np.arange(len(jobs)), chosen_B]
    for row, unmasked_V in masked.unmasked.items():
        chances_B[row] = unmasked_V[chosen_B[row]]
        if jobs[row].kept_mass:
            kept_B[row] *= masked.kept_mass(row)
    with np.errstate(divide="ignore"):
        logprobs_B = np.log(chances_B / whole_B)
    for row in masked.rows.intersection(np.flatnonzero(np.isneginf(logprobs_B)).tolist()):
        # The only tokens that the constraint allows may have probabilities below the smallest float.
        logits_V = logits_BV[row].double()
        logprobs_B[row] = float(logits_V[chosen_B[row]] - logits_V.logsumexp(-1))
    if greedy:
        kept_B[greedy] = np.exp(logprobs_B[greedy])
    return Drawn(chosen_B.tolist(), logprobs_B.astype(np.float32).tolist(), kept_B.tolist())


@dataclass(frozen=True)
class _Masked:
    """Rows with a constraint: while tokens are drawn, their probabilities are those of the allowed tokens alone."""

    rows: frozenset[int]
    allowed: Mapping[int, Array]
    unmasked: Mapping[int, Array]

    @classmethod
    def of(
        cls,
        logits_BV: Tensor,
        chances_BV: Array,
        ends_BK: Array,
        shapings: Sequence[Shaping | None],
    ) -> _Masked:
        masks = {
            row: mask
            for row, shaping in enumerate(shapings)
            if shaping is not None and (mask := shaping.allowed()) is not None
        }
        if not masks:
            return cls(frozenset(), {}, {})
        rows = list(masks)
        allowed_BV = torch.from_numpy(np.stack(list(masks.values())))
        unmasked_BV = chances_BV[rows]
        masked_BV = torch.from_numpy(unmasked_BV.copy())
        masked_BV[:, : allowed_BV.shape[1]].mul_(allowed_BV)
        ends = _ends(masked_BV)
        # The probabilities of the allowed tokens may be too small for float32: then only they are compared.
        small = np.flatnonzero(ends[:, -1] < _SMALL)
        if len(small):
            of_allowed = logits_BV[rows][small].masked_fill(~allowed_BV[small], -inf)
            masked_BV[small] = _padded(of_allowed.softmax(-1))
            ends[small] = _ends(masked_BV[small])
        chances_BV[rows], ends_BK[rows] = masked_BV.numpy(), ends
        return cls(frozenset(rows), masks, dict(zip(rows, unmasked_BV, strict=True)))

    def kept_mass(self, row: int) -> float:
        """The probability of the allowed tokens together."""
        chances_V, mask_V = self.unmasked[row], self.allowed[row]
        kept_V = chances_V[: len(mask_V)][mask_V]
        return float(kept_V.sum(dtype=np.float64) / chances_V.sum(dtype=np.float64))


def topk(logits_NV: Tensor, k: int, normalizers_N1: Tensor) -> tuple[Array, Array]:
    """The k most likely tokens of each row and their logprobs."""
    best = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    logprobs = (best.values - normalizers_N1).float()
    return best.indices.to(torch.int32).numpy(), logprobs.numpy()


def _chances(logits_BV: Tensor) -> tuple[Array, Array]:
    """Probabilities of all tokens, padded to whole blocks, and the cumulative sum at the end of each block."""
    chances_BV = _padded(logits_BV.softmax(-1))
    return chances_BV.numpy(), _ends(chances_BV)


def _padded(chances_BV: Tensor) -> Tensor:
    missing = -chances_BV.shape[1] % _BLOCK
    return functional.pad(chances_BV, (0, missing)) if missing else chances_BV


def _ends(chances_BV: Tensor) -> Array:
    sums_BK = chances_BV.view(len(chances_BV), -1, _BLOCK).sum(-1)
    ends: Array = sums_BK.cumsum(-1, dtype=torch.float64).numpy()
    return ends


def _by_blocks(chances_BV: Array, ends_BK: Array, rows_B: Array, fractions_B: Array) -> Array:
    blocks_B, within_B = _search(ends_BK, fractions_B)
    chances_BKC = chances_BV.reshape(len(chances_BV), -1, _BLOCK)
    ends_BC = chances_BKC[rows_B, blocks_B].cumsum(-1, dtype=np.float64)
    found: Array = blocks_B * _BLOCK + _search(ends_BC, within_B)[0]
    return found


def _of_few(chances_V: Array, tokens: Array, fraction: float) -> int:
    # Vocabulary order, as in `_by_blocks`, so that a seed picks the same token either way.
    tokens = np.sort(tokens)
    ends = chances_V[tokens].cumsum(dtype=np.float64)
    return int(tokens[_search(ends[None], np.array([fraction]))[0][0]])


def _search(ends_BK: Array, fractions_B: Array) -> tuple[Array, Array]:
    """For each row: the index of the piece that contains the fraction of the total, and the fraction within it.

    Never returns an empty piece.
    """
    whole_B = ends_BK[:, -1]
    wanted_B = np.minimum(fractions_B * whole_B, np.nextafter(whole_B, 0))
    found_B = (ends_BK <= wanted_B[:, None]).sum(-1)
    rows_B = np.arange(len(found_B))
    starts_B = np.where(found_B > 0, ends_BK[rows_B, found_B - 1], 0.0)
    return found_B, (wanted_B - starts_B) / (ends_BK[rows_B, found_B] - starts_B)


def _kept(chances_V: Array, whole: float, top_k: int, top_p: float, min_p: float = 0.0) -> Array:
    """The tokens that all filters keep; at least one."""
    tokens = _most_likely(chances_V, whole, top_k, top_p)
    if min_p > 0:
        tokens = tokens[chances_V[tokens] >= np.float32(min_p) * chances_V.max()]
    return tokens


def _most_likely(chances_V: Array, whole: float, top_k: int, top_p: float) -> Array:
    """The k most likely tokens, and of these the smallest set with probability p; at least one token."""
    if 0 < top_k < len(chances_V):
        tokens = _likeliest(chances_V, top_k)
        if top_p >= 1:
            return tokens
        whole = float(chances_V[tokens].sum(dtype=np.float64))
    elif top_p >= 1:
        every: Array = np.arange(len(chances_V))
        return every
    else:
        # All tokens below this probability together hold less than 1 - p, so none of them is in the smallest set.
        # Few tokens remain, and sorting them is much faster than sorting the vocabulary.
        unlikely = (1 - top_p) * whole / (2 * len(chances_V))
        tokens = np.flatnonzero(~(chances_V < unlikely))
        tokens = tokens[np.argsort(-chances_V[tokens])]
    ends = chances_V[tokens].cumsum(dtype=np.float64)
    return tokens[: 1 + int((ends[:-1] < top_p * whole).sum())]


def _likeliest(chances_V: Array, count: int) -> Array:
    """The `count` most likely tokens, most likely first."""
    if count * 64 <= len(chances_V):  # for a small count, torch's topk does not sort everything
        few: Array = torch.from_numpy(chances_V).topk(count).indices.numpy()
        return few
    ordered: Array = np.argsort(-chances_V)[:count]
    return ordered
