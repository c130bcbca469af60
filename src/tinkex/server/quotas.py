"""Limits per key, and how much of each limit every key uses.

A limit is a field of `KeyLimits`; its `Quota` counts per key in a dictionary, so a check takes constant time. At the start
the counts are rebuilt from the database and the journal.

A 429 has `retry_after` seconds only where waiting alone helps. The others last until the user frees something: they
have the category "user", so that clients do not retry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from tinkex.errors import ConfigError, RateLimitError, RequestErrorCategory

__all__ = ["KeyLimits", "LimitInfo", "Quota", "Quotas", "limit_infos"]

_SUFFIXES: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class LimitInfo(NamedTuple):
    """A limit with its texts for documentation and messages."""

    name: str
    default: int
    what: str
    advice: str
    retry_after: float | None

    def shown(self, amount: int) -> str:
        """An amount as text; sizes get a unit of bytes."""
        if not self.name.endswith("_bytes"):
            return f"{amount:,}"
        unit = max((size for size in _SUFFIXES.values() if size <= amount), default=1)
        name = next(name for name, size in _SUFFIXES.items() if size == unit)
        return f"{amount / unit:.4g} {name or 'bytes'}"


def _limit(default: int, what: str, advice: str, retry_after: float | None = None) -> Any:
    return field(
        default=default, metadata={"what": what, "advice": advice, "retry_after": retry_after}
    )


@dataclass(frozen=True)
class KeyLimits:
    """The limits of one key; fields that end in `_bytes` are sizes."""

    requests: int = _limit(4_000, "requests in flight", "wait for some of the responses", 1.0)
    pending: int = _limit(
        20_000, "requests without a result", "send more when some of them have finished", 1.0
    )
    results: int = _limit(
        200_000,
        "requests and results that are kept",
        "fetch finished results, then send more",
        5.0,
    )
    journal_bytes: int = _limit(
        16 << 30,
        "of requests and results in the journal",
        "fetch finished results, call optim_step, or unload models, then send more",
        5.0,
    )
    sessions: int = _limit(
        10_000,
        "active sessions",
        "finish some; a session also ends after hours without a heartbeat",
    )
    models: int = _limit(100, "live models", "unload some, or finish their sessions")
    samplers: int = _limit(10_000, "samplers of active sessions", "finish some sessions")
    losses: int = _limit(1_000, "traced losses of active sessions", "finish some sessions")
    checkpoint_bytes: int = _limit(
        500 << 30, "of checkpoints", "delete some, or save with ttl_seconds"
    )
    telemetry_bytes: int = _limit(256 << 20, "of reported events", "the oldest are deleted")
    metric_bytes: int = _limit(
        20 << 30, "of metrics and samples of runs", "newer ones are not kept; training continues"
    )

    @classmethod
    def of_options(cls, options: Iterable[str]) -> KeyLimits:
        """Limits from `NAME=VALUE` options; the others keep their defaults."""
        chosen = dict(_parsed(option) for option in options)
        return replace(cls(), **chosen)


def limit_infos() -> tuple[LimitInfo, ...]:
    defaults = KeyLimits()
    return tuple(
        LimitInfo(each.name, getattr(defaults, each.name), **each.metadata)
        for each in fields(KeyLimits)
    )


def _parsed(option: str) -> tuple[str, int]:
    name, equals, text = option.partition("=")
    names = [each.name for each in fields(KeyLimits)]
    if not equals or name.strip() not in names:
        raise ConfigError(
            f"{option!r:.80} is not NAME=VALUE with one of {', '.join(names)}", field="limit"
        )
    found = re.fullmatch(r"([0-9][0-9_]*)\s*([KMGT]iB)?", text.strip())
    if found is None:
        raise ConfigError(
            f"{option!r:.80}: the value must be a whole number; a size may end in KiB, MiB, GiB or TiB",
            field="limit",
        )
    return name.strip(), int(found[1]) * _SUFFIXES[found[2] or ""]


class Quota:
    """One limit, and how much of it each key uses."""

    def __init__(self, info: LimitInfo, limit: int) -> None:
        self._info = info
        self.limit = limit
        self._used: dict[str, int] = {}
        self.total = 0

    def used(self, owner: str) -> int:
        return self._used.get(owner, 0)

    def has_room(self, owner: str, more: int = 1) -> bool:
        return self.used(owner) + more <= self.limit

    def check(self, owner: str, more: int = 1) -> None:
        """Refuse `more` if it would exceed the limit."""
        if not self.has_room(owner, more):
            raise self.exceeded(owner, more)

    def exceeded(self, owner: str, more: int = 1) -> RateLimitError:
        info = self._info
        error = RateLimitError(
            f"This key has {info.shown(self.used(owner))} {info.what}; {info.shown(more)} more would exceed its "
            f"limit of {info.shown(self.limit)}: {info.advice}. The operator can raise the limit with "
            f"`tinkex serve --limit {info.name}=...`.",
            retry_after=info.retry_after,
        )
        if info.retry_after is None:
            error.category = RequestErrorCategory.User
        return error

    def take(self, owner: str, amount: int = 1) -> None:
        """Count a new amount, or refuse it if it would exceed the limit."""
        self.check(owner, amount)
        self.add(owner, amount)

    def add(self, owner: str, amount: int = 1) -> None:
        """Count an amount without a check: it exists already or was checked before."""
        self._used[owner] = self.used(owner) + amount
        self.total += amount
        if not self._used[owner]:
            del self._used[owner]

    def release(self, owner: str, amount: int = 1) -> None:
        self.add(owner, -amount)


@dataclass(frozen=True)
class Quotas:
    """A quota for every field of `KeyLimits`."""

    requests: Quota
    pending: Quota
    results: Quota
    journal_bytes: Quota
    sessions: Quota
    models: Quota
    samplers: Quota
    losses: Quota
    checkpoint_bytes: Quota
    telemetry_bytes: Quota
    metric_bytes: Quota

    @classmethod
    def of(cls, limits: KeyLimits) -> Quotas:
        return cls(**{info.name: Quota(info, getattr(limits, info.name)) for info in limit_infos()})
