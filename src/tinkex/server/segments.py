"""The format of journal files: writes records, and finds them again in a damaged file.

A segment starts with a random marker, and so does each of its records. Clients do not know the marker, so no data of
theirs can look like a record: after damage, the next marker is where the next record starts. The header of a record has
its own checksum and is written twice, before and after the body. One flipped bit therefore destroys at most one
body or one head, and the header still tells what was lost: the run, the kind and the number.

Segments of version 1 are read but never written. They have one checksum per record, so everything after a damaged
header is lost.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import orjson

__all__ = [
    "PROLOGUE_BYTES",
    "BodyPosition",
    "Damage",
    "Kind",
    "Record",
    "Torn",
    "Writer",
    "scan",
    "scope_sum",
]

_MAGIC: Final = b"tinkexj2"
_MAGIC_1: Final = b"tinkexj1"
_MARKER_BYTES: Final = 8
_COPY_BYTES: Final = _MARKER_BYTES + 4
#: The magic, then two copies of the marker with its checksum.
PROLOGUE_BYTES: Final = len(_MAGIC) + 2 * _COPY_BYTES
#: Marker, checksum of the rest, kind, number, lengths of head and body, checksums of head, body and scope.
_HEADER: Final = struct.Struct("<8sIBQIIIII")
#: Version 1: checksum of all that follows, kind, number, lengths of head and body.
_HEADER_1: Final = struct.Struct("<IBQII")
#: Set in the kind of the header that follows the body.
_BEHIND: Final = 0x80


class Kind(IntEnum):
    REQUEST = 1
    RESULT = 2


_KINDS: Final = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class BodyPosition:
    """The position of a record's body."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the journal: a small `head` that describes it, and the place of its body."""

    number: int
    kind: Kind
    head: dict[str, Any]
    place: BodyPosition


@dataclass(frozen=True, slots=True)
class Damage:
    """Unreadable bytes of a segment, and what is known about the lost record.

    `record` is set if only its body is damaged. If its head is damaged too, only `kind` and `scope` (see `scope_sum`) are
    set. If they are None as well, any number of records of any run may be lost.
    """

    offset: int
    length: int
    record: Record | None = None
    kind: Kind | None = None
    scope: int | None = None


