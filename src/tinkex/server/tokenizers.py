"""Serves the tokenizer files of base models to clients on other machines."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tinkex._wire import json_codec
from tinkex.engine.base_models import PreparedModel
from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.types._tokenizer_files import (
    TOKENIZER_FILES,
    TokenizerFile,
    TokenizerFilesResponse,
    tokenizer_digest,
)

from .service import Service

__all__ = ["FILES_PATH", "PATH", "file", "hub_id", "listed", "tokenizer_files"]

PATH: Final = "/local/tokenizers/{base_model:path}"
FILES_PATH: Final = "/local/tokenizers/{base_model:path}/files/{name}"

_Stamp = tuple[tuple[str, int, int], ...]
_lock = threading.Lock()
_known: dict[Path, tuple[_Stamp, list[TokenizerFile]]] = {}


async def listed(service: Service, request: Request) -> Response:
    """The names, sizes and checksums of a model's tokenizer files."""
    base = await _base_model(service, request)
    files = await service.files(tokenizer_files, base.directory)
    answer = TokenizerFilesResponse(
        base_model=base.name, sha256=tokenizer_digest(files), files=files
    )
    headers = _caching(answer.sha256)
    if _has_it(request.headers, headers):
        return Response(status_code=304, headers=headers)
    return Response(json_codec.encode(answer), media_type="application/json", headers=headers)


async def file(service: Service, request: Request) -> Response:
    """One tokenizer file; its checksum is its ETag."""
    base = await _base_model(service, request)
    name = request.path_params["name"]
    for known in await service.files(tokenizer_files, base.directory):
        if known.name == name:  # only a name from the list is ever opened
            headers = _caching(known.sha256)
            if _has_it(request.headers, headers):
                return Response(status_code=304, headers=headers)
            kind = "application/octet-stream"
            return FileResponse(base.directory / known.name, media_type=kind, headers=headers)
    raise NotFoundError(f"The tokenizer of {base.name} has no file {name!r:.80}.")


async def _base_model(service: Service, request: Request) -> PreparedModel:
    try:
        return await service.engine.catalog.model(request.path_params["base_model"], "base_model")
    except InvalidInputError as error:
        raise NotFoundError(str(error)) from error


def tokenizer_files(directory: Path) -> list[TokenizerFile]:
    """The files of a tokenizer with their checksums, cached until a size or modification time changes."""
    present = [directory / name for name in sorted(TOKENIZER_FILES) if (directory / name).is_file()]
    stats = [(path.name, path.stat()) for path in present]
    stamp = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    with _lock:
        known = _known.get(directory)
        if known is None or known[0] != stamp:
            files = [
                TokenizerFile(name=path.name, size=path.stat().st_size, sha256=_checksum(path))
                for path in present
            ]
            known = _known[directory] = (stamp, files)
        return known[1]


def hub_id(directory: Path) -> str | None:
    """The hub id of a model in the hub's cache: `models--<owner>--<name>/snapshots/<revision>`."""
    cached = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not cached.startswith("models--"):
        return None
    return cached.removeprefix("models--").replace("--", "/")


def _checksum(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _caching(sha256: str) -> dict[str, str]:
    # Clients revalidate each time, usually with a 304: the files of a base model may be replaced.
    return {"etag": f'"{sha256}"', "cache-control": "private, no-cache"}


def _has_it(asked: Mapping[str, str], headers: Mapping[str, str]) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in asked.get("if-none-match", "").split(",")]
    return headers["etag"] in tags or "*" in tags
