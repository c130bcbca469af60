"""Request bodies: read up to the operation's limit; large ones are decompressed and decoded in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.requests import Request

from tinkex._wire.compression import announced_size, decode_body
from tinkex._wire.media_types import PROTOBUF
from tinkex._wire.operations import OPERATIONS, Body, Operation
from tinkex.errors import ConfigError, PayloadTooLargeError, UnsupportedMediaTypeError

from . import decoding
from .byte_budget import ByteBudget, Hold
from .local_operations import LOCAL_OPERATIONS
from .serving.table import SERVING
from .threads import KeyThreads

__all__ = ["Bodies", "Received", "read_body_limit"]

T = TypeVar("T")

#: Smaller bodies take less than a millisecond on the event loop, less than the hand-over to a thread costs.
OFF_LOOP_BYTES: Final = 64 << 10
#: Decoding threads. More would not be faster: they share the GIL.
_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Received:
    """A decompressed body and its format: "json" or "proto"."""

    body: bytes = b""
    media: str = "json"


class Bodies:
    """Reads and decodes the bodies of one service."""

    def __init__(
        self,
        *,
        max_body_bytes: int,
        max_decoded_bytes: int,
        body_limits: Mapping[str, int],
        max_inflight_bytes_per_key: int,
        max_inflight_bytes: int,
    ) -> None:
        self._overall = {"max_body_bytes": max_body_bytes, "max_decoded_bytes": max_decoded_bytes}
        self._own_limits = body_limits
        self.budget = ByteBudget(max_inflight_bytes_per_key, max_inflight_bytes)
        #: Also for what is made of a body afterwards, such as the tokens of a text.
        self.in_thread = KeyThreads(_THREADS, "tinkex-decode")

    def close(self) -> None:
        self.in_thread.close()

    async def receive(self, row: Operation[object], request: Request, hold: Hold) -> Received:
        """Read the body of a request; refuse it as soon as it is known to exceed the limit."""
        headers = request.headers
        media = _media_of(row, headers.get("content-type", ""), _has_body(headers))
        encoding = headers.get("content-encoding")
        encoded_limit = self._limit(row, media, "max_body_bytes")
        stated = headers.get("content-length", "")
        if stated.isdigit():
            if int(stated) > encoded_limit.bytes:
                raise encoded_limit.error()
            hold.check(int(stated))
        body = await _read(request, hold, encoded_limit)
        if encoding and body:
            body = await self._decompressed(row, media, body, encoding, hold)
        return Received(body, media)

    async def decode(self, row: Operation[object], owner: str, received: Received) -> Any:
        """Decode a body into the request of its operation."""
        body, media = received.body, received.media
        return await self.off_loop(owner, len(body), decoding.decode, row, body, media)

    async def peek(self, owner: str, received: Received) -> Any:
        """Read what is readable of a body that could not be decoded as a request."""
        body, media = received.body, received.media
        return await self.off_loop(owner, len(body), decoding.peek, body, media)

    async def off_loop(self, owner: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` on `size` bytes: on the event loop if they are few, otherwise in a thread.

        Each key uses one thread at a time, so its large requests delay each other, not those of other keys.
        """
        if size < OFF_LOOP_BYTES:
            return work(*arguments)
        return await self.in_thread(owner, work, *arguments)

    async def _decompressed(
        self, row: Operation[object], media: str, body: bytes, encoding: str, hold: Hold
    ) -> bytes:
        limit = self._limit(row, media, "max_decoded_bytes")
        size = announced_size(body, encoding)
        if size is None:
            size = limit.bytes  # unknown: assume the largest allowed
        elif size > limit.bytes:
            raise limit.error()
        hold.take(size)
        return await self.off_loop(
            hold.owner,
            size,
            lambda: decode_body(
                body, encoding, max_size=limit.bytes, too_large=lambda _: limit.error()
            ),
        )

    def _limit(self, row: Operation[object], media: str, setting: str) -> _Limit:
        own = self._own_limits.get(row.name)
        if own is None:
            own = row.limits.json if media == "json" else row.limits.protobuf
        overall = self._overall[setting]
        if own <= overall:
            return _Limit(row.name, own, f"--body-limit {row.name}=BYTES")
        return _Limit(row.name, overall, f"--set {setting}=BYTES")


@dataclass(frozen=True, slots=True)
class _Limit:
    """The largest allowed body of an operation, and the option that raises the limit."""

    operation: str
    bytes: int
    setting: str

    def error(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"The body of {self.operation} is larger than {self.bytes} bytes; send less at a time. "
            f"The operator of the service raises the limit with {self.setting}."
        )


def read_body_limit(text: str) -> tuple[str, int]:
    """Parse an option value OPERATION=BYTES: the largest body of one operation."""
    name, _, size = text.partition("=")
    rows = [
        *OPERATIONS.values(),
        *(row.operation for row in SERVING.values()),
        *LOCAL_OPERATIONS,
    ]
    known = [row.name for row in rows if row.body in {Body.JSON, Body.JSON_OR_PROTO}]
    if name not in known:
        raise ConfigError(
            f"there is no operation {name!r:.80} with a body; choose from {', '.join(known)}",
            field="body_limit",
        )
    if not (size.isascii() and size.isdigit()):
        raise ConfigError(
            f"must be a whole number of bytes, got {size!r:.60}", field=f"body_limit {name}"
        )
    return name, int(size)


async def _read(request: Request, hold: Hold, limit: _Limit) -> bytes:
    whole, size = b"", 0
    joined: bytearray | None = None  # not a list of parts: a slow peer may send one byte per part
    async for part in request.stream():
        size += len(part)
        if size > limit.bytes:
            raise limit.error()
        hold.take(len(part))
        if not size or size == len(part):
            whole = part
            continue
        if joined is None:
            joined = bytearray(whole)
        joined += part
    return whole if joined is None else bytes(joined)


def _has_body(headers: Any) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _media_of(row: Operation[object], content_type: str, has_body: bool) -> str:
    """The format of a body; refuse anything but JSON and protobuf.

    A web page can make a browser post text and forms to this machine without a preflight request, but not these two.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media == decoding.JSON or not has_body:
        return "json"
    if media == PROTOBUF and row.body is Body.JSON_OR_PROTO:
        return "proto"
    taken = decoding.JSON
    if row.body is Body.JSON_OR_PROTO:
        taken += f" or {PROTOBUF}"
    given = f"not {media:.80}" if media else "but the request has none"
    raise UnsupportedMediaTypeError(f"The content type of {row.name} must be {taken}, {given}.")
