"""What the examples have in common: their options, and something to put between a client and its service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def parsed(doc: str | None, **more: str | float) -> argparse.Namespace:
    """The options of an example: which service, which model, and `more` of its own with their defaults."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base-url",
        default="local",
        help="a service, whose key is in TINKER_API_KEY; or local, for one on this machine (default)",
    )
    parser.add_argument("--base-model", "--model", default="tinkex/tiny", help="%(default)s")
    for name, default in more.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{default}")
    return parser.parse_args()


@dataclass(frozen=True)
class Answer:
    """What an HTTP client returns."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


class Between:
    """An HTTP client that answers some requests itself and passes the others on to the service.

    `ServiceClient(http_client=Between(answer))`: `answer(path)` gives an `Answer`, or None to pass on. Bad days of a
    service are rare; with this an example can have one when it needs one.
    """

    def __init__(self, answer: Callable[[str], Answer | None]) -> None:
        import pyqwest  # what tinkex itself uses for TLS

        self._answer = answer
        self._service = pyqwest.Client(pyqwest.HTTPTransport(follow_redirects=False))

    async def post(self, url: str, headers: Any, content: bytes | None = None) -> Any:
        return self._answer(url) or await self._service.post(url, headers=headers, content=content)

    async def get(self, url: str, headers: Any) -> Any:
        return self._answer(url) or await self._service.get(url, headers=headers)

    async def delete(self, url: str, headers: Any) -> Any:
        return self._answer(url) or await self._service.delete(url, headers=headers)
