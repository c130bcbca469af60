"""Limits on the bytes of request bodies, and of large answers, in memory: per key and in total."""

from __future__ import annotations

from collections import defaultdict

from tinkex.errors import RateLimitError

__all__ = ["ByteBudget", "Hold"]


class ByteBudget:
    """Refuses a body or an answer if those already in memory leave no room for it.

    It refuses instead of waiting: a waiting request keeps its connection and the bytes it has sent, and two requests
    that wait for each other would deadlock. One is always admitted while no other is held, so every size that an
    operation allows can get through.
    """

    def __init__(
        self,
        per_key: int,
        total: int,
        *,
        what: str = "Requests of {whose} that are being read",
        advice: str = "Send fewer large requests at a time",
    ) -> None:
        self._per_key = per_key
        self._total = total
        self._what = what
        self._advice = advice
        self._held_of: defaultdict[str, int] = defaultdict(int)
        self.held = 0

    def hold(self, owner: str) -> Hold:
        """A new, empty hold for one body of `owner`."""
        return Hold(self, owner)

    def check(self, owner: str, size: int, own: int) -> None:
        """Refuse `size` more bytes for a request that already holds `own`, if they exceed a limit."""
        for held, limit, whose, setting in (
            (self._held_of.get(owner, 0), self._per_key, "this key", "max_inflight_bytes_per_key"),
            (self.held, self._total, "all keys", "max_inflight_bytes"),
        ):
            if held > own and held + size > limit:
                raise RateLimitError(
                    f"{self._what.format(whose=whose)} hold {held} bytes; {size} more would exceed the "
                    f"limit of {limit}. {self._advice}; the operator of the service "
                    f"raises the limit with --set {setting}=BYTES.",
                    retry_after=1.0,
                )

    def add(self, owner: str, size: int) -> None:
        """Add `size` bytes to the count; a negative size subtracts."""
        self.held += size
        self._held_of[owner] += size
        if not self._held_of[owner]:
            del self._held_of[owner]


class Hold:
    """The bytes that one request has in memory."""

    __slots__ = ("_budget", "owner", "size")

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self.owner = owner
        self.size = 0

    def check(self, size: int) -> None:
        """Refuse `size` announced bytes if they exceed a limit."""
        self._budget.check(self.owner, size, self.size)

    def take(self, size: int) -> None:
        """Count `size` more bytes, or refuse them if they exceed a limit."""
        self.check(size)
        self._budget.add(self.owner, size)
        self.size += size

    def settle(self, size: int) -> None:
        """Count `size` bytes instead of those so far, without a check: they are in memory already."""
        self._budget.add(self.owner, size - self.size)
        self.size = size

    def release(self) -> None:
        self._budget.add(self.owner, -self.size)
        self.size = 0
