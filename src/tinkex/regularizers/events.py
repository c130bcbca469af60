"""What happens while a composed loss is computed, told to an observer on the thread that waits for the loss.

`event` is the name under which telemetry carries it. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import time
from typing import ClassVar, TypeAlias

__all__ = [
    "EVENTS",
    "CustomLossException",
    "CustomLossStart",
    "CustomLossStop",
    "Observer",
    "RegularizerException",
    "RegularizerStart",
    "RegularizerStop",
]

Observer: TypeAlias = Callable[[object], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLossStart:
    event: ClassVar[str] = "custom_loss.start"
    system_time: float = field(default_factory=time)
    regularizer_count: int
    track_grad_norms: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLossStop:
    event: ClassVar[str] = "custom_loss.stop"
    duration: float
    loss_total: float
    regularizer_total: float
    regularizer_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLossException:
    event: ClassVar[str] = "custom_loss.exception"
    duration: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RegularizerStart:
    event: ClassVar[str] = "regularizer.compute.start"
    system_time: float = field(default_factory=time)
    regularizer_name: str
    weight: float
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RegularizerStop:
    event: ClassVar[str] = "regularizer.compute.stop"
    duration: float
    value: float
    contribution: float
    grad_norm: float | None
    regularizer_name: str
    weight: float
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RegularizerException:
    event: ClassVar[str] = "regularizer.compute.exception"
    duration: float
    regularizer_name: str
    weight: float
    reason: str


EVENTS = (
    CustomLossStart,
    CustomLossStop,
    CustomLossException,
    RegularizerStart,
    RegularizerStop,
    RegularizerException,
)
