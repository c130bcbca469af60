"""One model in training: its identity, its queue, its past, and why it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

from tinkex.engine.interface import EngineLease
from tinkex.engine.values import LoraSpec
from tinkex.errors import RequestErrorCategory, RequestFailedError

from .futures import Promise
from .replay import Past
from .scheduling import Sequencer

__all__ = ["Ending", "Model"]


@dataclass(frozen=True)
class Ending:
    """Why a model accepts nothing any more."""

    message: str
    corrupted: bool = False

    @classmethod
    def by_damage(cls, why: str) -> Ending:
        return cls(
            f"This run is corrupted, its state cannot be restored: {why}. "
            "Continue from its last checkpoint.",
            corrupted=True,
        )

    def error(self, request_id: str | None = None) -> RequestFailedError:
        server, user = RequestErrorCategory.Server, RequestErrorCategory.User
        return RequestFailedError(self.message, request_id, server if self.corrupted else user)


@dataclass(eq=False)
class Model:
    """One model and the queue of its requests."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora: LoraSpec | None = None
    line: Sequencer[Promise] = field(default_factory=lambda: Sequencer(next_seq=0))
    past: Past = field(default_factory=Past)
    lease: EngineLease | None = None  # of the engine that has this model
    ending: Ending | None = None
    #: When it was last sent a request, since the service started.
    asked_at: datetime | None = None
    #: Seconds of engines that its last request of each operation used.
    usual_seconds: dict[str, float] = field(default_factory=dict)
    #: Held while the snapshot is replaced, and while the model is restored from it.
    restoring: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Set when the request that creates the model has run.
    made: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def corrupted(self) -> bool:
        return self.ending is not None and self.ending.corrupted

    @property
    def held(self) -> bool:
        """Whether an engine has this model."""
        return self.lease is not None and not self.lease.lost

    def check(self) -> None:
        """Refuse a request to a model that has ended."""
        if self.ending is not None:
            raise self.ending.error()
