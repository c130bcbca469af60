"""Downloads checkpoints: streamed, resumed after a broken connection, checked, and atomic.

Files are unpacked next to the destination and moved there in one step. So the destination holds either the whole
checkpoint or its previous content.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import lzma
import re
import secrets
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO, Final

import zstandard

from tinkex._retry import Clock, Tried, exponential, retrying, run_blocking
from tinkex._statuses import facts_of
from tinkex._wire.failures import error_from_response, retry_after
from tinkex.config import Proxy
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    HTTPRequest,
    InvalidInputError,
    InvalidPathError,
)
from tinkex.types import ParsedCheckpointTinkerPath

from .notices import logger

__all__ = ["OnBytes", "download_checkpoint", "fetch", "target", "target_name", "unpack", "verify"]

#: Called as `progress(bytes_done, bytes_total)` after each chunk of a file whose length is known.
OnBytes = Callable[[int, int], object]

_CHUNK: Final = 1 << 20
#: Give up after this many attempts in a row without a new byte.
_ATTEMPTS: Final = 8
_LONGEST_WAIT: Final = 10.0
_MANIFEST: Final = "tinkex.json"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_DAMAGED: Final = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
)


def target_name(tinker_path: str) -> str:
    """The directory name of a checkpoint: its path with `/` and `:` replaced by `_` (Windows forbids `:`)."""
    return _older_name(tinker_path).replace(":", "_")


def _older_name(tinker_path: str) -> str:
    """The directory name that earlier versions used: it keeps `:`."""
    ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return tinker_path.removeprefix("tinker://").replace("/", "_")


def target(output: Path | str, tinker_path: str) -> Path:
    """The directory of a checkpoint below `output`. A directory with the older name is reused."""
    older = Path(output) / _older_name(tinker_path)
    return older if older.is_dir() else older.with_name(target_name(tinker_path))


def download_checkpoint(
    rest: Any,
    tinker_path: str,
    output: Path | str = ".",
    *,
    force: bool = False,
    progress: OnBytes | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Download a checkpoint into a directory below `output` and return that directory.

    An existing directory is an error, unless `force` is set: then it is replaced once the download is complete.
    `progress(done, total)` gets the bytes of each file, if the service states its length.
    """
    output = Path(output)
    destination = target(output, tinker_path)
    if destination.exists() and not force:
        raise InvalidInputError(
            f"{destination} exists", field="output", advice="force=True replaces it"
        )
    get = partial(fetch, progress=progress, proxy=rest.holder.config.proxy, sleep=sleep)
    with _scratch(output) as scratch:
        unpacked = scratch / "files"
        unpacked.mkdir()
        if ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).checkpoint_type == "external":
            _fetch_files(rest, tinker_path, unpacked, get)
        else:
            archive = scratch / "archive"
            get(lambda: _archive_url(rest, tinker_path), archive)
            unpack(archive, unpacked)
        verify(unpacked)
        _replace(unpacked, destination, scratch)
    return destination


def _archive_url(rest: Any, tinker_path: str) -> str:
    url: str = rest.get_checkpoint_archive_url_from_tinker_path(tinker_path).result().url
    return url


def _fetch_files(rest: Any, tinker_path: str, target: Path, get: Callable[..., None]) -> None:
    def urls() -> dict[str, str]:
        found: dict[str, str] = rest.get_external_weights_urls(tinker_path).result().urls
        return found

    def links(name: str, first: str) -> Iterator[str]:
        yield first
        while link := urls().get(name):
            yield link
        raise APIResponseValidationError(message=f"The service no longer lists {name!r:.200}.")

    for name, url in urls().items():
        get(links(name, url).__next__, target / _plain(name))


# -- fetching --------------------------------------------------------------------------------------


