"""Whether a request comes from the machine of the service."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from tinkex.config import is_loopback

__all__ = ["is_near", "was_forwarded"]

#: Headers with which a proxy says that it forwards a request.
_FORWARDING: Final = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
)


def was_forwarded(request: Request) -> bool:
    """Whether a proxy says that it speaks for somebody else."""
    return any(name in request.headers for name in _FORWARDING)


def is_near(request: Request) -> bool:
    """Whether the connection is one over loopback, and not that of a proxy which says so."""
    host = request.client.host if request.client is not None else ""
    near = is_loopback(host.removeprefix("::ffff:"))  # IPv4 on a socket for both
    return near and not was_forwarded(request)
