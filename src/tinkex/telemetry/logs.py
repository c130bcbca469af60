"""Events as log lines, and the log level."""

from __future__ import annotations

import logging
from typing import Final

from tinkex.telemetry.lazy_events import event_types

from . import bus

__all__ = ["apply_log_level", "attach_logger"]

_logger = logging.getLogger("tinkex")
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
#: Libraries that log every request at INFO, where a harmless answer such as 429 looks alarming.
_NOISY: Final = ("httpx", "httpcore", "pyqwest")
#: Fields in seconds that are logged in milliseconds.
_DURATIONS: Final = frozenset({"duration", "elapsed_time", "delay", "roundtrip"})


def attach_logger(level: int = logging.INFO, *kinds: type[event_types.Event]) -> int:
    """Log requests and queue state changes, or events of the given classes; exceptions are logged as errors.

    Returns the number for `detach`.
    """

    def write(event: event_types.Event) -> None:
        at = logging.ERROR if event.name.endswith(".exception") else level
        if _logger.isEnabledFor(at):
            _logger.log(at, "%s", _line(event))

    logged = (
        event_types.HttpRequestStop,
        event_types.HttpRequestException,
        event_types.QueueStateChange,
    )
    return bus.attach(write, *kinds or logged)


def _line(event: event_types.Event) -> str:
    if isinstance(event, event_types.QueueStateChange):
        why = f": {event.queue_state_reason}" if event.queue_state_reason else ""
        return f"queue is {event.queue_state}{why} (request {event.request_id})"
    if not isinstance(event, event_types.HttpRequestStop | event_types.HttpRequestException):
        facts = (event.measurements | event.facts).items()
        told = ", ".join(_shown(name, value) for name, value in facts if value is not None)
        return f"{event.name.removeprefix('tinkex.')}: {told}"
    request = f"{event.method} {event.path}"
    seconds = f"{event.duration * 1000:.0f} ms"
    if isinstance(event, event_types.HttpRequestException):
        return f"{request}: {event.kind} after {seconds}: {event.reason}"
    again = f", retry {event.retry_count}" if event.retry_count else ""
    return f"{request}: {event.status} after {seconds}{again}"


def _shown(name: str, value: object) -> str:
    if name in _DURATIONS and isinstance(value, float):
        return f"{name}={value * 1000:.0f} ms"
    return f"{name}={value:.4f}" if isinstance(value, float) else f"{name}={value}"


_attached: int | None = None


def apply_log_level(level: str | None, *, dump_headers: bool = False) -> None:
    """Apply TINKER_LOG: `debug` and `info` also log every request; unset leaves the logger alone.

    `dump_headers` logs at INFO. Where neither `level` nor the program sets a level, INFO is enabled, so that
    the dump is visible without a second setting.
    """
    global _attached  # noqa: PLW0603
    chatty = level in {"debug", "info"}
    if level is not None:
        _enable(_LEVELS[level])
    elif dump_headers and not _logger.level and not _logger.isEnabledFor(logging.INFO):
        _enable(logging.INFO)
    if chatty and _attached is None:
        _attached = attach_logger()
    for name in _NOISY:
        noisy = logging.getLogger(name)
        if not chatty and noisy.level == logging.NOTSET:
            noisy.setLevel(logging.WARNING)


def _enable(level: int) -> None:
    _logger.setLevel(level)
    if not _logger.hasHandlers():  # without a handler Python shows warnings only
        _logger.addHandler(logging.StreamHandler())