def fetch(
    url: str | Callable[[], str],
    target: Path,
    progress: OnBytes | None = None,
    *,
    proxy: Proxy | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Stream a URL into a file. A broken transfer is resumed at the last byte received.

    If `url` is a function, it is called again for a new link when the current one has expired.
    """
    scratch = target.with_name(f".tinkex-{secrets.token_hex(8)}")
    try:
        with scratch.open("w+b") as file:
            transfer = _Transfer(file, progress, proxy)
            _persist(transfer, url, sleep)
            transfer.check()
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _persist(
    transfer: _Transfer, url: str | Callable[[], str], sleep: Callable[[float], None]
) -> None:
    """Retry until the file is complete, or until `_ATTEMPTS` attempts in a row bring no new byte."""
    link, renewed_at, policy = _link(url), -1, _DownloadPolicy(transfer)

    async def once(attempt: int) -> None:
        nonlocal link, renewed_at
        try:
            transfer.go_on(link)
        except APIStatusError as error:
            # A new link refused at the same byte as the previous one: the reason is not expiry.
            expired = facts_of(error.status_code).expired_link
            if not expired or isinstance(url, str) or renewed_at == policy.most:
                raise
            link, renewed_at = _link(url), policy.most
            await once(attempt)

    async def blocking_sleep(seconds: float) -> None:
        sleep(seconds)

    try:
        run_blocking(retrying(once, policy, Clock(sleep=blocking_sleep)))
    except _BrokenError as reason:
        raise APIConnectionError(message=f"The download broke off: {reason}") from reason


@dataclass(slots=True)
class _DownloadPolicy:
    """Resume a broken transfer; give up after `_ATTEMPTS` attempts in a row without a new byte."""

    transfer: _Transfer
    failures: int = 0
    most: int = 0  # largest number of bytes received so far

    def wait_before_retry(self, error: Exception, _: Tried) -> float | None:
        if not isinstance(error, _BrokenError):
            return None
        self.failures = 0 if self.transfer.done > self.most else self.failures + 1
        self.most = max(self.most, self.transfer.done)
        if self.failures >= _ATTEMPTS:
            return None
        if error.wait is not None:
            return min(_LONGEST_WAIT, max(0.0, error.wait))
        return exponential(self.failures, 0.5, _LONGEST_WAIT)


def _link(url: str | Callable[[], str]) -> str:
    link = url if isinstance(url, str) else url()
    if link.startswith("file:"):
        raise APIResponseValidationError(
            message=f"The service names a file on its own disk, {link:.200}; copy it from that machine."
        )
    if not link.startswith(("http://", "https://")):
        raise APIResponseValidationError(message=f"The service sent an invalid URL: {link:.200}")
    return link


class _BrokenError(Exception):
    """A failed attempt; `wait` is the delay in seconds that the service asks for."""

    def __init__(self, message: object, wait: float | None = None) -> None:
        super().__init__(str(message))
        self.wait = wait


class _Transfer:
    """One file being downloaded: the bytes received, and the known length, version and checksums."""

    def __init__(self, file: BufferedRandom, progress: OnBytes | None, proxy: Proxy | None) -> None:
        self._file = file
        self._progress = progress
        self._proxy = proxy
        through = None if proxy is None else {"http": proxy.url, "https": proxy.url}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(through))
        self._total: int | None = None
        self._same: str | None = None  # ETag or Last-Modified, for If-Range
        self._digests: dict[str, bytes] = {}

    @property
    def done(self) -> int:
        """Number of bytes received."""
        return self._file.tell()

    def go_on(self, url: str) -> None:
        """Request the rest of the file and append it."""
        have = self.done
        headers = {"range": f"bytes={have}-"} if have else {}
        if have and self._same is not None:
            headers["if-range"] = self._same
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked by `_link`
        with self._open(request) as response:
            self._learn(response)
            while part := self._read(response):
                self._file.write(part)  # a disk error is not a connection error: no retry
                self._tell()
        if self._total is not None and self.done != self._total:
            raise _BrokenError(f"{self.done} of {self._total} bytes arrived")

    def _tell(self) -> None:
        """Report progress. If the callback fails, it is not called again; the download continues."""
        if self._progress is None or self._total is None:
            return
        try:
            self._progress(self.done, self._total)
        except Exception:
            logger.exception("A progress callback failed; the download continues without it.")
            self._progress = None

    def _open(self, request: urllib.request.Request) -> Any:
        for name, value in self._proxy.headers if self._proxy else ():
            if request.type == "http" or name.lower() == "proxy-authorization":
                # In an HTTPS tunnel all other headers would reach the server, not the proxy.
                request.add_unredirected_header(name, value)
        try:
            return self._opener.open(request, timeout=60)
        except urllib.error.HTTPError as error:
            with error:
                self._refused(error)
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenError(error) from error

    def _refused(self, error: urllib.error.HTTPError) -> None:
        if error.code == 416:  # the file on the server was replaced by a shorter one
            self._begin_anew()
            raise _BrokenError("the file has changed") from error
        headers = {name.lower(): value for name, value in error.headers.items()}
        if facts_of(error.code).may_pass:
            wait = retry_after(headers, time.time())
            raise _BrokenError(f"{error.code} {error.reason}", wait) from error
        body = b""
        with suppress(OSError, http.client.HTTPException):
            body = error.read(4096)
        # The URL is left out: its signature gives access to the file.
        about = HTTPRequest("GET", "")
        raise error_from_response(error.code, headers, body, about, now=time.time()) from error

    def _learn(self, response: Any) -> None:
        """Read length, version and checksums from an answer. If the file changed, start again at byte 0."""
        headers = response.headers
        length = headers.get("content-length", "")
        start, total = 0, int(length) if length.isdigit() else None
        if response.status == 206:
            part = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("content-range", ""))
            start = -1 if part is None else int(part[1])
            total = self._total if part is None or part[2] == "*" else int(part[2])
        another = self._total is not None and total != self._total
        if start == 0 or start != self.done or another:
            self._begin_anew()
        if start != self.done:
            raise _BrokenError("the server sent another part than was asked for")
        self._total = total
        tag = headers.get("etag", "")
        self._same = tag if tag.startswith('"') else headers.get("last-modified")
        # A partial answer (206) may lack the checksums of the whole file.
        self._digests = _digests(headers) or self._digests

    def _read(self, response: Any) -> bytes:
        try:
            part: bytes = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenError(error) from error
        return part

    def _begin_anew(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digests = {}

    def check(self) -> None:
        """Compare the whole file with the checksums that the server sent, if any."""
        for algorithm, expected in self._digests.items():
            self._file.seek(0)
            if hashlib.file_digest(self._file, algorithm).digest() != expected:
                raise APIResponseValidationError(
                    message=f"The download is damaged: its {algorithm} differs from the one that the server sent."
                )


def _digests(headers: Any) -> dict[str, bytes]:
    """Checksums of a whole file by `hashlib` name. Google Cloud Storage uses the header `x-goog-hash`."""
    found: dict[str, bytes] = {}
    for name in ("repr-digest", "digest", "x-goog-hash"):
        for value in headers.get_all(name, ()):
            for algorithm, text in re.findall(r"(?i)\b(sha-256|md5)=:?([a-z\d+/]+=*)", value):
                with suppress(ValueError):
                    found[algorithm.lower().replace("-", "")] = base64.b64decode(text)
    return found


# -- unpacking -------------------------------------------------------------------------------------


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar archive, compressed or not. Members that point outside `target` are refused."""
    try:
        with archive.open("rb") as file, _tar(file) as tar:
            for member in tar:
                _check_member(member)
                tar.extract(member, target, filter="data")
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error
            raise
        raise APIResponseValidationError(
            message=f"The archive could not be unpacked: {error}"
        ) from error


def _tar(file: BinaryIO) -> tarfile.TarFile:
    compressed = file.read(len(_ZSTD)) == _ZSTD
    file.seek(0)
    if compressed:
        return tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(file), mode="r|")
    return tarfile.open(fileobj=file)  # detects gzip, bzip2, xz and no compression


