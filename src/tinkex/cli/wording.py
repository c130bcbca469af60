"""Errors for the command line: with options instead of Python arguments, and the next command to type.

Only the attributes of an error are used, never its text.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import click

from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    InvalidInputError,
    TinkerError,
)

__all__ = ["told", "worded"]

_KEY: Final = "`tinkex auth login` stores a key, --api-key gives one, TINKER_API_KEY sets one"
_KEY_FIELD: Final = "api_key"
#: Advice for a refused field.
_ADVICE: Final = {
    "ttl_seconds": "--remove keeps it forever",
}
#: Fields whose command-line parameter has another name.
_ALIASES: Final = {
    "tinker_path": ("checkpoint_path", "checkpoint_paths", "model_path"),
    "ttl_seconds": ("ttl",),
}
_UNREACHABLE: Final = (
    "Is the service running? `tinkex serve` starts one on this machine; "
    "--base-url or TINKER_BASE_URL name another."
)
_UNREACHABLE_ELSEWHERE: Final = "Is the service running? --base-url or TINKER_BASE_URL name another; --base-url local needs none."
_TRY_AGAIN: Final = "This may be temporary; try again."


def worded(error: Exception, command: click.Command | None = None) -> str:
    """The problem and the next command to type; empty for a bug of tinkex."""
    if isinstance(error, TinkerError):
        problem, advice = told(error, command)
        # Two alternatives are two lines.
        one_line = isinstance(error, InvalidInputError) and error.field != _KEY_FIELD
        apart = "; " if one_line else "\n"
        return f"{problem}{apart}{advice}" if advice else problem
    if isinstance(error, ModuleNotFoundError):
        if str(error.name).startswith("tinkex"):
            return ""
        return f"{error.name} is not installed: pip install 'tinkex[local]'"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def told(error: TinkerError, command: click.Command | None = None) -> tuple[str, str]:
    """The problem, and how to fix it on the command line."""
    if isinstance(error, InvalidInputError):
        where = f"{_typed_as(error.field, command)}: " if error.field else ""
        if error.field == _KEY_FIELD:
            return where + error.problem, _without_key()
        return where + error.problem, _ADVICE.get(error.field or "", error.advice or "")
    if isinstance(error, APIConnectionError) and (where := _origin(error)):
        advice = _UNREACHABLE_ELSEWHERE if where.startswith("https:") else _UNREACHABLE
        return f"{where} cannot be reached: {error}", advice
    if isinstance(error, AuthenticationError) and (where := _origin(error)):
        return f"{where} refuses the key: {error}", f"To use another: {_KEY}."
    return str(error), _TRY_AGAIN if error.retryable else ""


def _without_key() -> str:
    """How to continue: first without a key, then with one."""
    from tinkex._local import running

    if (url := running()) is not None:
        without = f"A service runs on this machine at {url}: --base-url local uses it."
    else:
        without = (
            "A service on this machine needs no key: --base-url local starts a private one, "
            "`tinkex serve` one that stays."
        )
    return f"{without}\nFor a service elsewhere, {_KEY}."


def _typed_as(field: str, command: click.Command | None) -> str:
    """The command-line name of a field: its option, or its argument in capitals."""
    names = (field, *_ALIASES.get(field, ()))
    flags = {f"--{name.replace('_', '-')}" for name in names}
    for parameter in command.params if command else ():
        if isinstance(parameter, click.Argument) and parameter.name in names:
            return parameter.name.upper()
        if found := flags.intersection(parameter.opts):
            return found.pop()
    return field


def _origin(error: APIConnectionError | APIStatusError) -> str:
    """Scheme, host and port of the service; empty if the error has no request."""
    url = str(getattr(error.request, "url", "") or "")
    parts = urlsplit(url)
    if not parts.hostname:
        return ""
    # Built from its parts: a URL may carry a password before the host.
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
