"""Decides whether a request comes from the service's own machine."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from tinkex.config import is_loopback

__all__ = ["is_near", "was_forwarded"]

#: Headers that a proxy adds to a request it forwards.
_FORWARDING: Final = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
)


def was_forwarded(request: Request) -> bool:
    """Whether a header says that a proxy forwarded the request."""
    return any(name in request.headers for name in _FORWARDING)


def is_near(request: Request) -> bool:
    """Whether the connection comes over loopback and no proxy header says that it was forwarded."""
    host = request.client.host if request.client is not None else ""
    near = is_loopback(host.removeprefix("::ffff:"))  # IPv4 on a dual-stack socket
    return near and not was_forwarded(request)
