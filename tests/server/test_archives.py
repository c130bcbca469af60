"""Signed links, tar streams, exports and the names of checkpoints."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import parse_qs

import pyrage  # type: ignore[import-untyped]
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tinkex.errors import (
    ConfigError,
    InternalServerError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)
from tinkex.server.archives import (
    ADAPTER_FILES,
    Signer,
    Tar,
    export,
    validate_name,
)
from tinkex.server.archives import _encrypt as encrypt

MIB = 1 << 20
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
PATH = "/api/v1/runs/r1/checkpoints/weights/c1/archive"

moments = st.datetimes(datetime(1970, 1, 2), datetime(9998, 1, 1), timezones=st.just(UTC))


def parts(query):
    values = parse_qs(query, strict_parsing=True)
    assert sorted(values) == ["expires", "signature"]
    return values["expires"][0], values["signature"][0]


def names_in(directory):
    return sorted(entry.name for entry in directory.iterdir())


# --- signatures


@given(st.binary(min_size=1), st.text(), moments, st.timedeltas(timedelta(seconds=1), 99 * HOUR))
def test_a_signed_link_opens_its_path_until_it_expires(secret, path, expires_at, early):
    signer = Signer(secret)
    expires, signature = parts(signer.sign(path, expires_at))
    signer.check(path, expires, signature, expires_at - early)
    with pytest.raises(PermissionDeniedError, match="expired"):
        signer.check(path, expires, signature, expires_at)


@given(st.text(), st.text(), st.text(), st.text())
def test_nothing_but_what_was_signed_is_accepted(path, other_path, other_expires, forged):
    signer = Signer(b"secret")
    expires, signature = parts(signer.sign(path, NOON + HOUR))
    assume(path != other_path and expires != other_expires and signature != forged)
    for asked, until, proof in (
        (other_path, expires, signature),
        (path, other_expires, signature),
        (path, expires, forged),
        (path, "", ""),
    ):
        with pytest.raises(PermissionDeniedError, match="signature is wrong"):
            signer.check(asked, until, proof, NOON)


def test_an_expiry_cannot_be_put_off():
    signer = Signer(b"secret")
    expires, signature = parts(signer.sign(PATH, NOON))
    with pytest.raises(PermissionDeniedError, match="signature"):
        signer.check(PATH, str(int(expires) + 3600), signature, NOON)


def test_a_path_cannot_pass_for_an_expiry():
    signer = Signer(b"secret")
    expires, signature = parts(signer.sign("first\nsecond", NOON + HOUR))
    with pytest.raises(PermissionDeniedError, match="signature"):
        signer.check("second", f"{expires}\nfirst", signature, NOON)


def test_another_secret_signs_differently():
    expires, signature = parts(Signer(b"one").sign(PATH, NOON + HOUR))
    with pytest.raises(PermissionDeniedError, match="signature"):
        Signer(b"two").check(PATH, expires, signature, NOON)


def test_the_zone_of_a_moment_does_not_matter_but_there_must_be_one():
    signer = Signer(b"secret")
    elsewhere = NOON.astimezone(timezone(timedelta(hours=9)))
    assert signer.sign(PATH, elsewhere) == signer.sign(PATH, NOON)
    with pytest.raises(TypeError):
        signer.sign(PATH, NOON.replace(tzinfo=None))


def test_a_refusal_has_its_status_and_tells_no_secret():
    signer = Signer(b"very secret")
    expires, signature = parts(signer.sign(PATH, NOON + HOUR))
    with pytest.raises(PermissionDeniedError) as caught:
        signer.check(PATH, expires, "0" * 64, NOON)
    assert caught.value.status_code == 403
    assert signature not in str(caught.value)
    assert "secret" not in repr(signer)


def test_the_secret_is_made_once_and_for_the_owner_only(tmp_path):
    file = tmp_path / "state" / "secret"
    link = Signer.from_file(file).sign(PATH, NOON)
    assert len(file.read_bytes()) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Signer.from_file(file).sign(PATH, NOON) == link
    assert names_in(file.parent) == ["secret"]


def test_services_that_start_together_agree_on_the_secret(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        signers = list(pool.map(Signer.from_file, [tmp_path / "secret"] * 8))
    assert len({signer.sign(PATH, NOON) for signer in signers}) == 1
    assert names_in(tmp_path) == ["secret"]


@pytest.mark.parametrize("length", [0, 31])
def test_a_short_secret_is_refused_and_kept(tmp_path, length):
    file = tmp_path / "secret"
    file.write_bytes(b"x" * length)
    with pytest.raises(ConfigError, match=f"{length} bytes"):
        Signer.from_file(file)
    assert file.read_bytes() == b"x" * length


# --- tar streams

# Long names, other alphabets and the ends of blocks are where formats of tar differ.
file_names = st.one_of(
    st.text("abc. _-é☃", min_size=1, max_size=60).filter(lambda name: name not in {".", ".."}),
    st.integers(99, 255).map(lambda length: "n" * length),
)
contents = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([511, 512, 513, 1024]).map(lambda size: b"\x5a" * size),
)


@given(
    st.dictionaries(file_names, contents, max_size=5), st.integers(-(10**6), 8**11 + 5), st.data()
)
def test_a_tar_holds_the_named_files(files, mtime, data):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name, content in files.items():
            (directory / name).write_bytes(content)
            os.utime(directory / name, (0, mtime))
        names = data.draw(st.lists(st.sampled_from(sorted(files)), unique=True)) if files else []
        stream = b"".join(Tar.of(directory, names).chunks())
        assert len(stream) == Tar.of(directory, names).size
        assert stream == b"".join(Tar.of(directory, names).chunks())
    with tarfile.open(fileobj=io.BytesIO(stream), mode="r:") as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == names
        for member in members:
            content = archive.extractfile(member)
            assert content is not None
            assert content.read() == files[member.name]
            assert member.isreg()
            assert (member.mode, member.uid, member.gid) == (0o644, 0, 0)
            assert member.mtime == mtime


def test_who_owns_a_file_does_not_show(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    os.utime(tmp_path / "file", (1, 1.5))
    (tmp_path / "file").chmod(0o700)
    before = b"".join(Tar.of(tmp_path, ["file"]).chunks())
    (tmp_path / "file").chmod(0o600)
    os.utime(tmp_path / "file", (2, 1.25))
    assert b"".join(Tar.of(tmp_path, ["file"]).chunks()) == before


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(24 * MIB + 7)
    tracemalloc.start()
    try:
        sizes = [len(chunk) for chunk in Tar.of(tmp_path, ["large"]).chunks()]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(sizes) <= MIB
    assert sum(sizes) == Tar.of(tmp_path, ["large"]).size
    assert peak < 4 * MIB


def test_a_file_beyond_the_classic_limit_keeps_its_size(tmp_path):
    size = 9 << 30
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(size)  # all of it a hole
    chunks = Tar.of(tmp_path, ["huge"]).chunks()
    header = next(chunks)
    assert Tar.of(tmp_path, ["huge"]).size == len(header) + size + 1024
    with tarfile.open(fileobj=io.BytesIO(header), mode="r|") as archive:
        member = archive.next()
    assert member is not None
    assert member.size == size


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../file", "a/file", "/etc/passwd", "a\\b", "a\0b"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError) as caught:
        Tar.of(tmp_path / "a" if name.startswith("..") else tmp_path, [name])
    assert caught.value.field == "names"


def test_only_regular_files_are_sent(tmp_path):
    (tmp_path / "outside").write_text("private")
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "link").symlink_to(tmp_path / "outside")
    (directory / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(InvalidInputError, match=name):
            Tar.of(directory, [name])
    for where in (directory, tmp_path / "nowhere", tmp_path / "outside"):
        with pytest.raises(NotFoundError, match="missing"):
            Tar.of(where, ["missing"])


@given(
    contents=st.lists(st.binary(max_size=1500), min_size=1, max_size=3),
    start=st.integers(0, 6000),
    length=st.integers(0, 6000),
)
def test_any_part_of_a_tar_can_be_had(contents, start, length):
    with tempfile.TemporaryDirectory() as place:
        names = [f"file{number}" for number in range(len(contents))]
        for name, content in zip(names, contents, strict=True):
            (Path(place) / name).write_bytes(content)
        tar = Tar.of(Path(place), names)
        whole = b"".join(tar.chunks())
        assert b"".join(tar.chunks(start)) == whole[start:]
        assert b"".join(tar.chunks(start, start + length)) == whole[start : start + length]


def test_a_tag_changes_with_the_bytes_and_not_without(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    facts = file.stat()
    tag = Tar.of(tmp_path, ["file"]).tag
    assert Tar.of(tmp_path, ["file"]).tag == tag
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))  # written again within a second
    assert Tar.of(tmp_path, ["file"]).tag != tag


def test_a_checkpoint_that_is_saved_anew_ends_the_stream_with_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"before")
    tar = Tar.of(tmp_path, ["file"])
    (tmp_path / "other").write_bytes(b"behind")
    (tmp_path / "other").replace(tmp_path / "file")
    with pytest.raises(InternalServerError, match="file changed"):
        list(tar.chunks())


def test_a_file_that_grows_while_it_is_sent_is_cut_where_its_header_says(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * MIB))
    expected = b"".join(Tar.of(tmp_path, ["file"]).chunks())
    chunks = Tar.of(tmp_path, ["file"]).chunks()
    sent = next(chunks) + next(chunks)
    (tmp_path / "file").write_bytes(bytes(3 * MIB) + b"and after")
    assert sent + b"".join(chunks) == expected


@pytest.mark.parametrize("after", [b"b", b"behind", b"before and after"])
def test_a_file_that_has_changed_ends_the_stream_with_an_error(tmp_path, after):
    """The same number does not make it the same file: numbers of deleted files are given out again."""
    file = tmp_path / "file"
    file.write_bytes(b"before")
    facts = file.stat()
    chunks = Tar.of(tmp_path, ["file"]).chunks()
    file.write_bytes(after)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert file.stat().st_ino == facts.st_ino
    with pytest.raises(InternalServerError, match="file changed"):
        list(chunks)


# --- exports


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in (*ADAPTER_FILES, "optimizer.safetensors", "manifest.json"):
        (directory / name).write_bytes(name.encode() * 5000)
    return directory


def read(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_an_export_holds_the_adapter_alone(checkpoint, tmp_path):
    target = tmp_path / "exports" / "one"
    size = export(checkpoint, target)
    assert read(target) == {name: (checkpoint / name).read_bytes() for name in ADAPTER_FILES}
    assert size == sum(len(content) for content in read(target).values())
    assert names_in(target.parent) == ["one"]


def test_an_export_can_be_run_again(checkpoint, tmp_path):
    target = tmp_path / "exports" / "one"
    export(checkpoint, target)
    (checkpoint / ADAPTER_FILES[0]).write_bytes(b"new")
    (target / "leftover").touch()
    export(checkpoint, target)
    assert sorted(read(target)) == sorted(ADAPTER_FILES)
    assert read(target)[ADAPTER_FILES[0]] == b"new"
    assert names_in(target.parent) == ["one"]


def test_the_longest_name_can_be_exported_to(checkpoint, tmp_path):
    target = tmp_path / validate_name("n" * 255)
    export(checkpoint, target)
    export(checkpoint, target)
    assert sorted(read(target)) == sorted(ADAPTER_FILES)


def test_every_recipient_can_decrypt_and_nobody_else(checkpoint, tmp_path):
    readers = [pyrage.x25519.Identity.generate() for _ in range(10)]
    target = tmp_path / "export"
    size = export(checkpoint, target, [str(reader.to_public()) for reader in readers])
    files = read(target)
    assert sorted(files) == [f"{name}.age" for name in sorted(ADAPTER_FILES)]
    assert size == sum(len(content) for content in files.values())
    for name in ADAPTER_FILES:
        for reader in readers:
            plain = pyrage.decrypt(files[f"{name}.age"], [reader])
            assert plain == (checkpoint / name).read_bytes()
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(files[f"{name}.age"], [pyrage.x25519.Identity.generate()])


def test_encryption_does_not_hold_a_file_in_memory(checkpoint, tmp_path):
    with (checkpoint / "adapter_model.safetensors").open("wb") as file:
        file.truncate(24 * MIB)
    reader = pyrage.x25519.Identity.generate()
    tracemalloc.start()
    try:
        export(checkpoint, tmp_path / "export", [str(reader.to_public())])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB


def test_a_bad_recipient_is_named_before_anything_is_written(checkpoint, tmp_path):
    identity = pyrage.x25519.Identity.generate()
    good = str(identity.to_public())
    mistyped = good[:-1] + ("q" if good[-1] != "q" else "p")
    for bad in (mistyped, "", "ssh-ed25519 AAAA", str(identity)):
        with pytest.raises(InvalidInputError, match="recipient 2 of 3") as caught:
            export(checkpoint, tmp_path / "exports" / "one", [good, bad, good])
        assert caught.value.field == "age_encryption_recipients"
        assert "SECRET" not in str(caught.value)
    assert not (tmp_path / "exports").exists()


def test_at_most_ten_recipients(checkpoint, tmp_path):
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(InvalidInputError, match="at most 10") as caught:
        export(checkpoint, tmp_path / "exports" / "one", [good] * 11)
    assert caught.value.field == "age_encryption_recipients"
    assert not (tmp_path / "exports").exists()


def test_what_is_no_checkpoint_cannot_be_exported(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(NotFoundError, match=r"adapter_config\.json"):
        export(tmp_path / "source", tmp_path / "exports" / "one")
    assert not (tmp_path / "exports").exists()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_failing_disk_leaves_the_older_export_as_it_was(checkpoint, tmp_path, encrypted):
    resource = pytest.importorskip("resource")
    recipients = [str(pyrage.x25519.Identity.generate().to_public())] if encrypted else []
    target = tmp_path / "exports" / "one"
    export(checkpoint, target)
    before = read(target)
    with (checkpoint / "adapter_model.safetensors").open("wb") as file:
        file.truncate(4 * MIB)
    # Files may not grow beyond 1 MiB for a moment, which is how a full disk looks to a writer.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OSError):  # noqa: PT011
            export(checkpoint, target, recipients)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(target) == before
    assert names_in(target.parent) == ["one"]


UNREADABLE = Path("/proc/self/mem")  # opens, and then fails to be read like a broken disk


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs a file that fails while it is read")
def test_a_source_that_fails_while_it_is_encrypted_is_a_disk_failure_too(tmp_path):
    recipient = pyrage.x25519.Identity.generate().to_public()
    with pytest.raises(OSError, match="mem could not be encrypted"):
        encrypt(UNREADABLE, tmp_path / "mem.age", [recipient])


# --- names


@given(st.text("AZaz09._-", min_size=1, max_size=255))
def test_a_name_is_kept_as_it_is(name):
    assume(not name.startswith("."))
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "a\\b",
        "a b",
        "a\n",
        "é",
        "٣",
        "a\0",
        "tinker://r/w/n",
        "n" * 256,
    ],
)
def test_a_name_unfit_for_a_directory_is_refused(name):
    with pytest.raises(InvalidInputError, match="1 to 255 of the characters") as caught:
        validate_name(name)
    assert caught.value.field == "path"
