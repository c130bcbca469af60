"""Counts the fields of a protobuf message in its bytes, before it is parsed.

A field of two bytes becomes an object of a hundred bytes. If it were parsed first, a body of a few megabytes could take
gigabytes.
"""

from __future__ import annotations

from typing import Any

from tinkex.errors import DecodeError

__all__ = ["has_more_fields"]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def has_more_fields(data: bytes, descriptor: Any, limit: int) -> bool:
    """Whether a message of the type `descriptor`, including nested messages, has more than `limit` fields.

    Each byte of a packed list of numbers counts as one: a single byte can become a number of eight bytes.
    """
    count = 0
    pending = [(0, len(data), descriptor)]
    while pending:
        position, end, kind = pending.pop()
        fields = kind.fields_by_number
        while position < end:
            count += 1
            if count > limit:
                return True
            tag, position = _varint(data, position, end)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, position = _varint(data, position, end)
            elif wire_type == _FIXED64:
                position += 8
            elif wire_type == _FIXED32:
                position += 4
            elif wire_type == _LENGTH:
                size, position = _varint(data, position, end)
                field = fields.get(tag >> 3)
                if position + size > end:
                    raise _cut_short()
                if field is not None and field.message_type is not None:
                    pending.append((position, position + size, field.message_type))
                elif field is not None and field.type not in {field.TYPE_BYTES, field.TYPE_STRING}:
                    count += size
                position += size
            else:  # groups, which proto3 does not have
                raise DecodeError(f"has a field of wire type {wire_type}", field="body")
    return count > limit


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _cut_short()


def _cut_short() -> DecodeError:
    return DecodeError("is not a protobuf message: it ends in the middle of a field", field="body")