@dataclass(frozen=True, slots=True)
class Torn:
    """The end of a segment whose last write was interrupted: the record was never acknowledged."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Header:
    kind: Kind
    number: int
    head_size: int
    body_size: int
    head_sum: int
    body_sum: int
    scope: int
    behind: bool

    @property
    def size(self) -> int:
        """The size of the whole record in bytes."""
        return 2 * _HEADER.size + self.head_size + self.body_size


def scope_sum(scope: str) -> int:
    """The checksum of a scope, which the header stores to identify the run of a record."""
    return zlib.crc32(scope.encode())


class Writer:
    """Encodes the records of one segment."""

    def __init__(self) -> None:
        self._marker = secrets.token_bytes(_MARKER_BYTES)

    @classmethod
    def of(cls, descriptor: int) -> Writer | None:
        """The writer of an existing segment; None if no records may be added to it."""
        marker = _marker(descriptor)
        if marker is None:
            return None
        writer = cls()
        writer._marker = marker
        return writer

    @property
    def prologue(self) -> bytes:
        copy = self._marker + zlib.crc32(self._marker).to_bytes(4, "little")
        return _MAGIC + copy + copy

    def record(self, number: int, kind: Kind, head: dict[str, Any], body: bytes) -> list[bytes]:
        """The bytes before the body, the body, and the bytes after it."""
        head_bytes = orjson.dumps(head)
        facts = (
            number,
            len(head_bytes),
            len(body),
            zlib.crc32(head_bytes),
            zlib.crc32(body),
            scope_sum(head.get("scope") or ""),
        )
        before, behind = (self._header(kind | flag, *facts) for flag in (0, _BEHIND))
        return [before + head_bytes, body, behind]

    def _header(self, *facts: int) -> bytes:
        header = _HEADER.pack(self._marker, 0, *facts)
        checksum = zlib.crc32(header).to_bytes(4, "little")
        return header[:_MARKER_BYTES] + checksum + header[_MARKER_BYTES + 4 :]


def scan(descriptor: int, segment: int) -> Iterator[Record | Damage | Torn]:
    """The entries of a segment in file order; a torn end comes last."""
    size = os.fstat(descriptor).st_size
    magic = os.pread(descriptor, len(_MAGIC), 0)
    marker = _marker(descriptor)
    if magic == _MAGIC_1:
        yield from _scan_1(descriptor, segment, size)
    elif marker is not None:
        yield from _Scan(descriptor, segment, size, marker).entries()
    elif size <= PROLOGUE_BYTES or not any(os.pread(descriptor, size, 0)):
        yield Torn(0, size)
    else:
        yield Damage(0, size)


def _marker(descriptor: int) -> bytes | None:
    """The marker of a segment, from the first copy with a valid checksum."""
    prologue = os.pread(descriptor, PROLOGUE_BYTES, 0)
    if len(prologue) < PROLOGUE_BYTES:
        return None
    for at in (len(_MAGIC), len(_MAGIC) + _COPY_BYTES):
        marker, checksum = prologue[at : at + _MARKER_BYTES], prologue[at + _MARKER_BYTES :][:4]
        if any(marker) and zlib.crc32(marker).to_bytes(4, "little") == checksum:
            return marker
    return None


class _Scan:
    """Reads one segment of version 2."""

    def __init__(self, descriptor: int, segment: int, size: int, marker: bytes) -> None:
        self._descriptor = descriptor
        self._segment = segment
        self._size = size
        self._marker = marker

    def entries(self) -> Iterator[Record | Damage | Torn]:
        offset = PROLOGUE_BYTES
        while offset < self._size:
            header = self._header(offset)
            if header is None or header.behind:
                begin, header = self._next(offset)
                if header is None:
                    yield self._end(offset)
                    return
                if begin > offset:
                    yield Damage(offset, begin - offset)
                offset = begin
            if offset + header.size > self._size:
                yield Torn(offset, self._size - offset)
                return
            entry = self._entry(offset, header)
            if isinstance(entry, Damage) and self._is_unwritten(offset, header):
                yield Torn(offset, self._size - offset)
                return
            yield entry
            offset += header.size

    def _header(self, offset: int) -> _Header | None:
        """The header at an offset; None if there is no valid one."""
        raw = os.pread(self._descriptor, _HEADER.size, offset)
        if len(raw) < _HEADER.size or not raw.startswith(self._marker):
            return None
        _, checksum, kind, number, head, body, head_sum, body_sum, scope = _HEADER.unpack(raw)
        if zlib.crc32(raw[:_MARKER_BYTES] + bytes(4) + raw[_MARKER_BYTES + 4 :]) != checksum:
            return None
        if kind & ~_BEHIND not in _KINDS:
            return None
        behind = bool(kind & _BEHIND)
        return _Header(Kind(kind & ~_BEHIND), number, head, body, head_sum, body_sum, scope, behind)

    def _next(self, offset: int) -> tuple[int, _Header | None]:
        """The first record that starts at `offset` or later, found by the header before or after its body."""
        rest = os.pread(self._descriptor, self._size - offset, offset)
        at = rest.find(self._marker)
        while at >= 0:
            header = self._header(offset + at)
            if header is not None:
                begin = at - (header.size - _HEADER.size) if header.behind else at
                if begin >= 0:
                    return offset + begin, header
            at = rest.find(self._marker, at + 1)
        return self._size, None

    def _entry(self, offset: int, header: _Header) -> Record | Damage:
        head_at = offset + _HEADER.size
        content = os.pread(self._descriptor, header.head_size + header.body_size, head_at)
        head = content[: header.head_size]
        if zlib.crc32(head) != header.head_sum:
            return Damage(offset, header.size, kind=header.kind, scope=header.scope)
        place = BodyPosition(self._segment, head_at + header.head_size, header.body_size)
        record = Record(header.number, header.kind, orjson.loads(head), place)
        if zlib.crc32(memoryview(content)[header.head_size :]) != header.body_sum:
            return Damage(offset, header.size, record, header.kind, header.scope)
        return record

    def _is_unwritten(self, offset: int, header: _Header) -> bool:
        """Whether the file ends with zeros where the end of a record should be: only the file size reached the disk."""
        end = offset + header.size
        return end == self._size and not any(
            os.pread(self._descriptor, _HEADER.size, end - _HEADER.size)
        )

    def _end(self, offset: int) -> Damage | Torn:
        """Classify the bytes after the last record."""
        rest = os.pread(self._descriptor, self._size - offset, offset)
        # An interrupted write leaves the start of a record, or zeros in its place.
        if len(rest.rstrip(b"\0")) < _HEADER.size:
            return Torn(offset, len(rest))
        return Damage(offset, len(rest))


def _scan_1(descriptor: int, segment: int, size: int) -> Iterator[Record | Damage | Torn]:
    offset = len(_MAGIC_1)
    while offset < size:
        header = os.pread(descriptor, _HEADER_1.size, offset)
        if len(header) < _HEADER_1.size or not any(header):
            yield Torn(offset, size - offset)
            return
        checksum, kind, number, head_size, body_size = _HEADER_1.unpack(header)
        body_at = offset + _HEADER_1.size + head_size
        end = body_at + body_size
        if kind not in _KINDS:
            yield Damage(offset, size - offset)
            return
        if end > size:  # a damaged length looks the same
            yield Torn(offset, size - offset)
            return
        rest = os.pread(descriptor, head_size + body_size, offset + _HEADER_1.size)
        if zlib.crc32(rest, zlib.crc32(header[4:])) == checksum:
            place = BodyPosition(segment, body_at, body_size)
            yield Record(number, Kind(kind), orjson.loads(rest[:head_size]), place)
        else:
            yield Damage(offset, end - offset)
        offset = end
