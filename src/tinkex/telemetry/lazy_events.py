"""The classes of events, imported at their first use: a client makes none of the fifty before its first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import Lazy

__all__ = ["event_types"]

if TYPE_CHECKING:
    from . import events as event_types
else:
    event_types = Lazy("tinkex.telemetry.events")
