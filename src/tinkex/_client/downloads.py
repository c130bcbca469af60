"""Checkpoints onto the disk: streamed, resumed when the connection breaks, checked, and all or nothing.

What arrives is unpacked beside its destination and moved there in one step, so a destination is either the whole
checkpoint or what it was before.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    InvalidInputError,
    InvalidPathError,
    status_error_class,
)
from tinkex.types import ParsedCheckpointTinkerPath

__all__ = ["Progress", "download_checkpoint", "fetch", "target_name", "unpack"]

Progress = Callable[[int, int | None], None]

_CHUNK: Final = 1 << 20
_ATTEMPTS: Final = 8
_LONGEST_WAIT: Final = 10.0
_MANIFEST: Final = "tinkex.json"


def target_name(tinker_path: str) -> str:
    """The directory a checkpoint is put into: its path with `_` for `/`."""
    ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return tinker_path.removeprefix("tinker://").replace("/", "_").replace(":", "_")


def download_checkpoint(
    rest: Any,
    tinker_path: str,
    output: Path,
    *,
    force: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> Path:
    """Download a checkpoint into a directory below `output`; the directory.

    One that is there already is kept, unless `force` replaces it by the new one once that is complete.
    """
    destination = output / target_name(tinker_path)
    if destination.exists() and not force:
        raise InvalidInputError(f"{destination} exists; force replaces it", field="output")
    output.mkdir(parents=True, exist_ok=True)
    with _scratch(output) as scratch:
        unpacked = scratch / "files"
        unpacked.mkdir()
        if ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).checkpoint_type == "external":
            urls = rest.get_external_weights_urls(tinker_path).result().urls
            for name, url in urls.items():
                fetch(url, unpacked / _plain(name), progress)
        else:
            url = rest.get_checkpoint_archive_url_from_tinker_path(tinker_path).result().url
            archive = scratch / "archive"
            fetch(url, archive, progress)
            unpack(archive, unpacked)
        verify(unpacked)
        _replace(unpacked, destination, scratch)
    return destination


# -- fetching --------------------------------------------------------------------------------------


def fetch(
    url: str,
    target: Path,
    progress: Progress = lambda _done, _total: None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Stream a URL into a file; a connection that breaks is taken up where it broke."""
    if not url.startswith(("http://", "https://")):
        raise APIResponseValidationError(message=f"The service sent a URL that is none: {url:.200}")
    failures = 0
    with target.open("wb") as file:
        total: int | None = None
        while True:
            before = file.tell()
            try:
                total = _fetch_from(url, file, total, progress)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise status_error_class(error.code)(
                        f"The download was refused: {error.code} {error.reason}."
                    ) from error
                failures = 0 if file.tell() > before else failures + 1
                if failures >= _ATTEMPTS:
                    raise APIConnectionError(message=f"The download broke off: {error}") from error
                sleep(min(_LONGEST_WAIT, 0.5 * 2**failures))
                continue
            if total is None or file.tell() >= total:
                return


def _fetch_from(url: str, file: BinaryIO, total: int | None, progress: Progress) -> int | None:
    """Read on from where the file ends; the size of the whole, if the server says it."""
    have = file.tell()
    request = urllib.request.Request(url, headers={"range": f"bytes={have}-"} if have else {})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - checked by `fetch`
        if have and response.status != 206:  # it begins anew
            file.seek(0)
            file.truncate()
            have = 0
        length = response.headers.get("content-length")
        if length is not None:
            total = have + int(length)
        while part := response.read(_CHUNK):
            file.write(part)
            progress(file.tell(), total)
    if total is not None and file.tell() < total:
        raise ConnectionError(f"{file.tell()} of {total} bytes arrived")
    return total


# -- unpacking -------------------------------------------------------------------------------------


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar, compressed or not; members that could reach outside `target` are refused first."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _check_member(member)
                tar.extract(member, target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise APIResponseValidationError(
            message=f"The archive could not be unpacked: {error}"
        ) from error


def _check_member(member: tarfile.TarInfo) -> None:
    name = Path(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise InvalidPathError(f"the archive holds {member.name!r}, which leads out of it")
    if not (member.isreg() or member.isdir()):
        raise InvalidPathError(f"the archive holds {member.name!r}, which is no plain file")


def _plain(name: str) -> str:
    if Path(name).name != name or name in {"", ".", ".."}:
        raise InvalidPathError(f"the service sent a file called {name!r:.200}")
    return name


def verify(directory: Path) -> None:
    """Compare the files with the checksums that came with them, where some did."""
    manifest = directory / _MANIFEST
    if not manifest.is_file():
        return
    for name, expected in json.loads(manifest.read_text()).get("sha256", {}).items():
        with (directory / _plain(name)).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise APIResponseValidationError(message=f"The file {name} arrived damaged.")


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A directory on the same disk that leaves nothing behind."""
    scratch = Path(tempfile.mkdtemp(prefix=".tinkex-", dir=output))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(unpacked: Path, destination: Path, scratch: Path) -> None:
    if destination.exists():
        destination.replace(scratch / "old")
    unpacked.replace(destination)
