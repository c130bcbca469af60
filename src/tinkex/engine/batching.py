"""Split a request into micro-batches; works on lengths only.

Examples are sorted by length, so that those of equal length stand together, and grouped up to a budget of tokens to
bound memory. The result depends only on the request, not on the load of the service, so a replay gives bit-identical
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["micro_batches"]

#: Llama models have no padding. Other families are padded to the longest example, up to this many times the budget.
_PADDED: Final = 2


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Yield groups of indices; the tokens of a group are within the budget.

    An example that alone exceeds the budget gets its own group.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    group: list[int] = []
    tokens = 0
    for index in order:
        tokens += lengths[index]
        padded = lengths[group[0]] * (len(group) + 1) if group else 0
        if group and (tokens > token_budget or padded > _PADDED * token_budget):
            yield group
            group, tokens = [], lengths[index]
        group.append(index)
    if group:
        yield group
