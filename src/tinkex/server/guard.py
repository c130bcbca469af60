"""Refuses requests that web pages send to a service without keys.

Any page open in a browser on this machine can send requests to loopback addresses. A service with keys is safe: the
page does not have one. Without keys, three headers tell a page from a program: `Host`, which after DNS rebinding is
the name of the page's own site, and `Origin` and `Sec-Fetch-Site`, which a page cannot change. `bodies.py` checks
the content type, which a page cannot choose freely either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tinkex.config import is_loopback
from tinkex.errors import BadRequestError, PermissionDeniedError, TinkerError

__all__ = ["host_name", "refusal"]

_ALLOW: Final = "the operator of the service allows more with --allow-host NAME, or sets keys"


def refusal(
    method: str, hosts: Sequence[str], headers: Mapping[str, str], allowed: Collection[str]
) -> TinkerError | None:
    """The error with which a service without keys refuses a request; None if it accepts it.

    `hosts` are the values of all `Host` headers, `allowed` the accepted names besides loopback.
    """
    if len(hosts) != 1:
        return BadRequestError(
            f"A request needs exactly one Host header; this one has {len(hosts)}."
        )
    name = host_name(hosts[0])
    if not is_loopback(name) and name not in allowed:
        return PermissionDeniedError(
            f"This service has no keys and accepts only loopback hosts, not {name!r:.100}; {_ALLOW}."
        )
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != hosts[0].strip().lower():
        return PermissionDeniedError(
            f"This service has no keys and refuses web pages of other origins, such as {origin!r:.100}."
        )
    site = headers.get("sec-fetch-site", "none")
    if site not in {"none", "same-origin"} and not _is_link(method, headers):
        return PermissionDeniedError(
            "This service has no keys and refuses web pages of other origins."
        )
    return None


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without brackets and port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_link(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a user follows a link: the page with the link cannot read the response."""
    return (
        method in {"GET", "HEAD"}
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
