"""Tar streams of checkpoint files."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import InternalServerError, InvalidInputError, NotFoundError
from tinkex.server.tars import Tar

MIB = 1 << 20


def whole(directory: Path, names: list[str]) -> bytes:
    with Tar.of(directory, names) as tar:
        return b"".join(tar.chunks())


def tag_of(directory: Path, names: list[str]) -> str:
    with Tar.of(directory, names) as tar:
        return tar.tag


# Tar formats differ in long names, non-ASCII names and sizes near a block boundary.
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
def test_a_tar_contains_exactly_the_named_files(files, mtime, data):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name, content in files.items():
            (directory / name).write_bytes(content)
            os.utime(directory / name, (0, mtime))
        names = data.draw(st.lists(st.sampled_from(sorted(files)), unique=True)) if files else []
        stream = whole(directory, names)
        with Tar.of(directory, names) as tar:
            assert len(stream) == tar.size
        assert stream == whole(directory, names)
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


def test_owner_and_mode_of_a_file_do_not_change_the_tar(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    os.utime(tmp_path / "file", (1, 1.5))
    (tmp_path / "file").chmod(0o700)
    before = whole(tmp_path, ["file"])
    (tmp_path / "file").chmod(0o600)
    os.utime(tmp_path / "file", (2, 1.25))
    assert whole(tmp_path, ["file"]) == before


def test_a_large_file_is_streamed_in_small_chunks(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(24 * MIB + 7)
    tracemalloc.start()
    try:
        with Tar.of(tmp_path, ["large"]) as tar:
            sizes = [len(chunk) for chunk in tar.chunks()]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(sizes) <= MIB
    assert sum(sizes) == tar.size
    assert peak < 4 * MIB


def test_a_file_over_8_gib_keeps_its_size_in_the_header(tmp_path):
    size = 9 << 30
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(size)  # a sparse file
    with Tar.of(tmp_path, ["huge"]) as tar:
        header = next(tar.chunks())
    assert tar.size == len(header) + size + 1024
    with tarfile.open(fileobj=io.BytesIO(header), mode="r|") as archive:
        member = archive.next()
    assert member is not None
    assert member.size == size


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../file", "a/file", "/etc/passwd", "a\\b", "a\0b"]
)
def test_names_outside_the_directory_are_refused(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError) as caught:
        Tar.of(tmp_path / "a" if name.startswith("..") else tmp_path, [name])
    assert caught.value.field == "names"


def test_links_directories_and_missing_files_are_refused(tmp_path):
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
def test_any_byte_range_of_a_tar_can_be_read(contents, start, length):
    with tempfile.TemporaryDirectory() as place:
        names = [f"file{number}" for number in range(len(contents))]
        for name, content in zip(names, contents, strict=True):
            (Path(place) / name).write_bytes(content)
        with Tar.of(Path(place), names) as tar:
            content = b"".join(tar.chunks())
            assert b"".join(tar.chunks(start)) == content[start:]
            assert b"".join(tar.chunks(start, start + length)) == content[start : start + length]


def test_the_tag_changes_only_when_a_file_changes(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    facts = file.stat()
    tag = tag_of(tmp_path, ["file"])
    assert tag_of(tmp_path, ["file"]) == tag
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))  # written again within a second
    assert tag_of(tmp_path, ["file"]) != tag


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_archive_that_is_being_sent_ends_whole_although_its_checkpoint_is_gone(tmp_path, change):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("one", "two"):
        (directory / name).write_bytes(name.encode())
    names = ["one", "two"]
    before = whole(directory, names)
    with Tar.of(directory, names) as tar:
        chunks = tar.chunks()
        sent = next(chunks)
        shutil.rmtree(directory)
        if change == "replace":
            directory.mkdir()
            for name in names:
                (directory / name).write_bytes(b"new")
        assert sent + b"".join(chunks) == before


def test_bytes_appended_during_a_download_are_not_sent(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * MIB))
    expected = whole(tmp_path, ["file"])
    with Tar.of(tmp_path, ["file"]) as tar:
        chunks = tar.chunks()
        sent = next(chunks) + next(chunks)
        (tmp_path / "file").write_bytes(bytes(3 * MIB) + b"and after")
        assert sent + b"".join(chunks) == expected


@pytest.mark.parametrize("after", [b"b", b"behind", b"before and after"])
def test_a_rewritten_file_with_the_same_inode_ends_the_stream_with_an_error(tmp_path, after):
    file = tmp_path / "file"
    file.write_bytes(b"before")
    facts = file.stat()
    with Tar.of(tmp_path, ["file"]) as tar:
        file.write_bytes(after)
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
        assert file.stat().st_ino == facts.st_ino
        with pytest.raises(InternalServerError, match="file changed"):
            list(tar.chunks())
