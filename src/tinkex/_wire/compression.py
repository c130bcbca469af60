"""Content encodings of HTTP bodies, with a limit on the decompressed size.

A body of a few kilobytes can announce, or expand to, gigabytes. Such a body is refused before it takes much more
memory than the caller allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Protocol

from tinkex.errors import DecodeError

__all__ = ["announced_size", "compress", "decode_body", "decompress"]

_MAX_SIZE = 1 << 30

# The largest window that a zstd body may use in HTTP (RFC 9659).
_ZSTD_MAX_WINDOW = 8 << 20

# Bytes of input to decode at a time, so that one step yields at most some 8 MiB: four bytes of
# zstd can expand to a block of 128 KiB, and deflate compresses up to 1032 to 1.
_ZSTD_STEP = 256
_ZLIB_STEP = 8 << 10

# Every encoding may cost as much as the whole limit; ordinary bodies have one.
_MAX_ENCODINGS = 4


def compress(data: bytes) -> bytes:
    """Return `data` as one zstd frame that announces its content size."""
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def decompress(
    data: bytes, *, max_size: int = _MAX_SIZE, too_large: Callable[[int], Exception] | None = None
) -> bytes:
    """Return the content of `data`, which must be exactly one zstd frame."""
    refusal = too_large or _too_large
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW)
    try:
        announced = zstandard.get_frame_parameters(data).content_size
        # If the announced size is zero, zstandard leaves the rest of the frame unread.
        if announced in {0, zstandard.CONTENTSIZE_UNKNOWN}:
            return _decode(decompressor.decompressobj(), data, _ZSTD_STEP, max_size, refusal)
        if announced > max_size:
            raise refusal(max_size)
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"not a zstd frame: {error}", field="body") from error


def decode_body(
    data: bytes,
    content_encoding: str | None,
    *,
    max_size: int = _MAX_SIZE,
    too_large: Callable[[int], Exception] | None = None,
) -> bytes:
    """Undo the encodings of a `Content-Encoding` header, the last one first.

    `too_large` creates the error for content of more than `max_size` bytes.
    """
    refusal = too_large or _too_large
    encodings = _parse_encodings(content_encoding)
    # Answers without a body (HEAD, 204, 304) may still name an encoding.
    if data:
        for encoding in reversed(encodings):
            data = _undo(encoding, data, max_size, refusal)
    if len(data) > max_size:
        raise refusal(max_size)
    return data


def announced_size(data: bytes, content_encoding: str | None) -> int | None:
    """The decompressed size that a single zstd frame announces; None if it announces none."""
    if (content_encoding or "").strip().lower() != "zstd":
        return None
    import zstandard

    try:
        size = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError:
        return None
    return None if size in {0, zstandard.CONTENTSIZE_UNKNOWN} else size


def _parse_encodings(header: str | None) -> list[str]:
    names = [name.strip().lower() for name in (header or "").split(",")]
    encodings = [name for name in names if name not in {"", "identity"}]
    if len(encodings) > _MAX_ENCODINGS:
        raise DecodeError(f"more than {_MAX_ENCODINGS} encodings", field="content-encoding")
    for encoding in encodings:
        if encoding not in {"zstd", "gzip", "x-gzip", "deflate"}:
            raise DecodeError(f"unknown encoding {encoding!r}", field="content-encoding")
    return encodings


def _undo(
    encoding: str, data: bytes, max_size: int, too_large: Callable[[int], Exception]
) -> bytes:
    if encoding == "zstd":
        return decompress(data, max_size=max_size, too_large=too_large)
    wbits = _deflate_wbits(data) if encoding == "deflate" else 16 + zlib.MAX_WBITS
    try:
        return _decode(zlib.decompressobj(wbits), data, _ZLIB_STEP, max_size, too_large)
    except zlib.error as error:
        raise DecodeError(f"not {encoding} data: {error}", field="body") from error


def _deflate_wbits(data: bytes) -> int:
    # "deflate" means the zlib format, but some senders omit its two-byte header.
    header = int.from_bytes(data[:2])
    has_header = header >> 8 & 0x0F == zlib.DEFLATED and header % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _decode(
    decoder: _Decoder,
    data: bytes,
    step: int,
    max_size: int,
    too_large: Callable[[int], Exception],
) -> bytes:
    # BytesIO returns its buffer without a copy; joining a list would need the memory twice.
    content = BytesIO()
    for start in range(0, len(data), step):
        content.write(decoder.decompress(data[start : start + step]))
        if content.tell() > max_size:
            raise too_large(max_size)
        if decoder.eof:
            if decoder.unused_data or start + step < len(data):
                raise DecodeError("bytes after the end of the compressed data", field="body")
            return content.getvalue()
    raise DecodeError("compressed data ends early", field="body")


def _too_large(max_size: int) -> DecodeError:
    return DecodeError(f"larger than {max_size} bytes when decompressed", field="body")
