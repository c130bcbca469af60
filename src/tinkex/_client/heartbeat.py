"""The heartbeat of a session: tells the service that the session is in use.

It stops when the session is closed, finished, given up or garbage-collected. It holds only a weak reference, so that an
unused session is freed; the heartbeat then closes the connections and tasks that the session leaves behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

from tinkex import types
from tinkex._wire.operations import operation
from tinkex.errors import APIConnectionError, GoneError
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.lazy_events import event_types

from .notices import logger
from .transport import Transport

__all__ = ["Heartbeat"]

#: The heartbeat stops after this many answers in a row that the session is finished (410).
_FINISHED_AFTER: Final = 3


@dataclass(slots=True)
class Heartbeat:
    """State of the heartbeat of one session."""

    session_id: str
    transport: Transport
    metadata: Mapping[str, Any]
    #: Called with the reason when the session is given up.
    give_up: Callable[[Exception], None]
    last_success: float
    finished: int = 0
    failures: int = 0

    async def keep_beating(
        self, session: ref[Any], let_go: Callable[[], Awaitable[object]]
    ) -> None:
        """Send heartbeats while `session` is alive, then call `let_go` to release its resources."""
        clock, interval = self.transport.clock, self.transport.config.heartbeat_interval
        beating = True
        while True:
            await clock.sleep(interval)
            if session() is None:
                await let_go()
                return
            beating = beating and await self.beat()

    async def beat(self) -> bool:
        """Send one heartbeat. Returns False if the heartbeat must stop."""
        request = types.SessionHeartbeatRequest(session_id=self.session_id)
        try:
            await self.transport.send(operation("session_heartbeat"), request)
        except GoneError:
            self.finished += 1
            if self.finished == _FINISHED_AFTER:
                logger.info("Session %s is finished; its heartbeat stops.", self.session_id)
                return False
        except Exception as error:  # a custom HTTP client may raise anything
            return self._failed(error)
        else:
            self.finished = self.failures = 0
            self.last_success = self.transport.clock.monotonic()
        return True

    def _failed(self, error: Exception) -> bool:
        self.finished, self.failures = 0, self.failures + 1
        silent = self.transport.clock.monotonic() - self.last_success
        if wants(event_types.HeartbeatFailed):
            emit(
                event_types.HeartbeatFailed(self.session_id, silent, error, metadata=self.metadata)
            )
        if silent >= self.transport.config.heartbeat_warning_after:
            logger.warning(
                "No heartbeat of session %s has succeeded for %.0f s: %s",
                self.session_id,
                silent,
                error,
            )
        if not self._gives_up(silent):
            return True
        message = (
            f"Session {self.session_id} is given up after {silent:.0f} s without a heartbeat; "
            "make a new client."
        )
        logger.warning("%s", message)
        reason = APIConnectionError(message=message)
        reason.__cause__ = error
        self.give_up(reason)
        return False

    def _gives_up(self, silent: float) -> bool:
        config = self.transport.config
        most, longest = config.heartbeat_max_failures, config.heartbeat_max_silence
        return (most is not None and self.failures > most) or (
            longest is not None and silent > longest
        )
