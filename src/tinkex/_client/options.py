"""Option types that code written for the official SDK uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypedDict

__all__ = ["RequestOptions", "Timeout"]


class RequestOptions(TypedDict, total=False):
    """Options of one request, by the official SDK's names."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | None
    params: Mapping[str, Any]
    extra_json: Mapping[str, Any]
    idempotency_key: str


@dataclass(frozen=True)
class Timeout:
    """Timeouts in seconds per phase. tinkex itself uses one number for the whole call: `timeout`."""

    timeout: float | None = None
    _: KW_ONLY
    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        phases = ("connect", "read", "write", "pool")
        return {phase: getattr(self, phase) for phase in phases}
