"""Split a request into micro-batches; works on lengths only.

Examples are sorted by length to keep padding small, and grouped up to a budget of padded tokens to bound memory.
The result depends only on the request, not on the load of the service, so a replay gives bit-identical results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["micro_batches"]


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Yield groups of indices; the longest length in a group times the group's size is within the budget.

    An example that alone exceeds the budget gets its own group.
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
