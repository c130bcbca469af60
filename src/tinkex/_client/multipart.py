"""File uploads: `multipart/form-data` bodies.

The body is built here and not by the HTTP library, because a retry must send exactly the same bytes.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from tinkex._wire.transform import transform
from tinkex.errors import InvalidInputError

__all__ = ["File", "Files", "encode_multipart"]

Content: TypeAlias = bytes | str | os.PathLike[str] | IO[bytes]
#: The content, or `(filename, content[, content type[, headers]])`. Only a path object is read as a file; a
#: string is content.
File: TypeAlias = Content | tuple[Any, ...]
Files: TypeAlias = Mapping[str, File] | Sequence[tuple[str, File]]

_BOUNDARY = re.compile(r'boundary="?([^";]+)"?', re.IGNORECASE)


def encode_multipart(
    fields: Mapping[str, Any], files: Files, content_type: str | None = None
) -> tuple[bytes, str]:
    """The body and its content type. A boundary in the given content type is kept."""
    if not isinstance(fields, Mapping):
        raise InvalidInputError(
            f"must be a mapping when files are sent, not {type(fields).__name__}", field="body"
        )
    chosen = _BOUNDARY.search(content_type or "")
    boundary = chosen.group(1) if chosen else secrets.token_hex(16)
    parts = [_field(name, value) for name, value in _flat(transform(fields) or {})]
    listed = files.items() if isinstance(files, Mapping) else files
    parts += [_file(name, file) for name, file in listed]
    delimiter = f"--{boundary}\r\n".encode()
    body = b"".join(delimiter + part + b"\r\n" for part in parts)
    named = content_type if chosen else f"multipart/form-data; boundary={boundary}"
    return body + f"--{boundary}--\r\n".encode(), str(named)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Form fields of nested data: `a[b]` for mappings, `tags[]` for lists."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{key}[{name}]" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item, f"{key}[]")
    elif value is None:
        yield key, ""
    else:
        yield key, str(value).lower() if isinstance(value, bool) else str(value)


def _field(name: str, value: str) -> bytes:
    return f'Content-Disposition: form-data; name="{_quoted(name)}"\r\n\r\n{value}'.encode()


def _file(name: str, file: File) -> bytes:
    parts: tuple[Any, ...] = file if isinstance(file, tuple) else (_name_of(file), file)
    if not 2 <= len(parts) <= 4:
        raise InvalidInputError(
            "expected (filename, content[, content type[, headers]])", field=f"files.{name}"
        )
    filename, content, content_type, headers = (*parts, None, None)[:4]
    disposition = f'form-data; name="{_quoted(name)}"'
    if filename is not None:
        disposition += f'; filename="{_quoted(str(filename))}"'
    lines = [
        f"Content-Disposition: {disposition}",
        f"Content-Type: {content_type or 'application/octet-stream'}",
        *(f"{key}: {value}" for key, value in _pairs(headers)),
    ]
    if any("\r" in line or "\n" in line for line in lines):
        raise InvalidInputError("a header holds a line break", field=f"files.{name}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + _read(content, name)


def _pairs(headers: Any) -> Iterable[tuple[str, str]]:
    if headers is None:
        return ()
    return headers.items() if isinstance(headers, Mapping) else headers


def _name_of(content: Any) -> str:
    name = content if isinstance(content, os.PathLike) else getattr(content, "name", None)
    return Path(name).name if isinstance(name, str | os.PathLike) else "upload"


def _read(content: Any, name: str) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    try:
        data = Path(content).read_bytes() if isinstance(content, os.PathLike) else content.read()
    except (OSError, AttributeError) as error:
        raise InvalidInputError(f"cannot be read: {error}", field=f"files.{name}") from error
    return data.encode() if isinstance(data, str) else bytes(data)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
