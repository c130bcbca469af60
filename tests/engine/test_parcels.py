"""Values that engines of one machine exchange: what stays of them when there is no room, and when an engine dies."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tinkex.engine.parcels import FileDepot, ParcelLostError
from tinkex.engine.shared_memory import SharedMemory


def test_parcel_is_read_until_it_is_dropped(tmp_path):
    depot = FileDepot(tmp_path)
    parcel = depot.put("name", b"data")
    assert FileDepot(tmp_path / "of another engine").get(parcel) == b"data"
    for _ in range(2):
        depot.drop(parcel)
    with pytest.raises(ParcelLostError, match="No such file"):
        depot.get(parcel)


def test_parcel_without_room_leaves_nothing(tmp_path, monkeypatch):
    written = Path.write_bytes

    def half(path, data):
        written(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left on device"):
        FileDepot(tmp_path).put("name", b"data")
    assert list(tmp_path.iterdir()) == []


def killed(memory: SharedMemory) -> None:
    assert memory._lock is not None
    os.close(memory._lock)  # as the kernel does when a process ends


def test_parcels_of_a_killed_engine_are_removed_by_the_next_one(tmp_path):
    first, other, again = (SharedMemory(tmp_path) for _ in range(3))
    for each in (first, other):
        each.open()
    lost, kept = first.put("lost", b"1"), other.put("kept", b"2")
    killed(first)
    again.open()
    assert other.get(kept) == b"2"
    with pytest.raises(ParcelLostError):
        other.get(lost)
    assert {each.name for each in tmp_path.iterdir()} == {
        other.directory.name,
        again.directory.name,
    }


def test_directory_that_the_system_has_removed_is_made_again(tmp_path):
    pool = SharedMemory(tmp_path)
    pool.open()
    engine = SharedMemory(pool.directory)
    engine.open()
    shutil.rmtree(pool.directory)
    assert engine.get(engine.put("name", b"data")) == b"data"
    SharedMemory(tmp_path).remove_abandoned()  # of another service: the engine lives
    assert engine.directory.exists()
    pool.keep()
    killed(engine)
    SharedMemory(tmp_path).remove_abandoned()  # the pool lives
    assert pool.directory.exists()
    killed(pool)
    SharedMemory(tmp_path).remove_abandoned()
    assert list(tmp_path.iterdir()) == []


def test_directory_whose_process_died_before_it_had_its_lock_is_removed_after_a_minute(tmp_path):
    young, old = (SharedMemory(tmp_path).directory for _ in range(2))
    for each in (young, old):
        each.mkdir()
    os.utime(old, (0, 0))
    SharedMemory(tmp_path).remove_abandoned()
    assert list(tmp_path.iterdir()) == [young]


def test_directory_that_another_user_has_made_is_not_used(tmp_path, monkeypatch):
    memory = SharedMemory(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError):
        memory.open()
