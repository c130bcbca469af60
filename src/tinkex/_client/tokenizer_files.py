"""Tokenizer files of a service on another machine: downloaded once, checked, and cached by checksum."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tinkex._wire.lazy_codecs import json_codec
from tinkex.config import read_env
from tinkex.errors import APIResponseValidationError, DecodeError, InvalidInputError
from tinkex.types._tokenizer_files import (
    TOKENIZER_FILES,
    TokenizerFile,
    TokenizerFilesResponse,
    tokenizer_digest,
)

from .http import HTTPClient
from .session import Session
from .tokenizers import is_path, tokenizer_id

__all__ = ["loadable_tokenizer", "tokenizer_cache"]

#: Largest file accepted, in bytes. The largest known tokenizers have about 35 MB.
_MOST: Final = 512 << 20


def loadable_tokenizer(
    session: Session, model_name: str, stated: str | None, sha256: str | None
) -> str:
    """What to load: the tokenizer id that the service states, or a local directory with its files.

    A path on the service's machine is useless elsewhere, so the files are downloaded from a remote service.
    """
    name = tokenizer_id(model_name, stated)
    if is_path(name) and Path(name).is_dir() and (sha256 is None or session.config.is_loopback):
        return name
    if sha256 is not None and model_name:
        return str(_downloaded(session, model_name, sha256))
    if is_path(name):
        raise InvalidInputError(
            f"the service names {name}, a path on its own machine, and offers no download; load the tokenizer "
            "of this model by hand, or name another with set_tokenizer_loader",
            field="tokenizer",
        )
    return name


def tokenizer_cache() -> Path:
    """The cache of downloaded tokenizers, with one directory per checksum."""
    cache = read_env("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tinkex" / "tokenizers"


def _downloaded(session: Session, model_name: str, sha256: str) -> Path:
    target = tokenizer_cache() / sha256
    if target.is_dir():  # always complete: it is renamed into place
        return target
    http, path = HTTPClient(session), f"/local/tokenizers/{quote(model_name)}"
    files = _listed(http, path, sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{sha256}.{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        for file in files:
            (scratch / file.name).write_bytes(_content(http, path, file))
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # if it is, another process downloaded it first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _listed(http: HTTPClient, path: str, sha256: str) -> list[TokenizerFile]:
    try:
        listed = json_codec.from_object(http.get(path).result(), TokenizerFilesResponse)
    except DecodeError as error:
        raise _not_as_promised(f"the list of its files cannot be read: {error}") from error
    for file in listed.files:
        # Only known names are accepted: no file is written elsewhere, and no code is downloaded.
        if file.name not in TOKENIZER_FILES or file.size > _MOST:
            raise _not_as_promised(
                f"{file.name!r:.80} of {file.size} bytes is not a tokenizer file"
            )
    if tokenizer_digest(listed.files) != sha256:
        raise _not_as_promised("its checksum differs from the one that the service states")
    return listed.files


def _content(http: HTTPClient, path: str, file: TokenizerFile) -> bytes:
    content = http.with_raw_response("GET", f"{path}/files/{file.name}").result().body
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise _not_as_promised(f"the checksum of {file.name} is wrong")
    return content


def _not_as_promised(why: str) -> APIResponseValidationError:
    return APIResponseValidationError(message=f"The service's tokenizer is refused: {why}.")
