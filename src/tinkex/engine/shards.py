"""Virtual shards: one pass, divided so that several engines can compute it and end in the same bits.

A pass is a list of micro-batches, and consecutive micro-batches form a shard. The number of shards is a property of the
request, not of the number of engines. Each shard's gradients are summed on their own, and shard sums are added in one
fixed order: that of a binary tree over the shards. An engine that computed a whole branch of the tree sends one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from .batching import micro_batches
from .values import Array, Example

__all__ = ["Block", "Shard", "ShardSums", "add_in_order", "divide"]

T = TypeVar("T")

#: Most shards of one pass.
MAX_SHARDS: Final = 8
#: Fewest tokens of a shard on average.
SHARD_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive micro-batches of a pass, each a list of example indices, and their tokens."""

    batches: Sequence[Sequence[int]]
    tokens: int


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """The sum of `size` consecutive shards from `start`: a whole branch of the tree, so `size` divides `start`."""

    start: int
    size: int
    total: T


@dataclass(slots=True)
class ShardSums(Generic[T]):
    """What one engine computed of a pass: losses by shard, logprobs by example, gradients by block."""

    losses: dict[int, float] = field(default_factory=dict)
    logprobs: dict[int, Array] = field(default_factory=dict)
    blocks: list[Block[T]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, number: int, total: T, add: Callable[[T, T], T]) -> None:
        """Add the gradients of a shard; shards come in rising order."""
        _push(self.blocks, Block(number, 1, total), add)


def divide(examples: Sequence[Example], token_budget: int) -> list[Shard]:
    """The shards of a pass; depends on the lengths of its examples alone."""
    batches = list(_batches(examples, token_budget))
    costs = [sum(examples[index].length for index in batch) for batch in batches]
    total = sum(costs)
    count = max(1, min(MAX_SHARDS, len(batches), total // SHARD_TOKENS))
    shards: list[Shard] = []
    first = passed = 0
    for number in range(1, count + 1):
        end, tokens = first, 0
        # Take at least one batch, and leave one for each shard to come.
        while end < len(batches) - (count - number) and (
            end == first or 2 * (passed + tokens) + costs[end] <= 2 * total * number // count
        ):
            tokens += costs[end]
            end += 1
        shards.append(Shard(batches[first:end], tokens))
        first, passed = end, passed + tokens
    return shards


def _batches(examples: Sequence[Example], token_budget: int) -> Iterable[list[int]]:
    """Yield micro-batches; all examples of one have the same number of targets per position."""
    by_width: dict[tuple[int, ...], list[int]] = {}
    for index, example in enumerate(examples):
        by_width.setdefault(example.inputs["target_tokens"].shape[1:], []).append(index)
    for members in by_width.values():
        for group in micro_batches([examples[index].length for index in members], token_budget):
            yield [members[position] for position in group]


def add_in_order(blocks: Iterable[Block[T]], add: Callable[[T, T], T]) -> T:
    """The sum over all shards of a pass; its order of additions does not depend on how shards were grouped."""
    stack: list[Block[T]] = []
    for block in sorted(blocks, key=lambda block: block.start):
        _push(stack, block, add)
    total = stack.pop().total
    while stack:
        total = add(stack.pop().total, total)
    return total


def _push(stack: list[Block[T]], block: Block[T], add: Callable[[T, T], T]) -> None:
    while stack:
        left = stack[-1]
        adjacent = left.size == block.size and left.start + left.size == block.start
        if not adjacent or left.start % (2 * left.size):
            break
        stack.pop()
        block = Block(left.start, 2 * left.size, add(left.total, block.total))
    stack.append(block)
