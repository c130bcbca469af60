"""Checkpoint downloads over real HTTP, with failures of the connection, the archive and the disk."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import zstandard

from tests.cutting import CuttingProxy
from tests.scripted import Answer, Raw
from tests.tars import tar
from tinkex import ServiceClient
from tinkex._client.downloads import download_checkpoint, fetch, target_name, unpack, verify
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    InvalidInputError,
    InvalidPathError,
    NotFoundError,
    PermissionDeniedError,
)
from tinkex.testing import service as running_service

PATH = "tinker://run:train:0/weights/one"
CONTENT = bytes(range(256)) * 20


class Waits(list[float]):
    """Replaces `time.sleep` and records the waits."""

    __call__ = list.append


@pytest.fixture
def waits():
    return Waits()


def manifest(**files: bytes) -> tuple[str, bytes]:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return "tinkex.json", json.dumps({"sha256": digests}).encode()


class Standing:
    """Base of the stand-ins for a REST client."""

    holder = SimpleNamespace(config=Config(api_key="tml-test"))


class Linked(Standing):
    """A stand-in for a REST client that always returns the same link."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)

    def get_checkpoint_archive_url_from_tinker_path(self, _: str) -> SimpleNamespace:
        url = self.urls.pop(0) if len(self.urls) > 1 else self.urls[0]
        return SimpleNamespace(result=lambda: SimpleNamespace(url=url))


def torn(body: bytes, cut: int, status: int = 200, **headers: str) -> Raw:
    """An answer whose connection closes after `cut` bytes of its body."""
    headers = {"content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return Raw(f"HTTP/1.1 {status} Torn\r\n{lines}\r\n".encode() + body[:cut])


def rest_of(body: bytes, start: int, **headers: str) -> Answer:
    about = {"content-range": f"bytes {start}-{len(body) - 1}/{len(body)}", **headers}
    return Answer(body[start:], 206, about)


# -- fetching ----------------------------------------------------------------------------------------


def test_broken_transfer_is_resumed(server, tmp_path, waits):
    server.on(
        "GET /file",
        torn(CONTENT, 1000, etag='"one"'),
        torn(CONTENT[1000:], 500, 206, etag='"one"', content_range="bytes 1000-5119/5120"),
        Raw(),  # closes without an answer
        Answer(b"", 503),
        rest_of(CONTENT, 1500, etag='"one"'),
    )
    seen = []
    fetch(f"{server.url}/file", tmp_path / "file", lambda *at: seen.append(at), sleep=waits)
    assert (tmp_path / "file").read_bytes() == CONTENT
    ranges = [request.headers.get("range") for request in server.requests]
    assert ranges == [None, "bytes=1000-", "bytes=1500-", "bytes=1500-", "bytes=1500-"]
    assert [request.headers.get("if-range") for request in server.requests[1:]] == ['"one"'] * 4
    assert waits == [0.5, 0.5, 1.0, 2.0]
    assert seen == [(1000, 5120), (1500, 5120), (5120, 5120)]


def test_progress_is_not_reported_without_content_length(server, tmp_path):
    server.on("GET /file", Raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + CONTENT))
    fetch(f"{server.url}/file", tmp_path / "file", lambda done, total: 1 / 0)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_failing_progress_callback_does_not_stop_download(server, tmp_path, caplog):
    server.on("GET /file", Answer(CONTENT))
    fetch(f"{server.url}/file", tmp_path / "file", lambda done, total: 1 / 0)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert "A progress callback failed" in caplog.text


def test_directory_is_named_after_checkpoint_path():
    assert target_name(PATH) == "run_train_0_weights_one"  # Windows forbids colons


def test_last_modified_is_used_without_etag(server, tmp_path, waits):
    date = "Wed, 01 Jan 2025 00:00:00 GMT"
    server.on(
        "GET /file", torn(CONTENT, 9, etag='W/"weak"', last_modified=date), rest_of(CONTENT, 9)
    )
    fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)
    assert server.requests[1].headers["if-range"] == date
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "later",
    [
        (Answer(CONTENT),),  # the whole file: it changed, or the server does not support ranges
        (Answer(b"", 416), Answer(CONTENT)),
        (rest_of(bytes(100), 9), Answer(CONTENT)),  # a part of a file of another size
        (rest_of(CONTENT, 50), Answer(CONTENT)),  # not the requested part
        (Answer(b"?", 206, {"content-range": "nonsense"}), Answer(CONTENT)),
    ],
)
def test_mismatching_part_restarts_download(server, tmp_path, waits, later):
    server.on("GET /file", torn(bytes(5120), 9), *later)
    fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)
    assert (tmp_path / "file").read_bytes() == CONTENT


