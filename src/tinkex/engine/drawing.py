"""Draw tokens from logits.

One uniform random number per row picks a token by cumulative probability, which is much cheaper than adding noise to
the whole vocabulary. The cumulative sum has two levels: the sums of blocks select a block, then a sum within that block
selects the token. Tokens are drawn on the CPU, even if the model is on another device.

Shapes: B rows, V vocabulary, K blocks of C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .values import Array, SampleJob

__all__ = ["choose", "topk"]

#: Lowest temperature: only the most likely token has a nonzero probability, and dividing by less could overflow.
_COLDEST: Final = 1e-30
#: Tokens per block: C in the shapes.
_BLOCK: Final = 256


@torch.inference_mode()
def choose(
    logits_BV: Tensor, jobs: Sequence[SampleJob], randoms: Sequence[np.random.Generator]
) -> tuple[list[int], list[float]]:
    """Draw a token for each row; its logprob is that of the temperature-scaled distribution.

    Divides the logits by the temperatures in place.
    """
    temperatures = [max(job.temperature, _COLDEST) if job.temperature > 0 else 1.0 for job in jobs]
    if any(temperature != 1 for temperature in temperatures):
        logits_BV.div_(torch.tensor(temperatures)[:, None])
    chances_BV, ends_BK = _chances(logits_BV)
    vocabulary = logits_BV.shape[1]
    chosen_B = np.zeros(len(jobs), np.int64)
    greedy = [row for row, job in enumerate(jobs) if job.temperature <= 0]
    if greedy:
        rows_BV = logits_BV if len(greedy) == len(jobs) else logits_BV[greedy]
        chosen_B[greedy] = rows_BV.argmax(-1).numpy()
    free = []
    for row, job in enumerate(jobs):
        if job.temperature > 0 and (0 < job.top_k < vocabulary or job.top_p < 1):
            chances_V = chances_BV[row, :vocabulary]
            kept = _kept(chances_V, float(ends_BK[row, -1]), job.top_k, job.top_p)
            chosen_B[row] = _of_few(chances_V, kept, randoms[row].random())
        elif job.temperature > 0:
            free.append(row)
    if free:
        fractions = np.array([randoms[row].random() for row in free])
        chosen_B[free] = _by_blocks(chances_BV, ends_BK[free], np.array(free), fractions)
    # Softmax sums in float32, so the probabilities may not add up to one; dividing by their sum corrects that.
    logprobs_B = np.log(chances_BV[np.arange(len(jobs)), chosen_B] / ends_BK[:, -1])
    return chosen_B.tolist(), logprobs_B.astype(np.float32).tolist()


def topk(logits_NV: Tensor, k: int, normalizers_N1: Tensor) -> tuple[Array, Array]:
    """The k most likely tokens of each row and their logprobs."""
    best = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    logprobs = (best.values - normalizers_N1).float()
    return best.indices.to(torch.int32).numpy(), logprobs.numpy()


def _chances(logits_BV: Tensor) -> tuple[Array, Array]:
    """Probabilities of all tokens, padded to whole blocks, and the cumulative sum at the end of each block."""
    chances_BV = logits_BV.softmax(-1)
    missing = -chances_BV.shape[1] % _BLOCK
    if missing:
        chances_BV = functional.pad(chances_BV, (0, missing))
    sums_BK = chances_BV.view(len(chances_BV), -1, _BLOCK).sum(-1)
    return chances_BV.numpy(), sums_BK.cumsum(-1, dtype=torch.float64).numpy()


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


def _kept(chances_V: Array, whole: float, top_k: int, top_p: float) -> Array:
    """The k most likely tokens, and of these the smallest set with probability p; at least one token."""
    if 0 < top_k < len(chances_V):
        tokens = _likeliest(chances_V, top_k)
        if top_p >= 1:
            return tokens
        whole = float(chances_V[tokens].sum(dtype=np.float64))
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
