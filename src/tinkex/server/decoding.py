"""Bodies as values: checks of their shape, then the codecs of the wire. Pure functions that any thread may run."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any, Final

from google.protobuf.message import DecodeError as ProtobufDecodeError

from tinkex._wire import json_codec, proto_codec
from tinkex._wire.operations import Operation
from tinkex._wire.proto_size import has_more_fields
from tinkex._wire.tinkex_pb2 import ForwardBackwardRequest
from tinkex.errors import DecodeError, InvalidInputError, PayloadTooLargeError
from tinkex.types import TelemetrySendRequest, telemetry_event

__all__ = ["JSON", "checked_json", "decode", "peek"]

JSON: Final = "application/json"

#: Nesting depth of objects and lists in a body. No request of the protocol has more than ten levels. What is stored as
#: JSON must stay below the recursion limit of the programs that read it.
MAX_DEPTH: Final = 64
#: The smallest field of a protobuf message has two bytes.
_FIELD_BYTES: Final = 2


def decode(row: Operation[object], body: bytes, media: str) -> Any:
    """The request that a body holds."""
    if media == "proto":
        items = row.limits.items
        if len(body) > items * _FIELD_BYTES and has_more_fields(
            body, ForwardBackwardRequest.DESCRIPTOR, items
        ):
            raise _too_many(row, "fields")
        return proto_codec.decode_forward_backward_request(body)
    content = checked_json(row, body)
    if isinstance(content, dict) and isinstance(content.get("seq_id"), float):
        # Official clients 0.13.0 send sequence numbers over 64 bits for copied sampling clients. The fast JSON reader
        # reads these as floats.
        with contextlib.suppress(ValueError):
            content = json.loads(body)
    if row.request is TelemetrySendRequest and isinstance(content, dict):
        # Unreadable events are dropped from their batch.
        events = content.get("events")
        listed = events if isinstance(events, list) else ()
        known = [event for event in listed if telemetry_event(event) is not None]
        content = content | {"events": known}
    try:
        return json_codec.from_object(content, row.request)
    except DecodeError as error:
        if error.field is None or error.field != row.refused_field:
            raise
        complaint = str(error).removeprefix(f"{error.field}: ")
        raise InvalidInputError(complaint, field=error.field) from error


def checked_json(row: Operation[object], body: bytes) -> Any:
    """Parse a JSON body; refuse one with too many objects and lists, or nested too deep."""
    containers = body.count(b"{") + body.count(b"[")
    if containers > row.limits.items:
        raise _too_many(row, "objects and lists")
    content = json_codec.parse(body)
    if containers > MAX_DEPTH and _is_deeper(content, MAX_DEPTH):
        raise DecodeError(f"is nested more than {MAX_DEPTH} levels deep", field="body")
    return content


def _too_many(row: Operation[object], what: str) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The body of {row.name} holds more than {row.limits.items} {what}; send it in several requests."
    )


def _is_deeper(content: Any, limit: int) -> bool:
    level = [content]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def peek(body: bytes, media: str) -> Any:
    """The `model_id` and `seq_id` of an invalid request, as far as they can be read."""
    if media == "proto":
        message = ForwardBackwardRequest()
        with contextlib.suppress(ProtobufDecodeError):
            message.ParseFromString(body)
        return message
    with contextlib.suppress(DecodeError):
        content = json_codec.parse(body)
        if isinstance(content, dict):
            return SimpleNamespace(model_id=content.get("model_id"), seq_id=content.get("seq_id"))
    return None
