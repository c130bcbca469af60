"""Drawing tokens from logits.

One uniform number picks a token by the cumulative chances of its row; far cheaper than noise over the whole
vocabulary. Nor is a cumulative sum over the whole vocabulary needed: first a block of it is found by the sums of all
blocks, then the token within that block. Tokens are drawn on the CPU, wherever the model is.

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

#: Below this temperature only the likeliest token has a chance, and logits divided by it would overflow.
_COLDEST: Final = 1e-30
#: The C of the shapes.
_BLOCK: Final = 256


@torch.inference_mode()
def choose(
    logits_BV: Tensor, jobs: Sequence[SampleJob], randoms: Sequence[np.random.Generator]
) -> tuple[list[int], list[float]]:
    """A token for each row, and its logprob; both by the distribution at the job's temperature.

    The logits are divided by the temperatures in place.
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
    # The kernel of softmax adds many small numbers up in float32; dividing by the sum once more makes up for it.
    logprobs_B = np.log(chances_BV[np.arange(len(jobs)), chosen_B] / ends_BK[:, -1])
    return chosen_B.tolist(), logprobs_B.astype(np.float32).tolist()


def topk(logits_NV: Tensor, k: int, normalizers_N1: Tensor) -> tuple[Array, Array]:
    """The likeliest tokens of each row and their logprobs."""
    best = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    logprobs = (best.values - normalizers_N1).float()
    return best.indices.to(torch.int32).numpy(), logprobs.numpy()


def _chances(logits_BV: Tensor) -> tuple[Array, Array]:
    """The chances of all tokens, in whole blocks, and what the blocks have come to at the end of each."""
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
    tokens = np.sort(tokens)  # the order of the vocabulary, as everywhere: a seed means the same
    ends = chances_V[tokens].cumsum(dtype=np.float64)
    return int(tokens[_search(ends[None], np.array([fraction]))[0][0]])


def _search(ends_BK: Array, fractions_B: Array) -> tuple[Array, Array]:
    """In each row the piece that the fraction of the whole falls into, and the fraction of that piece.

    A piece of no size is never found.
    """
    whole_B = ends_BK[:, -1]
    wanted_B = np.minimum(fractions_B * whole_B, np.nextafter(whole_B, 0))
    found_B = (ends_BK <= wanted_B[:, None]).sum(-1)
    rows_B = np.arange(len(found_B))
    starts_B = np.where(found_B > 0, ends_BK[rows_B, found_B - 1], 0.0)
    return found_B, (wanted_B - starts_B) / (ends_BK[rows_B, found_B] - starts_B)


def _kept(chances_V: Array, whole: float, top_k: int, top_p: float) -> Array:
    """Only the k likeliest, and of those only the fewest that make up p; at least one."""
    if 0 < top_k < len(chances_V):
        tokens = _likeliest(chances_V, top_k)
        if top_p >= 1:
            return tokens
        whole = float(chances_V[tokens].sum(dtype=np.float64))
    else:
        # What is so unlikely that all of it together may be left out is never among the fewest. Few tokens are
        # not, and sorting those is much quicker than sorting all.
        unlikely = (1 - top_p) * whole / (2 * len(chances_V))
        tokens = np.flatnonzero(~(chances_V < unlikely))
        tokens = tokens[np.argsort(-chances_V[tokens])]
    ends = chances_V[tokens].cumsum(dtype=np.float64)
    return tokens[: 1 + int((ends[:-1] < top_p * whole).sum())]


def _likeliest(chances_V: Array, count: int) -> Array:
    """So many tokens, the likeliest first."""
    if count * 64 <= len(chances_V):  # then torch does not sort them all either
        few: Array = torch.from_numpy(chances_V).topk(count).indices.numpy()
        return few
    ordered: Array = np.argsort(-chances_V)[:count]
    return ordered
