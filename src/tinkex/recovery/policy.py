"""Decides what to do about a lost run; does no I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from tinkex._client.checks import is_seconds
from tinkex.errors import InvalidInputError, InvalidPathError, TinkerError
from tinkex.types import Checkpoint, ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex._client.training import TrainingClient

__all__ = ["CheckpointLike", "Reason", "RecoveryError", "RecoveryPolicy", "checkpoint_path"]

logger = logging.getLogger("tinkex")

Reason: TypeAlias = Literal["recovery_disabled", "already_pending", "missing_checkpoint", "unsupported_strategy"]  # fmt: skip
CheckpointLike: TypeAlias = Checkpoint | Mapping[str, Any] | str

_REASONS: Final[Mapping[Reason, str]] = {
    "recovery_disabled": "recovery is not enabled: RecoveryPolicy(enabled=True)",
    "already_pending": "it is already being recovered",
    "missing_checkpoint": "it has no checkpoint to continue from",
    "unsupported_strategy": 'no metric says which checkpoint is best: choose "latest" or a path',
}


class RecoveryError(TinkerError):
    """A run is not recovered; `reason` is the cause as one word."""

    def __init__(self, run_id: str, reason: Reason) -> None:
        super().__init__(f"Run {run_id} cannot be recovered: {_REASONS[reason]}.")
        self.run_id = run_id
        self.reason = reason

    @property
    def retryable(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Whether and how lost runs are restored. Times are in seconds.

    `checkpoint_strategy` is "latest" or the path of a checkpoint. `on_recovery(old, new, checkpoint)` gets the old
    training client (None if unknown), the new one, and the checkpoint's path. `on_failure(run_id, error)` is called
    after the last attempt has failed. Both run on a separate thread.
    """

    enabled: bool = False
    max_attempts: int = 3
    backoff: float = 5.0
    max_backoff: float = 60.0
    poll_interval: float = 30.0
    checkpoint_strategy: str = "latest"
    restore_optimizer: bool = True
    on_recovery: Callable[[TrainingClient | None, TrainingClient, str], object] | None = None
    on_failure: Callable[[str, BaseException], object] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if complaint := _complaint(each.name, getattr(self, each.name)):
                raise InvalidInputError(complaint, field=each.name)

    @classmethod
    def of(cls, given: RecoveryPolicy | Mapping[str, Any] | None) -> RecoveryPolicy:
        """A policy from the value of a setting; an unknown option is refused.

        An option with an invalid value is replaced by its default, with a warning.
        """
        if isinstance(given, RecoveryPolicy):
            return given
        values = {}
        known = [each.name for each in fields(cls)]
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name not in known:
                raise InvalidInputError(_unknown(str(name), known), field=f"recovery.{name}")
            if complaint := _complaint(name, value):
                logger.warning("recovery.%s %s; the default is used.", name, complaint)
                continue
            values[name] = value
        return cls(**values)

    def wait_before_retry(self, error: BaseException, attempt: int) -> float | None:
        """Seconds until the next attempt, None to give up; attempts count from 1."""
        if attempt >= self.max_attempts or isinstance(error, RecoveryError):
            return None
        return min(self.backoff * 2.0 ** min(attempt - 1, 60), self.max_backoff)


def checkpoint_path(checkpoint: CheckpointLike | None) -> str | None:
    """The path of a checkpoint, from any of the forms in which it is given."""
    if isinstance(checkpoint, Mapping):
        checkpoint = checkpoint.get("tinker_path") or checkpoint.get("path")
    return checkpoint.tinker_path if isinstance(checkpoint, Checkpoint) else checkpoint


def _unknown(name: str, known: Sequence[str]) -> str:
    seconds = name.removesuffix("_ms")
    if seconds != name and seconds in known:
        return f"is not an option; use {seconds}, in seconds"
    return f"is not an option; options are {', '.join(known)}"


def _complaint(name: str, value: Any) -> str | None:
    check, complaint = _CHECKS[name]
    return None if check(value) else f"must be {complaint}, not {value!r:.80}"


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_strategy(value: Any) -> bool:
    if value in ("latest", "best"):
        return True
    try:
        ParsedCheckpointTinkerPath.from_tinker_path(value)
    except InvalidPathError:
        return False
    return True


def _is_callback(value: Any) -> bool:
    return value is None or callable(value)


_FLAG = (_is_flag, "True or False")
_TIME = (is_seconds, "a positive number of seconds")
_CALLBACK = (_is_callback, "a function or None")
_CHECKS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "enabled": _FLAG,
    "max_attempts": (_is_count, "a whole number, at least 1"),
    "backoff": _TIME,
    "max_backoff": _TIME,
    "poll_interval": _TIME,
    "checkpoint_strategy": (_is_strategy, '"latest", "best" or the path of a checkpoint'),
    "restore_optimizer": _FLAG,
    "on_recovery": _CALLBACK,
    "on_failure": _CALLBACK,
}
