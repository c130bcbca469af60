"""Web pages are kept away from a service that asks for no key.

Whatever a browser on this machine has open can send requests to loopback addresses. Where a key is needed that is
harmless: a page does not have it. Without keys three things tell a page from a program: the name in `Host`, which
after DNS rebinding is the page's own, and `Origin` and `Sec-Fetch-Site`, which a page cannot change. The content
type of bodies, which a page cannot choose freely either, is checked where bodies are read.
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
    """Why a service without keys does not answer a request; None if it does.

    `hosts` are the values of all `Host` headers, `allowed` the names beyond loopback that may stand in one.
    """
    if len(hosts) != 1:
        return BadRequestError(f"A request needs one Host header, this one has {len(hosts)}.")
    name = host_name(hosts[0])
    if not is_loopback(name) and name not in allowed:
        return PermissionDeniedError(
            f"This service needs no key and answers loopback hosts only, not {name!r:.100}; {_ALLOW}."
        )
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != hosts[0].strip().lower():
        return PermissionDeniedError(
            f"This service needs no key and answers no web page of another origin, such as {origin!r:.100}."
        )
    site = headers.get("sec-fetch-site", "none")
    if site not in {"none", "same-origin"} and not _is_link(method, headers):
        return PermissionDeniedError(
            "This service needs no key and answers no web page of another origin."
        )
    return None


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without brackets and port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_link(method: str, headers: Mapping[str, str]) -> bool:
    """Whether somebody follows a link: the page that has it sees nothing of the answer."""
    return (
        method in {"GET", "HEAD"}
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
