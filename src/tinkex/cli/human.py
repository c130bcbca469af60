"""Times and sizes for people to read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

__all__ = ["ago", "clock", "moment", "size"]

_UNITS = (("week", 7 * 86_400), ("day", 86_400), ("hour", 3600), ("minute", 60))


def ago(value: Any, now: datetime | None = None) -> str:
    """`3 hours ago`, `in 2 days`; the date if it is more than 30 days away."""
    when = moment(value)
    if when is None:
        return "Never" if value is None else str(value)
    seconds = ((now or datetime.now(UTC)) - when).total_seconds()
    if abs(seconds) > 30 * 86_400:
        return when.strftime("%Y-%m-%d")
    for unit, length in _UNITS:
        count = int(abs(seconds) // length)
        if count:
            words = f"{count} {unit}{'s' if count > 1 else ''}"
            return f"{words} ago" if seconds > 0 else f"in {words}"
    return "just now" if seconds >= 0 else "in less than a minute"


def clock(seconds: float) -> str:
    """`2:05`: minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def moment(value: Any) -> datetime | None:
    """A time of the protocol; None if its text is in an unknown format."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def size(count: int | None) -> str:
    """`1.5 MB`, with units of 1024."""
    if count is None:
        return "N/A"
    amount = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TB"
