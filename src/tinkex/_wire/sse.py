"""Server-sent events, decoded as their bytes arrive.

Follows the WHATWG rules for `text/event-stream` with one difference: a block with only an `event`, `id` or `retry`
is returned too, with empty data, because a caller who reads those fields wants to see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from tinkex.errors import DecodeError

__all__ = ["SSEDecoder", "ServerSentEvent"]

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event; `id` is the latest one in the stream, `retry` is in milliseconds."""

    event: str | None = None
    data: str = ""
    id: str | None = None
    retry: int | None = None

    def json(self) -> Any:
        """The data as JSON, or as text if they are not JSON."""
        try:
            return orjson.loads(self.data)
        except orjson.JSONDecodeError:
            return self.data


class SSEDecoder:
    r"""Turns a stream of bytes into events; the bytes may be split anywhere.

    >>> decoder = SSEDecoder()
    >>> decoder.feed(b"data: hello, wo")
    []
    >>> decoder.feed(b"rld\n\n")
    [ServerSentEvent(event=None, data='hello, world', id=None, retry=None)]

    An event of more than `max_event_bytes` raises `DecodeError`; the decoder has then lost its place in the stream
    and cannot continue.
    """

    def __init__(self, *, max_event_bytes: int = 16 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # the incomplete current line
        self._data = bytearray()  # all data lines so far, each followed by a newline
        self._event: str | None = None
        self._retry: int | None = None
        self._id: str | None = None
        self._has_id = False  # `_id` is kept across events, so it cannot answer this
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that `chunk` completes."""
        if not chunk:
            return []
        # A CR ends its line at once, and an LF right after it is skipped. Waiting for that LF would delay
        # the event until the next bytes.
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        events = []
        for piece in chunk.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            self._append(text)
            if len(text) == len(piece):  # this line is incomplete
                break
            if event := self._end_line():
                events.append(event)
        return events

    def flush(self) -> list[ServerSentEvent]:
        """The incomplete event at the end of the stream, if any; the next `feed` starts a new stream.

        The standard discards such an event, because its data may be incomplete.
        """
        event = self._end_line() or self._end_event()
        self._at_start, self._after_cr = True, False
        return [event] if event else []

    def _append(self, text: bytes) -> None:
        if len(self._data) + len(self._line) + len(text) > self._max_event_bytes:
            raise DecodeError(f"longer than {self._max_event_bytes} bytes", field="event")
        self._line += text

    def _end_line(self) -> ServerSentEvent | None:
        line = bytes(self._line)
        self._line.clear()
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if not line:
            return self._end_event()
        self._read_field(line)
        return None

    def _read_field(self, line: bytes) -> None:
        # Whole lines are decoded, so no character is split. A comment is a field with an empty name and is
        # ignored like any unknown field.
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data += value
                self._data += b"\n"
            case b"event":
                self._event = _text(value)
            case b"id" if b"\0" not in value:
                self._id = _text(value)
                self._has_id = True
            case b"retry" if value.isdigit() and len(value) < 20:  # int() refuses very long numbers
                self._retry = int(value)

    def _end_event(self) -> ServerSentEvent | None:
        has_fields = (
            self._data or self._has_id or self._event is not None or self._retry is not None
        )
        if not has_fields:
            return None
        event = ServerSentEvent(self._event, _text(self._data[:-1]), self._id, self._retry)
        self._data.clear()
        self._event = self._retry = None
        self._has_id = False
        return event


def _text(value: bytes | bytearray) -> str:
    return value.decode("utf-8", errors="replace")
