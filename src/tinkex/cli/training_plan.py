"""What a training run will do, decided before it begins: which examples in which step, at which rate.

All of it follows from the settings and the lengths of the examples, so that a run that was broken off goes on as if
it had not been.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

__all__ = ["batches", "evaluations", "held_out", "is_evaluated", "learning_rate"]


def learning_rate(step: int, steps: int, *, peak: float, schedule: str, warmup: int) -> float:
    """The rate of a step, counted from 0: up to the peak in a line, then down by the schedule.

    No step has a rate of zero: that would be a step for nothing.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak * (1 - done) if schedule == "linear" else peak


def held_out(count: int, fraction: float, seed: int) -> set[int]:
    """Which of `count` examples are kept for evaluation; at least one, and never all."""
    if not fraction or count < 2:
        return set()
    number = min(count - 1, max(1, round(count * fraction)))
    return set(_chance(seed, "held out").sample(range(count), number))


def is_evaluated(done: int, steps: int, every: int) -> bool:
    """Whether an evaluation follows so many steps: none of them, all of them, and every so often between."""
    return done in {0, steps} or (every > 0 and done % every == 0)


def evaluations(done: int, steps: int, every: int) -> int:
    """How many evaluations are to come after so many steps; a run that goes on had the one before it."""
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
    """The examples of each step: all of them in a new order each time round.

    With a `token_budget` a step takes as many examples as fit into it, else `batch_size` of them. `steps`, if given,
    says how many there are, whatever `epochs` says.
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
    """Chance that is the same for the same seed, and another for each purpose."""
    return random.Random(f"{seed}, {purpose}")  # noqa: S311 - it shall be foreseen
