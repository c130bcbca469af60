"""A circuit breaker: after too many failed requests in a row, new calls are refused for some time.

| state       | a new call                         | next state                                                       |
|-------------|------------------------------------|------------------------------------------------------------------|
| `closed`    | is sent                            | open, after `failure_threshold` failures in a row                |
| `open`      | is refused with `CircuitOpenError` | half open, after `reset_timeout` seconds                         |
| `half_open` | is sent as a probe                 | open, if a probe fails or `half_open_max_calls` probes were sent |

Any success closes the circuit. A call that has started is never refused, because it may hold a sequence number that the
service waits for; its own retry policy applies. A probe whose answer is late or lost needs no handling: the next probe
is allowed after `reset_timeout` seconds.

Used only on the runtime's event loop, so no lock is needed to count concurrent failures.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol, TypeVar

from tinkex._retry import Clock
from tinkex.config import CircuitBreaker
from tinkex.errors import APIConnectionError, CircuitOpenError
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.calls import current_metadata
from tinkex.telemetry.lazy_events import event_types

from .notices import logger

__all__ = ["Circuit", "Circuits", "State"]

State = Literal["closed", "open", "half_open"]


class _Answer(Protocol):
    @property
    def status(self) -> int: ...


A = TypeVar("A", bound=_Answer)


class Circuit:
    """The breaker for requests of one kind."""

    def __init__(self, name: str, policy: CircuitBreaker, monotonic: Callable[[], float]) -> None:
        self.name = name
        self._policy = policy
        self._monotonic = monotonic
        self._failures = self._probes = 0
        self._probing = False
        self._opened_at: float | None = None

    def reset(self) -> None:
        """Close the circuit and clear the failure count."""
        was_closed, self._opened_at = self._opened_at is None, None
        self._failures = self._probes = 0
        self._probing = False
        if not was_closed:
            self._tell("closed")

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return "closed"
        return "open" if self.retry_after > 0 else "half_open"

    @property
    def retry_after(self) -> float:
        """Seconds until a new call may be sent."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._policy.reset_timeout - self._monotonic())

    def allow_request(self) -> bool:
        """Whether a new call may be sent. While half open, each True counts as a probe."""
        state = self.state
        if state == "half_open":
            self._probes += 1
            self._probing = True
            self._tell("half_open")
            if self._probes >= self._policy.half_open_max_calls:
                self._open()
        return state != "open"

    def record_success(self) -> None:
        self.reset()

    def record_failure(self) -> None:
        self._failures += 1
        was_open, was_probing = self._opened_at is not None, self._probing
        if not was_open:
            is_enough = self._failures >= self._policy.failure_threshold
        else:  # without a probe in flight, the failed request was sent before the circuit opened
            is_enough = self._probes > 0
        if is_enough:
            self._open()
        if was_probing or (is_enough and not was_open):
            self._probing = False
            self._tell("open")

    def _open(self) -> None:
        self._opened_at, self._probes = self._monotonic(), 0

    def _tell(self, state: State) -> None:
        if wants(event_types.CircuitStateChange):
            metadata = current_metadata()
            facts = (self.name, state, self._failures, self.retry_after)
            emit(event_types.CircuitStateChange(*facts, metadata=metadata))

    def admit(self) -> None:
        """Raise CircuitOpenError if no new call may be sent."""
        if not self.allow_request():
            raise CircuitOpenError(
                message=f"The circuit breaker is open: {self._failures} {self.name} requests in a row "
                f"failed. This one was not sent; a call can be sent again in {self.retry_after:.0f} s.",
                retry_after=self.retry_after,
            )

    async def learn_from(self, work: Coroutine[Any, Any, A], deadline: float | None = None) -> A:
        """Run `work` and record success or failure. Exceeding the caller's own deadline is not recorded."""
        try:
            answer = await work
        except APIConnectionError:
            if deadline is None or self._monotonic() < deadline:
                self.record_failure()
            raise
        if self._is_failure(answer.status):
            self.record_failure()
        else:
            self.record_success()
        return answer

    def _is_failure(self, status: int) -> bool:
        try:
            return self._policy.is_failure(status)
        except Exception:  # a faulty callback must not lose the answer
            logger.exception("The circuit breaker's is_failure failed: %r", self._policy.is_failure)
            return True


class Circuits:
    """The circuit breakers of a client by name: `session`, `training`, `sampling`.

    Each is created on first use. A circuit that does not exist yet counts as closed.
    """

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
        """Whether calls of this kind are sent (`closed`), refused (`open`), or probed (`half_open`)."""
        circuit = self._circuits.get(name)
        return "closed" if circuit is None else circuit.state

    def reset(self, name: str) -> None:
        """Close a circuit and clear its failure count; the next call is sent."""
        circuit = self._circuits.pop(name, None)
        if circuit is not None:
            circuit.reset()

    def names(self) -> list[str]:
        """The names of the circuits created so far."""
        return list(self._circuits)
