"""Where work goes in a pool of engines; pure decisions on counts.

All costs are in tokens: the sampled tokens that an engine could draw in the same time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from tinkex.engine.interface import IN_LINE, Spot
from tinkex.engine.shards import Shard
from tinkex.engine.values import Array, SampleJob

__all__ = [
    "BLOCK",
    "RECENT",
    "Line",
    "Load",
    "Prefixes",
    "assign",
    "block_keys",
    "find_spot",
    "new_tokens",
    "sampling_cost",
]

#: Prompt tokens that are compared at a time.
BLOCK: Final = 64
#: Cost of reading one prompt token, in sampled tokens: prompts are read many tokens at a time.
READING: Final = 0.2
#: Cost of opening an adapter on an engine that does not have it.
OPENING: Final = 64.0
#: New tokens that a job without `max_tokens` counts for.
USUAL_TOKENS: Final = 256
#: An engine that also trains samples for half of the time.
BESIDE_TRAINING: Final = 2.0
#: Fewest tokens of a pass for each engine that works on it, also the smallest shard. Two engines with 512 tokens each
#: take 1 / 1.94 of the time of one (SmolLM2-135M, rank 8, one thread each; benchmarks/pool.py measures it).
TOKENS_PER_ENGINE: Final = 512
#: A model moves only if it would otherwise wait this many times as long as the move takes.
MOVES_PAY: Final = 2.0
#: A key that is behind by the seconds of this many requests may take a place on an engine that other keys use.
BEHIND: Final = 3.0
#: Weight of the newest request in the average duration of a queue's requests.
RECENT: Final = 0.2


class Prefixes:
    """The prompt blocks that an engine has read lately."""

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many tokens of a prompt, from its start, the engine has read before."""
        count = 0
        while count < len(keys) and keys[count] in self._known:
            count += 1
        return count * BLOCK

    def add(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # so that the end of a prompt is evicted before its start
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()


def block_keys(adapter: str, prompt: Array) -> list[bytes]:
    """A key for each whole block of a prompt; it depends on the adapter and on all tokens up to the block's end."""
    running = hashlib.blake2b(adapter.encode(), digest_size=16)
    keys = []
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        running.update(prompt[start : start + BLOCK].tobytes())
        keys.append(running.digest())
    return keys


@dataclass
class Line:
    """The requests that an engine runs one after another."""

    length: int = 0
    #: Seconds that a request usually takes.
    usual: float = 0.0
    _freed_at: float = -inf

    def join(self) -> None:
        self.length += 1

    def leave(self, joined_at: float, now: float) -> float:
        """Remove a request that joined at `joined_at`; return the seconds that the engine worked on it, without the wait."""
        self.length -= 1
        worked = now - max(joined_at, self._freed_at)
        self._freed_at = now
        self.usual += (worked - self.usual) * RECENT if self.usual else worked
        return worked


@dataclass
class Load:
    """The work of one engine: the models it holds, training requests in its queue, tokens to sample."""

    models: int = 0
    line: Line = field(default_factory=Line)
    tokens: float = 0.0
    prefixes: Prefixes = field(default_factory=Prefixes)

    @property
    def in_line(self) -> int:
        return self.line.length

    def wait(self) -> float:
        """How long a new sample would share the engine with others."""
        return self.tokens * (BESIDE_TRAINING if self.in_line else 1.0)


def sampling_cost(load: Load, job: SampleJob, keys: Sequence[bytes], *, has_adapter: bool) -> float:
    """The cost of a job on one engine: the work before it, and its own."""
    unread = len(job.prompt_T) - load.prefixes.longest(keys)
    own = READING * unread + (0.0 if has_adapter else OPENING)
    return load.wait() + own * (BESIDE_TRAINING if load.in_line else 1.0)


def new_tokens(job: SampleJob) -> float:
    """The tokens that a job adds to the load of its engine."""
    drawn = USUAL_TOKENS if job.max_tokens is None else job.max_tokens
    return drawn * job.num_samples + READING * len(job.prompt_T)


def find_spot(
    home: tuple[str, Load], elsewhere: tuple[str, Load] | None, moving: float
) -> Spot | None:
    """Where a model runs next: at home, on another engine with a shorter queue, or nowhere yet.

    `elsewhere` is the engine with the shortest queue that it could move to, `moving` the seconds that a move takes.
    """
    line = home[1].line
    if line.length < IN_LINE:
        return Spot(home[0])
    if elsewhere is None or elsewhere[1].in_line >= IN_LINE:
        return None
    if line.length * line.usual < MOVES_PAY * moving:
        return None
    idle = not elsewhere[1].in_line
    return Spot(elsewhere[0], moves=True, idle=idle, price=BEHIND * (line.usual + moving))


def assign(shards: Sequence[Shard], engines: int) -> list[list[int]]:
    """Divide the shards of a pass between at most `engines` engines, in order and by tokens; the first gets most.

    A small pass is not divided.
    """
    total = sum(shard.tokens for shard in shards)
    count = max(1, min(engines, len(shards), total // TOKENS_PER_ENGINE))
    parts: list[list[int]] = [[] for _ in range(count)]
    passed = 0
    for number, shard in enumerate(shards):
        # By the middle of the shard, rounded so that a shard on the border goes to the earlier engine.
        middle = passed + shard.tokens / 2
        parts[min(count - 1, int(middle * count / total - 1e-9))].append(number)
        passed += shard.tokens
    return [part for part in parts if part]
