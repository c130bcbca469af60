"""The immutable values of an open session, and its counters."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex import types
from tinkex._retry import Clock
from tinkex._version import PARITY_VERSION
from tinkex.config import Config

from .budget import Budget, SampleBudget, sample_budget

__all__ = ["About", "Configured", "Numbers", "Opened"]


@dataclass(frozen=True, slots=True)
class Configured:
    """The service's flags, and the limits derived from them."""

    flags: types.ClientConfigResponse
    sample_budget: SampleBudget
    response_room: Budget
    training_room: Budget

    @classmethod
    def of(cls, flags: types.ClientConfigResponse, config: Config, clock: Clock) -> Configured:
        return cls(
            flags,
            sample_budget(config, clock, flags.sample_dispatch_bytes_semaphore_size),
            Budget(flags.inflight_response_bytes_semaphore_size),
            Budget(flags.fwdbwd_dispatch_bytes_semaphore_size),
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """An open session. The process that opened it owns it and finishes it."""

    session_id: str
    is_owner: bool


@dataclass(frozen=True, slots=True)
class About:
    """Labels of a session that are sent when it is opened."""

    user_metadata: Mapping[str, Any] | None
    project_id: str | None
    display_name: str | None

    def request(self, tags: list[str]) -> types.CreateSessionRequest:
        return types.CreateSessionRequest(
            tags=tags,
            user_metadata=None if self.user_metadata is None else dict(self.user_metadata),
            sdk_version=PARITY_VERSION,
            project_id=self.project_id,
            display_name=self.display_name,
        )


class Numbers:
    """Counters that number the models and samplers of a session."""

    def __init__(self, first: int = 0) -> None:
        self.models = itertools.count(first)
        self.samplers = itertools.count(first)

    @classmethod
    def of_a_copy(cls) -> Numbers:
        """Counters with a random offset, for a copy: the service treats equal numbers as one repeated request."""
        return cls((1 << 20) + secrets.randbelow(1 << 30))
