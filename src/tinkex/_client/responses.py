"""A complete answer: status, headers, body, duration and number of retries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from email.message import Message
from typing import Any, Final, get_origin

from tinkex._wire.lazy_codecs import json_codec
from tinkex.errors import HTTPRequest, HTTPResponse, InvalidInputError

__all__ = ["REDIRECTS", "APIResponse"]

REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class APIResponse:
    """A complete answer with its metadata."""

    status: int
    headers: Mapping[str, str]
    method: str
    url: str
    body: bytes = field(repr=False)
    elapsed_ms: float
    retries: int

    @property
    def data(self) -> Any:
        """The body as JSON; `{}` if it is empty. For a redirect: its `url`, `status` and `expires`."""
        if self.status in REDIRECTS:
            expires = self.header("expires")
            return {"url": self.header("location"), "status": self.status, "expires": expires}
        return json_codec.parse(self.body)

    def header(self, name: str) -> str | None:
        return self.headers.get(name.lower())

    def parse(self, parser: Any = None, *, to: Any = None) -> Any:
        """The data, converted by `parser`: a function, a protocol type, a built-in type, or a type with `from_json`.

        Without `parser` it is `data`. `to` is the same as `parser`.
        """
        wanted = parser if to is None else to
        if wanted is None:
            return self.data
        kind = get_origin(wanted) or wanted
        if kind in _PLAIN:
            return _PLAIN[kind](self)
        if hasattr(kind, "from_json"):
            return kind.from_json(self.data)
        if isinstance(kind, type):
            return json_codec.decode(self.body, kind)
        if not callable(wanted):
            raise InvalidInputError(
                f"must be a type or a function, not {wanted!r:.80}", field="parser"
            )
        return wanted(self.data)

    # -- aliases with the official SDK's names -----------------------------------------------

    @property
    def status_code(self) -> int:
        return self.status

    @property
    def retries_taken(self) -> int:
        return self.retries

    @property
    def elapsed(self) -> timedelta:
        return timedelta(milliseconds=self.elapsed_ms)

    @property
    def http_request(self) -> HTTPRequest:
        return HTTPRequest(self.method, self.url)

    @property
    def http_response(self) -> HTTPResponse:
        return HTTPResponse(self.status, self.headers, self.http_request)

    @property
    def is_closed(self) -> bool:
        return True  # the body is already read

    def close(self) -> None:
        """Does nothing: the body is already read."""

    def read(self) -> bytes:
        return self.body

    def text(self) -> str:
        about = Message()
        about["content-type"] = self.header("content-type") or ""
        try:
            return self.body.decode(about.get_content_charset("utf-8"), errors="replace")
        except LookupError:  # unknown charset
            return self.body.decode(errors="replace")

    def json(self) -> Any:
        return json_codec.parse(self.body)

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        step = chunk_size or max(len(self.body), 1)
        return (self.body[start : start + step] for start in range(0, len(self.body), step))

    def iter_text(self, chunk_size: int | None = None) -> Iterator[str]:
        text = self.text()
        step = chunk_size or max(len(text), 1)
        return (text[start : start + step] for start in range(0, len(text), step))

    def iter_lines(self) -> Iterator[str]:
        return iter(self.text().splitlines())


#: Built-in types, and how an answer is converted to them.
_PLAIN: Final[dict[Any, Any]] = {
    dict: lambda answer: answer.data,
    list: lambda answer: answer.data,
    object: lambda answer: answer.data,
    str: APIResponse.text,
    bytes: APIResponse.read,
    int: lambda answer: int(answer.text()),
    float: lambda answer: float(answer.text()),
    bool: lambda answer: answer.text().lower() == "true",
    type(None): lambda _: None,
}
