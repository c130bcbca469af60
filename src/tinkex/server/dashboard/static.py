"""The files of the page: read once, compressed once, served with an ETag and a strict Content-Security-Policy."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tinkex.errors import NotFoundError

__all__ = ["Asset", "assets", "page", "serve"]

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "md": "text/plain; charset=utf-8",
}
#: Only scripts, styles and connections of this service. Plots set styles from their script, which needs no
#: permission of `style-src-attr`.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'none'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Revalidated each time, usually with a 304: a newer release has the same names.
    "cache-control": "no-cache",
    "vary": "accept-encoding, accept",
}


@dataclass(frozen=True)
class Asset:
    """One file, as it is and compressed."""

    name: str
    content: bytes
    compressed: bytes
    tag: str

    @property
    def media_type(self) -> str:
        return _TYPES[self.name.rpartition(".")[2]]


@cache
def assets() -> dict[str, Asset]:
    """All files by name; there are few, and any page asks for most of them."""
    return {asset.name: asset for asset in _read(files(__package__) / "static", "")}


def _read(directory: Traversable, prefix: str) -> list[Asset]:
    found = []
    for entry in directory.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            content = entry.read_bytes()
            tag = hashlib.sha256(content).hexdigest()[:20]
            compressed = gzip.compress(content, 9, mtime=0)
            found.append(Asset(f"{prefix}{entry.name}", content, compressed, f'"{tag}"'))
    return found


async def serve(request: Request) -> Response:
    asset = assets().get(request.path_params["name"])
    if asset is None:
        raise NotFoundError(f"There is no file {request.path_params['name']!r:.100}.")
    return _response(request, asset)


def page(request: Request) -> Response:
    """The page itself; its parts are chosen by what follows `#` in the address."""
    return _response(request, assets()["index.html"])


def _response(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "etag": asset.tag}
    asked = [
        tag.strip().removeprefix("W/")
        for tag in request.headers.get("if-none-match", "").split(",")
    ]
    if asset.tag in asked:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(asset.compressed, headers=headers, media_type=asset.media_type)
    return Response(asset.content, headers=headers, media_type=asset.media_type)