def _check_member(member: tarfile.TarInfo) -> None:
    name = Path(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise InvalidPathError(f"the archive holds {member.name!r:.200}, which points outside it")
    # Sparse files are refused too: a tiny archive can declare a hole of any size.
    plain = member.isreg() and member.sparse is None
    if not (plain or member.isdir()):
        raise InvalidPathError(
            f"the archive holds {member.name!r:.200}, which is not a regular file"
        )


def _plain(name: str) -> str:
    if Path(name).name != name or name in {"", ".", ".."}:
        raise InvalidPathError(f"the service sent a file called {name!r:.200}")
    return name


def verify(directory: Path) -> None:
    """Compare the files with the checksums in the checkpoint's manifest, if it has one."""
    manifest = directory / _MANIFEST
    if not manifest.is_file():
        return
    try:
        expected = dict(json.loads(manifest.read_text())["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise APIResponseValidationError(
            message=f"The file {_MANIFEST} arrived damaged."
        ) from error
    for name, digest in expected.items():
        file = directory / _plain(name)
        if not file.is_file() or _sha256(file) != digest:
            raise APIResponseValidationError(message=f"The file {name} arrived damaged.")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# -- atomic replacement ---------------------------------------------------------------------------


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A temporary directory in `output`, removed at the end. Directories created for it are removed too if empty."""
    made = [place for place in (output, *output.parents) if not place.exists()]
    scratch = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".tinkex-", dir=output))
        yield scratch
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        for place in made:
            with suppress(OSError):  # not empty
                place.rmdir()


def _replace(unpacked: Path, destination: Path, scratch: Path) -> None:
    older = scratch / "older"
    try:
        if destination.exists():
            destination.replace(older)
        unpacked.replace(destination)
    except BaseException:
        if older.exists() and not destination.exists():
            older.replace(destination)
        raise
