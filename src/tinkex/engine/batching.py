"""Cutting a request into micro-batches: pure bookkeeping on lengths.

Examples are sorted by length so that padding is small, and grouped up to a budget of padded tokens so that
memory is bounded. The result depends on the request alone, never on what else the service is doing: that is
what makes a replay give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["micro_batches"]


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Groups of indices; a group's longest length times its size stays within the budget.

    A single example over the budget is a group of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    group: list[int] = []
    for index in order:
        longest = lengths[group[0]] if group else lengths[index]
        if group and longest * (len(group) + 1) > token_budget:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
