"""Checkpoints onto the disk: streamed, resumed when the connection breaks, checked, and all or nothing.

What arrives is unpacked beside its destination and moved there in one step, so a destination is either the whole
checkpoint or what it was before.
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

__all__ = ["Progress", "download_checkpoint", "fetch", "target", "target_name", "unpack", "verify"]

#: Called with the bytes that have arrived and those there are, after each part of a file whose length is known.
Progress = Callable[[int, int], object]

_CHUNK: Final = 1 << 20
#: Tries in a row that bring nothing.
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
    """The directory a checkpoint is put into: its path with `_` for `/`, and for `:`, which Windows does not allow."""
    return _older_name(tinker_path).replace(":", "_")


def _older_name(tinker_path: str) -> str:
    """The same as earlier versions wrote it."""
    ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return tinker_path.removeprefix("tinker://").replace("/", "_")


def target(output: Path | str, tinker_path: str) -> Path:
    """The directory of a checkpoint below `output`; one that an earlier version made keeps its name."""
    older = Path(output) / _older_name(tinker_path)
    return older if older.is_dir() else older.with_name(target_name(tinker_path))


def download_checkpoint(
    rest: Any,
    tinker_path: str,
    output: Path | str = ".",
    *,
    force: bool = False,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Download a checkpoint into a directory below `output`; the directory.

    One that is there already is kept, unless `force` replaces it by the new one once that is complete.
    `progress(done, total)` is told of the bytes of each file, where the service says how many there are.
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
        raise APIResponseValidationError(message=f"The service lists {name!r:.200} no longer.")

    for name, url in urls().items():
        get(links(name, url).__next__, target / _plain(name))


# -- fetching --------------------------------------------------------------------------------------


def fetch(
    url: str | Callable[[], str],
    target: Path,
    progress: Progress | None = None,
    *,
    proxy: Proxy | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Stream a URL into a file; a connection that breaks is taken up where it broke.

    A function instead of a URL is asked for another one when the time of the first is over.
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
    """Try until everything is there, or until several tries in a row have brought nothing."""
    link, renewed_at, policy = _link(url), -1, _DownloadPolicy(transfer)

    async def once(attempt: int) -> None:
        nonlocal link, renewed_at
        try:
            transfer.go_on(link)
        except APIStatusError as error:
            # A new link that is refused at the same place as the one before had not expired.
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
    """Resume a broken transfer; give up after several tries in a row that brought no byte."""

    transfer: _Transfer
    failures: int = 0
    most: int = 0  # bytes that have arrived at best

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
        raise APIResponseValidationError(
            message=f"The service sent a URL that is none: {link:.200}"
        )
    return link


class _BrokenError(Exception):
    """A try that ended early, and how long the service asks to wait before the next."""

    def __init__(self, message: object, wait: float | None = None) -> None:
        super().__init__(str(message))
        self.wait = wait


class _Transfer:
    """One file on its way: what has arrived of it, and what is known of the whole."""

    def __init__(
        self, file: BufferedRandom, progress: Progress | None, proxy: Proxy | None
    ) -> None:
        self._file = file
        self._progress = progress
        self._proxy = proxy
        through = None if proxy is None else {"http": proxy.url, "https": proxy.url}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(through))
        self._total: int | None = None
        self._same: str | None = None  # how the server tells that it is still the same file
        self._digests: dict[str, bytes] = {}

    @property
    def done(self) -> int:
        """How many bytes have arrived."""
        return self._file.tell()

    def go_on(self, url: str) -> None:
        """Read on from where the file ends."""
        have = self.done
        headers = {"range": f"bytes={have}-"} if have else {}
        if have and self._same is not None:
            headers["if-range"] = self._same
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked by `_link`
        with self._open(request) as response:
            self._learn(response)
            while part := self._read(response):
                self._file.write(part)  # what the disk says to it is not the connection's doing
                self._tell()
        if self._total is not None and self.done != self._total:
            raise _BrokenError(f"{self.done} of {self._total} bytes arrived")

    def _tell(self) -> None:
        """Report progress; a report that fails is the last, and costs the download nothing."""
        if self._progress is None or self._total is None:
            return
        try:
            self._progress(self.done, self._total)
        except Exception:
            logger.exception("A progress callback failed; the download goes on without it.")
            self._progress = None

    def _open(self, request: urllib.request.Request) -> Any:
        for name, value in self._proxy.headers if self._proxy else ():
            if request.type == "http" or name.lower() == "proxy-authorization":
                # Through a tunnel the others would reach the server.
                request.add_unredirected_header(name, value)
        try:
            return self._opener.open(request, timeout=60)
        except urllib.error.HTTPError as error:
            with error:
                self._refused(error)
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenError(error) from error

    def _refused(self, error: urllib.error.HTTPError) -> None:
        if error.code == 416:  # it is another file now, and shorter
            self._begin_anew()
            raise _BrokenError("the file has changed") from error
        headers = {name.lower(): value for name, value in error.headers.items()}
        if facts_of(error.code).may_pass:
            wait = retry_after(headers, time.time())
            raise _BrokenError(f"{error.code} {error.reason}", wait) from error
        body = b""
        with suppress(OSError, http.client.HTTPException):
            body = error.read(4096)
        # Without the URL, whose signature opens the file to whoever reads it.
        about = HTTPRequest("GET", "")
        raise error_from_response(error.code, headers, body, about, now=time.time()) from error

    def _learn(self, response: Any) -> None:
        """Take note of what an answer says of the file; another file than before begins anew."""
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
        # A part may come without the checksums of the whole.
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
        """Compare the whole with the checksums that the server gave, if it did."""
        for algorithm, expected in self._digests.items():
            self._file.seek(0)
            if hashlib.file_digest(self._file, algorithm).digest() != expected:
                raise APIResponseValidationError(
                    message=f"The download arrived damaged: its {algorithm} is not the one that was sent."
                )


def _digests(headers: Any) -> dict[str, bytes]:
    """Checksums of a whole file by the names `hashlib` has for them; Google's storage has its own header."""
    found: dict[str, bytes] = {}
    for name in ("repr-digest", "digest", "x-goog-hash"):
        for value in headers.get_all(name, ()):
            for algorithm, text in re.findall(r"(?i)\b(sha-256|md5)=:?([a-z\d+/]+=*)", value):
                with suppress(ValueError):
                    found[algorithm.lower().replace("-", "")] = base64.b64decode(text)
    return found


