"""Plain and encrypted copies of an adapter."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pyrage  # type: ignore[import-untyped]
import pytest

from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.server.exports import _encrypt as encrypt
from tinkex.server.exports import export
from tinkex.server.names import ADAPTER_FILES, validate_name

MIB = 1 << 20


def names_in(directory):
    return sorted(entry.name for entry in directory.iterdir())


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in (*ADAPTER_FILES, "optimizer.safetensors", "manifest.json"):
        (directory / name).write_bytes(name.encode() * 5000)
    return directory


def read(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_an_export_contains_only_the_adapter_files(checkpoint, tmp_path):
    target = tmp_path / "exports" / "one"
    size = export(checkpoint, target)
    assert read(target) == {name: (checkpoint / name).read_bytes() for name in ADAPTER_FILES}
    assert size == sum(len(content) for content in read(target).values())
    assert names_in(target.parent) == ["one"]


def test_a_second_export_replaces_the_first(checkpoint, tmp_path):
    target = tmp_path / "exports" / "one"
    export(checkpoint, target)
    (checkpoint / ADAPTER_FILES[0]).write_bytes(b"new")
    (target / "leftover").touch()
    export(checkpoint, target)
    assert sorted(read(target)) == sorted(ADAPTER_FILES)
    assert read(target)[ADAPTER_FILES[0]] == b"new"
    assert names_in(target.parent) == ["one"]


def test_an_export_may_have_the_longest_allowed_name(checkpoint, tmp_path):
    target = tmp_path / validate_name("n" * 255)
    export(checkpoint, target)
    export(checkpoint, target)
    assert sorted(read(target)) == sorted(ADAPTER_FILES)


def test_every_recipient_can_decrypt_and_no_other_key_can(checkpoint, tmp_path):
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


def test_encryption_streams_the_file(checkpoint, tmp_path):
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


def test_a_bad_recipient_is_refused_before_any_file_is_written(checkpoint, tmp_path):
    identity = pyrage.x25519.Identity.generate()
    good = str(identity.to_public())
    mistyped = good[:-1] + ("q" if good[-1] != "q" else "p")
    for bad in (mistyped, "", "ssh-ed25519 AAAA", str(identity)):
        with pytest.raises(InvalidInputError, match="recipient 2 of 3") as caught:
            export(checkpoint, tmp_path / "exports" / "one", [good, bad, good])
        assert caught.value.field == "age_encryption_recipients"
        assert "SECRET" not in str(caught.value)
    assert not (tmp_path / "exports").exists()


def test_more_than_ten_recipients_are_refused(checkpoint, tmp_path):
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(InvalidInputError, match="at most 10") as caught:
        export(checkpoint, tmp_path / "exports" / "one", [good] * 11)
    assert caught.value.field == "age_encryption_recipients"
    assert not (tmp_path / "exports").exists()


def test_a_directory_without_an_adapter_cannot_be_exported(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(NotFoundError, match=r"adapter_config\.json"):
        export(tmp_path / "source", tmp_path / "exports" / "one")
    assert not (tmp_path / "exports").exists()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_full_disk_leaves_the_previous_export_unchanged(checkpoint, tmp_path, encrypted):
    resource = pytest.importorskip("resource")
    recipients = [str(pyrage.x25519.Identity.generate().to_public())] if encrypted else []
    target = tmp_path / "exports" / "one"
    export(checkpoint, target)
    before = read(target)
    with (checkpoint / "adapter_model.safetensors").open("wb") as file:
        file.truncate(4 * MIB)
    # A file size limit of 1 MiB: writes beyond it fail as they do on a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OSError):  # noqa: PT011
            export(checkpoint, target, recipients)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(target) == before
    assert names_in(target.parent) == ["one"]


UNREADABLE = Path("/proc/self/mem")  # can be opened, but reading it fails


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs a file whose read fails")
def test_a_read_error_during_encryption_is_an_os_error(tmp_path):
    recipient = pyrage.x25519.Identity.generate().to_public()
    with pytest.raises(OSError, match="mem could not be encrypted"):
        encrypt(UNREADABLE, tmp_path / "mem.age", [recipient])
