"""Draw tokens from logits.

One uniform random number per row picks a token by cumulative probability, which is much cheaper than adding noise to
the whole vocabulary. The cumulative sum has two levels: the sums of blocks select a block, then a sum within that block
selects the token. Tokens are drawn on the CPU, even if the model is on another device.

A sequence with a constraint draws as if it had none. If its constraint does not allow the token, it draws again, from the
allowed tokens alone. A token t with probability p(t) is thus drawn with p(t) + (1 - a) p(t) / a = p(t) / a, where a is the
probability of all allowed tokens: the same as if it had been drawn from them at once, which needs the mask of all tokens.

Shapes: B rows, V vocabulary, K blocks of C tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .grammars import Matcher, allowed_tokens
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
    draw = _Draw(logits_BV, chances_BV, ends_BK[:, -1], jobs, randoms)
    greedy = [row for row, job in enumerate(jobs) if job.temperature <= 0]
    if greedy:
        rows_BV = logits_BV if len(greedy) == len(jobs) else logits_BV[greedy]
        draw.chosen_B[greedy] = rows_BV.argmax(-1).numpy()
    bound = {
        row: shaping.matcher
        for row, shaping in enumerate(shapings)
        if shaping is not None and shaping.matcher is not None
    }
    free = []
    for row, job in enumerate(jobs):
        if job.temperature > 0 and not _filters(job, logits_BV.shape[1]):
            free.append(row)
        elif job.temperature > 0 and row not in bound:
            draw.filtered(row)
    if free:
        fractions = np.array([randoms[row].random() for row in free])
        found = _by_blocks(chances_BV, ends_BK[free], np.array(free), fractions)
        draw.chosen_B[free], draw.again_B[free] = found
    if bound:
        draw.constrained(bound)
    return draw.drawn(bound, greedy)


class _Draw:
    """The tokens of all rows while they are drawn."""

    def __init__(
        self,
        logits_BV: Tensor,
        chances_BV: Array,
        whole_B: Array,
        jobs: Sequence[SampleJob],
        randoms: Sequence[np.random.Generator],
    ) -> None:
        self._logits_BV = logits_BV
        self._chances_BV = chances_BV
        self._whole_B = whole_B
        self._jobs = jobs
        self._randoms = randoms
        self.chosen_B = np.zeros(len(jobs), np.int64)
        self.kept_B = np.ones(len(jobs))
        #: For each row, a random number that does not depend on the token it drew.
        self.again_B = np.zeros(len(jobs))

    def filtered(self, row: int) -> None:
        """Draw from the tokens that top-k, top-p and min-p keep."""
        job, chances_V = self._jobs[row], self._chances_BV[row, : self._logits_BV.shape[1]]
        kept = _kept(chances_V, float(self._whole_B[row]), job.top_k, job.top_p, job.min_p)
        if job.kept_mass:
            self.kept_B[row] = chances_V[kept].sum(dtype=np.float64) / self._whole_B[row]
        self.chosen_B[row] = _of_few(chances_V, kept, self._randoms[row].random())

    def constrained(self, bound: Mapping[int, Matcher]) -> None:
        """Replace tokens that constraints do not allow. Filters apply to the allowed tokens."""
        masked = [row for row, matcher in bound.items() if self._needs_mask(row, matcher)]
        if not masked:
            return
        for row, tokens in zip(masked, allowed_tokens([bound[row] for row in masked]), strict=True):
            self._of_allowed(row, tokens)

    def _needs_mask(self, row: int, matcher: Matcher) -> bool:
        job = self._jobs[row]
        if job.temperature > 0 and (job.kept_mass or _filters(job, self._logits_BV.shape[1])):
            return True
        return not matcher.accepts(int(self.chosen_B[row]))

    def _of_allowed(self, row: int, tokens: Array) -> None:
        job = self._jobs[row]
        if job.temperature <= 0:
            self.chosen_B[row] = tokens[int(self._logits_BV[row][tokens].argmax())]
            return
        chances = self._chances_BV[row][tokens]
        ends = chances.cumsum(dtype=np.float64)
        share = ends[-1] / self._whole_B[row]
        if ends[-1] < _SMALL:  # too small for float32: only the allowed tokens are compared
            chances = self._logits_BV[row][tokens].softmax(-1).numpy()
            ends = chances.cumsum(dtype=np.float64)
        if _filters(job, self._logits_BV.shape[1]):
            kept = _kept(chances, float(ends[-1]), job.top_k, job.top_p, job.min_p)
            self.kept_B[row] = share * chances[kept].sum(dtype=np.float64) / ends[-1]
            self.chosen_B[row] = tokens[_of_few(chances, kept, self._randoms[row].random())]
            return
        self.kept_B[row] = share
        place = tokens.searchsorted(self.chosen_B[row])
        if place == len(tokens) or tokens[place] != self.chosen_B[row]:
            self.chosen_B[row] = tokens[_place(ends, self.again_B[row])]

    def drawn(self, bound: Collection[int], greedy: Sequence[int]) -> Drawn:
        # Softmax sums in float32, so the probabilities may not add up to one; dividing by their sum corrects that.
        chances_B = self._chances_BV[np.arange(len(self._jobs)), self.chosen_B]
        with np.errstate(divide="ignore"):
            logprobs_B = np.log(chances_B / self._whole_B)
        for row in bound:
            if np.isneginf(logprobs_B[row]):
                # The only tokens that the constraint allows may have probabilities below the smallest float.
                logits_V = self._logits_BV[row].double()
                logprobs_B[row] = float(logits_V[self.chosen_B[row]] - logits_V.logsumexp(-1))
        if greedy:
            self.kept_B[greedy] = np.exp(logprobs_B[greedy])
        logprobs = logprobs_B.astype(np.float32).tolist()
        return Drawn(self.chosen_B.tolist(), logprobs, self.kept_B.tolist())


def _filters(job: SampleJob, vocabulary: int) -> bool:
    return 0 < job.top_k < vocabulary or job.top_p < 1 or job.min_p > 0


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


def _by_blocks(
    chances_BV: Array, ends_BK: Array, rows_B: Array, fractions_B: Array
) -> tuple[Array, Array]:
    """The token at each fraction of the total probability, and the fraction within that token."""
    blocks_B, within_B = _search(ends_BK, fractions_B)
    chances_BKC = chances_BV.reshape(len(chances_BV), -1, _BLOCK)
    ends_BC = chances_BKC[rows_B, blocks_B].cumsum(-1, dtype=np.float64)
    places_B, within_B = _search(ends_BC, within_B)
    return blocks_B * _BLOCK + places_B, within_B


def _of_few(chances_V: Array, tokens: Array, fraction: float) -> int:
    # Vocabulary order, as in `_by_blocks`, so that a seed picks the same token either way.
    tokens = np.sort(tokens)
    return int(tokens[_place(chances_V[tokens].cumsum(dtype=np.float64), fraction)])


def _place(ends: Array, fraction: float) -> int:
    """The index of the piece that contains a fraction of the total; never an empty piece."""
    wanted = min(fraction * ends[-1], np.nextafter(ends[-1], 0))
    return min(int(ends.searchsorted(wanted, side="right")), len(ends) - 1)  # the last if NaN


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
        tokens = tokens[np.argsort(-chances_V[tokens], kind="stable")]
    ends = chances_V[tokens].cumsum(dtype=np.float64)
    return tokens[: 1 + int((ends[:-1] < top_p * whole).sum())]


def _likeliest(chances_V: Array, count: int) -> Array:
    """The `count` most likely tokens, most likely first; of equally likely ones the first in the vocabulary."""
    likely = np.arange(len(chances_V))
    if count * 64 <= len(chances_V):  # for a small count, torch's topk does not sort everything
        least = float(torch.from_numpy(chances_V).topk(count).values[-1])
        # Impossible tokens are left out, or a constraint that allows few would let all others be sorted.
        likely = np.flatnonzero(~(chances_V < least)) if least else np.flatnonzero(chances_V)
    ordered: Array = likely[np.argsort(-chances_V[likely], kind="stable")][:count]
    return ordered