# -- unpacking -------------------------------------------------------------------------------------


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar, compressed or not; members that could reach outside `target` are refused."""
    try:
        with archive.open("rb") as file, _tar(file) as tar:
            for member in tar:
                _check_member(member)
                tar.extract(member, target, filter="data")
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's doing
            raise
        raise APIResponseValidationError(
            message=f"The archive could not be unpacked: {error}"
        ) from error


def _tar(file: BinaryIO) -> tarfile.TarFile:
    compressed = file.read(len(_ZSTD)) == _ZSTD
    file.seek(0)
    if compressed:
        return tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(file), mode="r|")
    return tarfile.open(fileobj=file)  # plain, or what the standard library knows


def _check_member(member: tarfile.TarInfo) -> None:
    name = Path(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise InvalidPathError(f"the archive holds {member.name!r:.200}, which leads out of it")
    # A sparse file is none either: a hole of any size takes no place in an archive.
    plain = member.isreg() and member.sparse is None
    if not (plain or member.isdir()):
        raise InvalidPathError(f"the archive holds {member.name!r:.200}, which is no plain file")


def _plain(name: str) -> str:
    if Path(name).name != name or name in {"", ".", ".."}:
        raise InvalidPathError(f"the service sent a file called {name!r:.200}")
    return name


def verify(directory: Path) -> None:
    """Compare the files with the checksums that came with them, where some did."""
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


# -- all or nothing --------------------------------------------------------------------------------


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A directory on the same disk; what fails in it leaves nothing behind, not even `output`."""
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
            with suppress(OSError):  # there is something in it
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
