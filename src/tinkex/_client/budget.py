"""Limits on requests and bytes in flight. Used only on the runtime's event loop, so no locks are needed."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from types import TracebackType
from typing import Final, Self
from weakref import WeakValueDictionary

from tinkex._retry import Clock
from tinkex.config import Config

__all__ = ["Budget", "Lease", "SampleBudget", "backoff_after_429", "sample_budget", "slots"]


class Budget:
    """A balance that may go negative.

    `take` waits only while the balance is below zero and then takes the whole cost. So a request larger than the
    budget still passes, and the cap can be exceeded by one request, never by two. Waiters are served in order (FIFO).
    """

    __slots__ = ("_balance", "_waiters", "size")

    def __init__(self, size: float) -> None:
        self.size = size
        self._balance = size
        self._waiters: deque[tuple[asyncio.Future[None], float]] = deque()

    @property
    def balance(self) -> float:
        return self._balance

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def try_take(self, cost: float) -> bool:
        """Take without waiting. Returns False if the caller would have to wait."""
        if self._balance < 0 or self._waiters:
            return False
        self._balance -= cost
        return True

    async def take(self, cost: float) -> None:
        if self.try_take(cost):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, cost)
        self._waiters.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(cost)  # granted, but cancelled before it resumed
            elif entry in self._waiters:  # `_serve` may have removed it already
                self._waiters.remove(entry)
            raise

    def give_back(self, cost: float) -> None:
        self._balance += cost
        if self._waiters:
            self._serve()

    def _serve(self) -> None:
        while self._waiters and self._balance >= 0:
            turn, cost = self._waiters.popleft()
            if not turn.cancelled():
                self._balance -= cost
                turn.set_result(None)


def slots(count: int) -> Budget:
    """A budget of `count` slots: taking the last one makes the balance negative."""
    return Budget(count - 1)


class Lease:
    """The shares of several budgets that one request holds. Leaving the block returns them."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[tuple[Budget, float]] = []

    async def take(self, budget: Budget, cost: float = 1) -> None:
        if not budget.try_take(cost):
            await budget.take(cost)
        self._held.append((budget, cost))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._held:
            budget, cost = self._held.pop()
            budget.give_back(cost)


#: Seconds after the end of a backoff during which dispatch stays throttled.
RECENT = 10.0
#: Cost of each byte while dispatch is throttled.
PENALTY = 20
_LARGE = 128 * 1024


def backoff_after_429(estimated_bytes: int) -> float:
    """Seconds without dispatch after a 429."""
    return 1.0 if estimated_bytes <= _LARGE else 5.0


class SampleBudget:
    """Limits how many samples, and how many of their bytes, are being submitted to the service at once.

    A request holds its share until the service has accepted it, not until the result is there. After a 429 no sample
    is sent until the backoff ends. For the next 10 s only a few are sent at once, and each byte costs 20 times as
    much. Then the normal limits apply again.
    """

    def __init__(
        self, clock: Clock, *, count: int = 400, throttled: int = 10, size: int = 5 << 20
    ) -> None:
        self._clock = clock
        self._count = slots(count)
        self._throttled = slots(throttled)
        self._bytes = Budget(size)
        self._backoff_until = float("-inf")

    def back_off(self, seconds: float) -> None:
        self._backoff_until = max(self._backoff_until, self._clock.monotonic() + seconds)

    @property
    def backing_off(self) -> float:
        """Seconds until the backoff ends."""
        return max(0.0, self._backoff_until - self._clock.monotonic())

    @property
    def recently_backed_off(self) -> bool:
        return self._clock.monotonic() - self._backoff_until < RECENT

    async def lease(self, estimated_bytes: int) -> Lease:
        """Wait for room. The caller closes the lease once the service has accepted the request."""
        lease = Lease()
        try:
            await lease.take(self._count)
            if self.recently_backed_off:
                await lease.take(self._throttled)
            cost = estimated_bytes * (PENALTY if self.recently_backed_off else 1)
            await lease.take(self._bytes, cost)
            while self.backing_off > 0:
                await self._clock.sleep(self.backing_off)
        except BaseException:
            lease.__exit__(None, None, None)
            raise
        return lease


#: Budgets that clients share, by process, address and API key. The process id is in the key because a forked child has
#: its own event loop.
_shared: Final[WeakValueDictionary[tuple[int, str, str | None], SampleBudget]] = (
    WeakValueDictionary()
)


def sample_budget(config: Config, clock: Clock, size: int) -> SampleBudget:
    """The sample limits of one client or, with `shared_limits`, of all clients that share them.

    `size` is the service's limit in bytes. The first of the sharing clients sets the sizes for all.
    """
    made = SampleBudget(
        clock,
        count=config.dispatch_concurrency,
        throttled=config.throttled_dispatch_concurrency,
        size=config.dispatch_byte_budget or size,
    )
    if not config.shared_limits:
        return made
    return _shared.setdefault((os.getpid(), config.normalized_base_url, config.api_key), made)
