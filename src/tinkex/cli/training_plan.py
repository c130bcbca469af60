"""The plan of a training run: the examples and the learning rate of each step.

The plan depends only on the settings and the lengths of the examples, so a resumed run continues with the same plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

__all__ = ["batches", "evaluations", "held_out", "is_evaluated", "learning_rate"]


def learning_rate(step: int, steps: int, *, peak: float, schedule: str, warmup: int) -> float:
    """The learning rate of a step, counted from 0: a linear warmup to the peak, then the schedule.

    No step has a rate of zero, as it would have no effect.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak * (1 - done) if schedule == "linear" else peak


def held_out(count: int, fraction: float, seed: int) -> set[int]:
    """The indices of held-out examples: at least one and never all, or none if `fraction` is 0 or `count` is 1."""
    if not fraction or count < 2:
        return set()
    number = min(count - 1, max(1, round(count * fraction)))
    return set(_chance(seed, "held out").sample(range(count), number))


def is_evaluated(done: int, steps: int, every: int) -> bool:
    """Whether an evaluation follows after `done` steps: at the start, at the end, and each `every` steps."""
    return done in {0, steps} or (every > 0 and done % every == 0)


def evaluations(done: int, steps: int, every: int) -> int:
    """How many evaluations follow after `done` steps; a resumed run already has that of its checkpoint."""
    first = done + 1 if done else 0
    return sum(is_evaluated(step, steps, every) for step in range(first, steps + 1))


def batches(
    lengths: Sequence[int],
    *,
    seed: int,
    batch_size: int,
    token_budget: int | None,
    epochs: int,
    steps: int | None,
) -> list[list[int]]:
    """The examples of each step, in a new order in each epoch.

    With a `token_budget` a step takes as many examples as fit into it, otherwise `batch_size`. `steps`, if given,
    replaces `epochs`.
    """
    planned: list[list[int]] = []
    epoch = 0
    while (epoch < epochs) if steps is None else (len(planned) < steps):
        order = list(range(len(lengths)))
        _chance(seed, f"epoch {epoch}").shuffle(order)
        if token_budget is None:
            planned += [
                order[start : start + batch_size] for start in range(0, len(order), batch_size)
            ]
        else:
            planned += _filled(order, lengths, token_budget)
        epoch += 1
    return planned if steps is None else planned[:steps]


def _filled(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    batch: list[int] = []
    taken = 0
    for index in order:
        if batch and taken + lengths[index] > budget:
            yield batch
            batch, taken = [], 0
        batch.append(index)
        taken += lengths[index]
    yield batch


def _chance(seed: int, purpose: str) -> random.Random:
    """A random generator that depends on the seed and the purpose only."""
    return random.Random(f"{seed}, {purpose}")  # noqa: S311 - must be reproducible, not secret