def chunked(body: bytes, **headers: str) -> Raw:
    """A chunked answer without a length that is cut off after one chunk."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 200 Torn\r\ntransfer-encoding: chunked\r\n{lines}\r\n{len(body):x}\r\n"
    return Raw(head.encode() + body + b"\r\n")


def test_length_learned_on_resume_does_not_restart_download(server, tmp_path, waits):
    content, read = CONTENT * 300, 1 << 20  # bytes per read
    server.on("GET /file", chunked(content[: read + 9]), rest_of(content, read))
    fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)
    assert (tmp_path / "file").read_bytes() == content
    assert [each.headers.get("range") for each in server.requests] == [None, f"bytes={read}-"]


def test_checksum_is_kept_when_download_resumes(server, tmp_path, waits):
    wrong = f"sha-256={digest(b'other', 'sha256')}"
    server.on("GET /file", torn(CONTENT, 9, digest=wrong), rest_of(CONTENT, 9))
    with pytest.raises(APIResponseValidationError, match="sha256"):
        fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)


def test_checksum_is_dropped_when_file_changed(server, tmp_path, waits):
    wrong = f"sha-256={digest(b'other', 'sha256')}"
    server.on("GET /file", torn(CONTENT, 9, digest=wrong), Answer(CONTENT))
    fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)
    assert (tmp_path / "file").read_bytes() == CONTENT


class Listed(Standing):
    """A stand-in that lists the files of an export, with new links on each call."""

    def __init__(self, *listings: dict[str, str]) -> None:
        self.listings = list(listings)

    def get_external_weights_urls(self, _: str) -> SimpleNamespace:
        urls = self.listings.pop(0)
        return SimpleNamespace(result=lambda: SimpleNamespace(urls=urls))


EXTERNAL = "tinker://run:train:0/external_weights/one"


def test_the_files_of_an_export_are_listed_once(server, tmp_path, waits):
    server.on("GET /a", Answer(b"a"))
    server.on("GET /b", Answer(b"b"))
    listed = Listed({"one": f"{server.url}/a", "two": f"{server.url}/b"})
    found = download_checkpoint(listed, EXTERNAL, tmp_path, sleep=waits)
    assert {file.name: file.read_bytes() for file in found.iterdir()} == {"one": b"a", "two": b"b"}


def test_expired_link_of_export_is_renewed(server, tmp_path, waits):
    server.on("GET /old", Answer(b"", 403))
    server.on("GET /new", Answer(b"a"))
    old, new = {"one": f"{server.url}/old"}, {"one": f"{server.url}/new"}
    found = download_checkpoint(Listed(old, new), EXTERNAL, tmp_path, sleep=waits)
    assert (found / "one").read_bytes() == b"a"
    with pytest.raises(APIResponseValidationError, match="no longer lists 'one'"):
        download_checkpoint(Listed(old, {}), EXTERNAL, tmp_path, force=True, sleep=waits)


def test_download_gives_up_without_progress(server, tmp_path, waits):
    server.on("GET /file", torn(CONTENT, 100))
    with pytest.raises(APIConnectionError, match="100 of 5120 bytes"):
        fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)
    # One wait follows the attempt that brought bytes, seven follow attempts without any.
    assert len(waits) == 8
    assert max(waits) == 10.0
    assert list(tmp_path.iterdir()) == []


def test_download_waits_as_retry_after_asks(server, tmp_path, waits):
    busy = Answer(b"", 429, {"retry-after": "3"})
    server.on("GET /file", busy, Answer(b"", 503, {"retry-after": "600"}), Answer(CONTENT))
    fetch(f"{server.url}/file", tmp_path / "file", sleep=waits)
    assert waits == [3.0, 10.0]


def test_refusal_carries_message_of_service(server, tmp_path, waits):
    server.on("GET /file", Answer({"detail": "The checkpoint is no longer exists."}, 404))
    with pytest.raises(NotFoundError, match="no longer exists") as caught:
        fetch(f"{server.url}/file?signature=secret", tmp_path / "file", sleep=waits)
    assert "secret" not in f"{caught.value!r}"
    assert (waits, list(tmp_path.iterdir())) == ([], [])


def test_expired_link_is_renewed(server, tmp_path, waits):
    server.on("GET /old", torn(CONTENT, 1000, etag='"one"'), Answer({"detail": "expired"}, 403))
    server.on("GET /new", rest_of(CONTENT, 1000, etag='"one"'))
    links = iter([f"{server.url}/old", f"{server.url}/new"])
    fetch(lambda: next(links), tmp_path / "file", sleep=waits)
    assert (tmp_path / "file").read_bytes() == CONTENT
    (asked,) = server.asked("GET /new")
    assert (asked.headers["range"], asked.headers["if-range"]) == ("bytes=1000-", '"one"')


def test_link_refused_after_renewal_is_final(server, tmp_path, waits):
    server.on("GET /file", Answer({"detail": "not yours"}, 403))
    with pytest.raises(PermissionDeniedError, match="not yours"):
        fetch(lambda: f"{server.url}/file", tmp_path / "file", sleep=waits)
    assert len(server.requests) == 2


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "", "data:,x"])
def test_only_http_is_fetched(tmp_path, url):
    with pytest.raises(APIResponseValidationError, match=r"an invalid URL|a file on its own disk"):
        fetch(url, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def digest(content: bytes, algorithm: str) -> str:
    return base64.b64encode(hashlib.new(algorithm, content).digest()).decode()


@pytest.mark.parametrize(
    ("header", "form", "algorithm"),
    [
        ("repr-digest", "sha-256=:{}:", "sha256"),
        ("digest", "crc32c=AAAAAA==, SHA-256={}", "sha256"),
        ("x-goog-hash", "crc32c=n03x6A==,md5={}", "md5"),
    ],
)
def test_checksum_header_is_verified(server, tmp_path, header, form, algorithm):
    right = {header: form.format(digest(CONTENT, algorithm))}
    wrong = {header: form.format(digest(b"other", algorithm))}
    server.on("GET /file", Answer(CONTENT, headers=right), Answer(CONTENT, headers=wrong))
    fetch(f"{server.url}/file", tmp_path / "right")
    assert (tmp_path / "right").read_bytes() == CONTENT
    with pytest.raises(APIResponseValidationError, match=f"damaged: its {algorithm}"):
        fetch(f"{server.url}/file", tmp_path / "wrong")
    assert [file.name for file in tmp_path.iterdir()] == ["right"]


def test_unreadable_checksum_headers_are_ignored(server, tmp_path):
    server.on("GET /file", Answer(CONTENT, headers={"digest": "sha-256=:?, md5=A"}))
    fetch(f"{server.url}/file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


# -- unpacking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.ZstdCompressor().compress],
    ids=["plain", "gzip", "bzip2", "xz", "zstd"],
)
def test_compression_is_detected_and_damage_too(tmp_path, pack):
    packed = pack(tar(("a", CONTENT), ("folder/b", b"b")))
    archive = tmp_path / "archive"
    archive.write_bytes(packed)
    unpack(archive, tmp_path / "whole")
    assert (tmp_path / "whole" / "a").read_bytes() == CONTENT
    assert (tmp_path / "whole" / "folder" / "b").read_bytes() == b"b"
    for number, damaged in enumerate((packed[: len(packed) // 3], b"", b"\0" * 9, packed[:6])):
        archive.write_bytes(damaged)
        with pytest.raises(APIResponseValidationError, match="could not be unpacked"):
            unpack(archive, tmp_path / f"damaged{number}")


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        ("/tmp/absolute", b"x"),
        ("../outside", b"x"),
        ("a/../../outside", b"x"),
        special("..", tarfile.DIRTYPE),
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("link", tarfile.SYMTYPE, "file"),
        special("link", tarfile.LNKTYPE, "file"),
        special("device", tarfile.CHRTYPE),
        special("device", tarfile.BLKTYPE),
        special("pipe", tarfile.FIFOTYPE),
        special("sparse", tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda member: member[0] if isinstance(member, tuple) else member.name,
)
def test_archive_members_outside_or_not_regular_are_refused(server, tmp_path, member):
    server.on("GET /file", Answer(tar(("file", b"x"), member)))
    with pytest.raises((InvalidPathError, APIResponseValidationError)):
        download_checkpoint(Linked(f"{server.url}/file"), PATH, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_are_compared_with_the_manifest(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    verify(tmp_path)  # without a manifest there is nothing to compare
    name, content = manifest(a=b"a")
    (tmp_path / name).write_bytes(content)
    verify(tmp_path)
    (tmp_path / "a").write_bytes(b"b")
    with pytest.raises(APIResponseValidationError, match="The file a arrived damaged"):
        verify(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(APIResponseValidationError, match="The file a arrived damaged"):
        verify(tmp_path)
    for nonsense in (b"", b"[]", b"{}", b'{"sha256": 5}'):
        (tmp_path / name).write_bytes(nonsense)
        with pytest.raises(APIResponseValidationError, match=r"The file tinkex\.json"):
            verify(tmp_path)
    (tmp_path / name).write_bytes(b'{"sha256": {"../a": ""}}')
    with pytest.raises(InvalidPathError):
        verify(tmp_path)


# -- atomic replacement -----------------------------------------------------------------------------


def test_existing_directory_stays_until_new_one_is_complete(server, tmp_path):
    damaged = tar(("a", b"new"), manifest(a=b"other"))
    server.on("GET /file", Answer(damaged), Answer(tar(("a", b"new"), manifest(a=b"new"))))
    rest, place = Linked(f"{server.url}/file"), tmp_path / target_name(PATH)
    place.mkdir()
    (place / "a").write_bytes(b"old")
    with pytest.raises(InvalidInputError, match="exists"):
        download_checkpoint(rest, PATH, tmp_path)
    with pytest.raises(APIResponseValidationError, match="The file a"):
        download_checkpoint(rest, PATH, tmp_path, force=True)
    assert (place / "a").read_bytes() == b"old"
    assert download_checkpoint(rest, PATH, tmp_path, force=True) == place
    assert (place / "a").read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name]


_INTERRUPTED = """
import sys, tests.client.test_downloads as it
from pathlib import Path
from tinkex._client.downloads import download_checkpoint
print("ready", flush=True)
try:
    told = lambda done, total: print("some", flush=True)
    download_checkpoint(it.Linked(sys.argv[1]), it.PATH, Path(sys.argv[2]), progress=told)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_leaves_nothing_behind(server, tmp_path):
    # The declared length is larger than the body, and the connection stays open.
    never = threading.Event()
    lines = b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n"
    server.on("GET /file", Raw(lines + bytes(1 << 21)), Answer(wait_for=never))
    command = [sys.executable, "-c", _INTERRUPTED, f"{server.url}/file", str(tmp_path / "a" / "b")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "some\n"
        assert len(list((tmp_path / "a" / "b").iterdir())) == 1
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().endswith("interrupted\n")
    never.set()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_raised_at_once_and_leaves_nothing_behind(server, tmp_path):
    server.on("GET /file", Answer(tar(("a", bytes(1 << 20)))))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            download_checkpoint(Linked(f"{server.url}/file"), PATH, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []


# -- the real service --------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.moment = datetime(2026, 5, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.moment


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def served(clock):
    with running_service("fake", now=clock) as started:
        yield started


@pytest.fixture(scope="module")
def path(served):
    """The path of a checkpoint with a large file."""
    training = served.client().create_lora_training_client(served.base_model, rank=4)
    path = training.save_state("one").result().path
    run = path.removeprefix("tinker://").partition("/")[0]
    enlarge(served.data_dir / "checkpoints" / run / "training" / "one")
    return path


def enlarge(place) -> None:
    """Add a large file to a checkpoint, as a larger model would have."""
    weights = os.urandom(3 << 20)
    (place / "adapter_model.safetensors").write_bytes(weights)
    content = json.loads((place / "tinkex.json").read_text())
    content["sha256"]["adapter_model.safetensors"] = hashlib.sha256(weights).hexdigest()
    (place / "tinkex.json").write_text(json.dumps(content))


def original(served):
    (place,) = (served.data_dir / "checkpoints").glob("*/training/one")
    return place


def contents(place):
    return {file.name: file.read_bytes() for file in place.iterdir()}


def test_a_checkpoint_survives_cut_connections(served, path, tmp_path, waits):
    seen: list[int] = []
    with (
        CuttingProxy(served.url, [1 << 20, 700_000, 900_000]) as proxy,
        ServiceClient(base_url=proxy.url, api_key="tml-x") as client,
    ):
        place = download_checkpoint(
            client.create_rest_client(),
            path,
            tmp_path,
            progress=lambda done, _: seen.append(done),
            sleep=waits,
        )
        assert proxy.cut == len(waits) == 3
    assert seen == sorted(seen)  # nothing was fetched twice
    assert contents(place) == contents(original(served))


def test_link_may_expire_during_download(served, path, tmp_path, clock):
    def wait(_: float) -> None:
        clock.moment += timedelta(days=1)

    with (
        CuttingProxy(served.url, [1 << 20]) as proxy,
        ServiceClient(base_url=proxy.url, api_key="tml-x") as client,
    ):
        rest = client.create_rest_client()
        place = download_checkpoint(rest, path, tmp_path, sleep=wait)
    assert contents(place) == contents(original(served))


def test_checkpoint_saved_again_during_download_is_never_mixed(served, path, tmp_path):
    def wait(_: float) -> None:
        enlarge(original(served))

    with (
        CuttingProxy(served.url, [1 << 20]) as proxy,
        ServiceClient(base_url=proxy.url, api_key="tml-x") as client,
    ):
        rest = client.create_rest_client()
        place = download_checkpoint(rest, path, tmp_path, sleep=wait)
    assert contents(place) == contents(original(served))
