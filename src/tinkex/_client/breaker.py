"""A circuit breaker: once too many requests in a row have failed, none is sent for a while.

| state       | requests                                      | becomes                                        |
|-------------|-----------------------------------------------|------------------------------------------------|
| `closed`    | are sent                                      | open, after `failure_threshold` failures in a row |
| `open`      | are refused with `CircuitOpenError`           | half open, after `reset_timeout` seconds       |
| `half_open` | `half_open_max_calls` are sent, others refused | closed by a success, open by a failure        |

Used on the runtime's loop only, so failures that come together are all counted without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol, TypeVar

from tinkex.config import CircuitBreaker
from tinkex.errors import APIConnectionError, CircuitOpenError

from .retry import Clock

__all__ = ["Circuit", "Circuits", "State"]

State = Literal["closed", "open", "half_open"]


class _Answer(Protocol):
    @property
    def status(self) -> int: ...


A = TypeVar("A", bound=_Answer)


class Circuit:
    """What is known of requests of one kind."""

    def __init__(self, name: str, policy: CircuitBreaker, monotonic: Callable[[], float]) -> None:
        self.name = name
        self._policy = policy
        self._monotonic = monotonic
        self.reset()

    def reset(self) -> None:
        """Forget all failures."""
        self._failures = 0
        self._opened_at: float | None = None
        self._probes = 0

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return "closed"
        return "open" if self.retry_after > 0 else "half_open"

    @property
    def retry_after(self) -> float:
        """Seconds until a request may be tried."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._policy.reset_timeout - self._monotonic())

    @property
    def refuses(self) -> bool:
        """Whether a request would be turned away now."""
        if self.state == "half_open":
            return self._probes >= self._policy.half_open_max_calls
        return self.state == "open"

    def allow_request(self) -> bool:
        """Whether a request may be sent; who is told so says later how it went."""
        if self.refuses:
            return False
        self._probes += self.state == "half_open"
        return True

    def record_success(self) -> None:
        self.reset()

    def record_failure(self) -> None:
        self._failures += 1
        # One that was sent before the circuit opened says nothing new when it fails too.
        if self.state == "half_open" or (
            self.state == "closed" and self._failures >= self._policy.failure_threshold
        ):
            self._opened_at = self._monotonic()
            self._probes = 0

    def check(self) -> None:
        """Raise where a request would be turned away."""
        if self.refuses:
            raise CircuitOpenError(
                message=f"The circuit breaker is open: {self._failures} {self.name} requests in a row "
                f"failed. This one was not sent; the next may be in {self.retry_after:.0f} s.",
                retry_after=self.retry_after,
            )

    async def call(self, work: Coroutine[Any, Any, A], deadline: float | None = None) -> A:
        """Do `work` if it may be done, and learn from it; running into the caller's own deadline is no lesson."""
        try:
            self.check()
        except CircuitOpenError:
            work.close()
            raise
        probing = self.state == "half_open"
        self.allow_request()
        learned = False
        try:
            answer = await work
            self._learn(answer.status)
            learned = True
        except CircuitOpenError:  # of something that had to be done first
            raise
        except APIConnectionError:
            if deadline is None or self._monotonic() < deadline:
                self._learn(None)
                learned = True
            raise
        finally:
            if probing and not learned:
                self._probes = max(0, self._probes - 1)
        return answer

    def _learn(self, status: int | None) -> None:
        if self._policy.is_failure(status):
            self.record_failure()
        else:
            self.record_success()


class Circuits:
    """Circuits by name, made when they are first needed."""

    def __init__(self, policy: CircuitBreaker, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._circuits: dict[str, Circuit] = {}

    def of(self, name: str) -> Circuit:
        circuit = self._circuits.get(name)
        if circuit is None:
            circuit = self._circuits[name] = Circuit(name, self._policy, self._clock.monotonic)
        return circuit

    def state(self, name: str) -> State:
        circuit = self._circuits.get(name)
        return "closed" if circuit is None else circuit.state

    def reset(self, name: str) -> None:
        self._circuits.pop(name, None)

    def names(self) -> list[str]:
        return list(self._circuits)
