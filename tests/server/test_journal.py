"""What is written is there again, in its order, whatever happens to the end of the file."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.server.journal import Journal, Kind, Place, Record

Entry = tuple[Kind, dict[str, object], bytes]

REQUEST, RESULT = Kind.REQUEST, Kind.RESULT
ENTRIES: list[Entry] = [
    (REQUEST, {"id": "a", "seq": "1", "at": 1.5, "extra": {}}, b"the first body"),
    (REQUEST, {"id": "b", "näme": None}, b""),
    (RESULT, {"id": "a", "failed": False}, bytes(range(256))),
]


@contextmanager
def opened(directory: Path, **options) -> Iterator[tuple[Journal, list[Record]]]:
    journal = Journal(directory, **options)
    try:
        yield journal, journal.open()
    finally:
        journal.close()


def entries(journal: Journal, records: list[Record]) -> list[Entry]:
    return [(record.kind, record.head, journal.read(record.place)) for record in records]


def written(directory: Path, *more: Entry, **options) -> None:
    with opened(directory, **options) as (journal, _):
        for entry in more:
            journal.append(*entry)


def found(directory: Path, **options) -> list[Entry]:
    with opened(directory, **options) as (journal, records):
        return entries(journal, records)


def body(number: int) -> Entry:
    return (REQUEST, {"id": str(number)}, bytes([number % 256]) * 50)


def compact(journal: Journal, needed, moved) -> bool:
    return asyncio.run(journal.compact(needed, moved))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes; a write is cut short there, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- writing and reading -----------------------------------------------------------------------------


def test_a_new_journal_is_empty(tmp_path):
    assert found(tmp_path / "deep" / "journal") == []


def test_bodies_are_read_from_where_append_said_they_are(tmp_path):
    with opened(tmp_path) as (journal, _):
        places = [journal.append(*entry) for entry in ENTRIES]
        assert [journal.read(place) for place in places] == [entry[2] for entry in ENTRIES]
        asyncio.run(journal.flushed())
        assert journal.size == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_reopening_gives_all_records_in_order(tmp_path):
    with opened(tmp_path) as (journal, _):
        places = [journal.append(*entry) for entry in ENTRIES]
        asyncio.run(journal.flushed())
    with opened(tmp_path) as (journal, records):
        assert entries(journal, records) == ENTRIES
        assert [record.place for record in records] == places


def test_what_was_not_flushed_survives_the_end_of_the_process_alone(tmp_path):
    written(tmp_path, *ENTRIES)  # no flush: only a crash of the machine could lose these
    assert found(tmp_path) == ENTRIES


def test_a_journal_goes_on_after_reopening_without_a_file_for_each_start(tmp_path):
    for entry in ENTRIES:
        written(tmp_path, entry)
    for _ in range(20):
        assert found(tmp_path) == ENTRIES
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_owner_may_read_what_users_sent(tmp_path):
    written(tmp_path, *ENTRIES)
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


# -- torn and damaged --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a journal of three records, and where each ends."""
    directory = tmp_path_factory.mktemp("sound")
    with opened(directory) as (journal, _):
        ends = []
        for entry in ENTRIES:
            place = journal.append(*entry)
            ends.append(place.offset + place.length)
    [file] = directory.iterdir()
    return file.name, file.read_bytes(), ends


def check_recovery(name: str, data: bytes, expected: list[Entry]) -> None:
    """A journal with `data` for a file opens with `expected`, can be written to, and stays that way."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / name).write_bytes(data)
        with opened(Path(scratch)) as (journal, records):
            assert entries(journal, records) == expected
            journal.append(*body(7))
            journal.append(*body(8))
        assert found(Path(scratch)) == [*expected, body(7), body(8)]


def test_a_file_cut_anywhere_keeps_the_records_before_the_cut(sound):
    name, data, ends = sound
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends)
        check_recovery(name, data[:cut], ENTRIES[:whole])


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_in_the_last_record_costs_that_record_alone(sound, data):
    name, content, ends = sound
    at = data.draw(st.integers(ends[-2], len(content) - 1))
    damaged = bytearray(content)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    check_recovery(name, bytes(damaged), ENTRIES[:-1])


@settings(max_examples=60)
@given(st.binary(max_size=80))
def test_whatever_follows_the_last_record_is_cut_off(sound, rest):
    name, content, _ = sound
    check_recovery(name, content + rest, ENTRIES)


def test_a_tail_of_zeros_is_cut_off(sound):
    name, content, _ = sound  # file systems leave this when they knew the size and not the data
    check_recovery(name, content + bytes(4096), ENTRIES)


def test_a_length_beyond_the_file_is_not_believed(sound):
    name, content, _ = sound
    check_recovery(name, content + struct.pack("<IBQII", 1, 1, 3, 2**32 - 1, 2**32 - 1), ENTRIES)


def test_damage_before_the_end_is_told_and_not_made_worse(tmp_path, caplog):
    written(tmp_path, *(body(number) for number in range(6)), segment_bytes=150)
    first, *_, last = sorted(tmp_path.iterdir())
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    last.write_bytes(b"another" + last.read_bytes()[7:])
    with caplog.at_level(logging.ERROR):
        kept = found(tmp_path, segment_bytes=150)
    assert [entry[1]["id"] for entry in kept] == ["0", "2", "3"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert str(first) in caplog.text
    assert str(last) in caplog.text
    assert first.read_bytes() == damaged
    assert last.read_bytes().startswith(b"another")
    written(tmp_path, body(9), segment_bytes=150)
    assert found(tmp_path, segment_bytes=150) == [*kept, body(9)]


def test_a_flipped_byte_between_others_costs_one_record_and_is_told(tmp_path, sound, caplog):
    """Unless it is one of those that say where the record ends, behind which nothing can be found for sure."""
    name, content, ends = sound
    lengths = range(ends[0] + 13, ends[0] + 21)
    for at in range(ends[0], ends[1]):
        damaged = bytearray(content)
        damaged[at] ^= 0x55
        (tmp_path / name).write_bytes(damaged)
        caplog.clear()
        kept = found(tmp_path)
        if at in lengths or at == ends[0] + 4:  # what kind of record it is tells a record from none
            assert kept == ENTRIES[:1]
            continue
        assert kept == [ENTRIES[0], ENTRIES[2]]
        assert f"{name} is damaged: {ends[1] - ends[0]} bytes cannot be read" in caplog.text
        assert (tmp_path / name).read_bytes() == damaged
        written(tmp_path, body(7))
        assert found(tmp_path) == [ENTRIES[0], ENTRIES[2], body(7)]


@pytest.mark.parametrize("torn", [30, 1])
def test_a_record_inside_a_torn_body_is_none(tmp_path, sound, torn):
    """Whoever sends a request decides what is in its body; that must not become a record of somebody else."""
    _, content, ends = sound
    forged = content[ends[0] : ends[1]]  # a whole record
    written(tmp_path, (REQUEST, {"id": "x"}, forged * 5 + bytes(40)))
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-torn])
    assert found(tmp_path) == []


# -- segments and compaction -------------------------------------------------------------------------


def test_segments_roll_and_keep_the_order(tmp_path):
    many = [body(number) for number in range(40)]
    written(tmp_path, *many, segment_bytes=300)
    assert len(list(tmp_path.iterdir())) > 5
    assert found(tmp_path, segment_bytes=300) == many


def test_compacting_keeps_what_is_needed_and_says_where_it_is_now(tmp_path):
    with opened(tmp_path, segment_bytes=300) as (journal, _):
        places = {str(number): journal.append(*body(number)) for number in range(12)}
        oldest = min(tmp_path.iterdir())
        in_oldest = {name for name, place in places.items() if place.segment == 0}
        assert len(in_oldest) > 2
        before = journal.size
        asked: list[str] = []
        moved: dict[str, Place] = {}

        def needed(record: Record) -> bool:
            asked.append(record.head["id"])
            return bool(record.head["id"] == "1")

        assert compact(journal, needed, lambda each: moved.update({each.head["id"]: each.place}))
        assert set(asked) == in_oldest
        assert set(moved) == {"1"}
        assert moved["1"] != places["1"]
        assert journal.read(moved["1"]) == body(1)[2]
        assert not oldest.exists()
        assert journal.size < before
        assert journal.size == sum(file.stat().st_size for file in tmp_path.iterdir())
        for name in set(places) - in_oldest:
            assert journal.read(places[name]) == body(int(name))[2]
    # Where it came from is where it is again: a request is met before its result.
    kept = [body(1), *(body(number) for number in range(12) if str(number) not in in_oldest)]
    assert found(tmp_path, segment_bytes=300) == kept


def test_a_request_moved_behind_its_result_is_still_met_first(tmp_path):
    with opened(tmp_path, segment_bytes=100) as (journal, _):
        journal.append(REQUEST, {"id": "a"}, b"." * 200)
        journal.append(RESULT, {"id": "a"}, b"")
        assert not compact(journal, lambda _: True, lambda _: None)  # moved, and nothing gained
        journal.append(RESULT, {"id": "b"}, b"")
    with opened(tmp_path) as (journal, records):
        assert [(record.kind, record.head["id"]) for record in records] == [
            (REQUEST, "a"),
            (RESULT, "a"),
            (RESULT, "b"),
        ]
        assert [record.number for record in records] == [0, 1, 2]


def test_the_segment_that_is_written_to_is_never_compacted(tmp_path):
    with opened(tmp_path) as (journal, _):
        journal.append(*ENTRIES[0])
        assert not compact(journal, lambda _: False, lambda _: None)
    assert found(tmp_path) == ENTRIES[:1]


def test_compacting_says_when_it_gains_nothing(tmp_path):
    with opened(tmp_path, segment_bytes=300) as (journal, _):
        for number in range(20):
            journal.append(*body(number))
        needed = lambda record: record.head["id"] != "9"  # noqa: E731
        gains = [compact(journal, needed, lambda _: None) for _ in range(8)]
    assert gains == [False, False, True, False, False, False, False, False]
    assert found(tmp_path) == [body(number) for number in range(20) if number != 9]


def test_a_crash_between_moving_and_removing_leaves_each_record_once(tmp_path):
    with opened(tmp_path, segment_bytes=300) as (journal, _):
        for number in range(8):
            journal.append(*body(number))
        oldest = min(tmp_path.iterdir())
        saved = oldest.read_bytes()
        compact(journal, lambda _: True, lambda _: None)
    oldest.write_bytes(saved)
    with opened(tmp_path, segment_bytes=300) as (journal, records):
        assert entries(journal, records) == [body(number) for number in range(8)]
        compact(journal, lambda _: True, lambda _: None)
    assert found(tmp_path, segment_bytes=300) == [body(number) for number in range(8)]


def test_what_was_moved_is_on_the_disk_before_the_old_copy_goes(tmp_path):
    synced: set[int] = set()

    def sync(descriptor: int) -> None:
        assert oldest.exists()
        synced.add(os.fstat(descriptor).st_ino)
        os.fsync(descriptor)

    with opened(tmp_path, segment_bytes=300, sync=sync) as (journal, _):
        for number in range(6):
            journal.append(*body(number))
        oldest = min(tmp_path.iterdir())
        asyncio.run(journal.flushed())
        synced.clear()
        places: list[Place] = []
        compact(journal, lambda _: True, lambda record: places.append(record.place))
        assert len({place.segment for place in places}) == 2  # they did not fit into one
        assert {file.stat().st_ino for file in tmp_path.iterdir()} <= synced


# -- a full disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 10, 21, 30, 60, 100])
def test_a_full_disk_raises_and_leaves_no_trace(tmp_path, room):
    with opened(tmp_path) as (journal, _):
        journal.append(*body(1))
        with full_disk(journal.size + room):
            for _ in range(3):
                with pytest.raises(OSError, match="too large"):
                    journal.append(REQUEST, {"id": "x"}, b"x" * 1000)
        journal.append(*body(2))
        [file] = tmp_path.iterdir()
        assert file.stat().st_size == journal.size
    assert found(tmp_path) == [body(1), body(2)]


@pytest.mark.parametrize("room", [0, 5])
def test_a_disk_too_full_for_a_new_segment_can_be_freed(tmp_path, room):
    with opened(tmp_path, segment_bytes=20) as (journal, _):
        journal.append(*body(1))
        with full_disk(room):
            for _ in range(3):
                with pytest.raises(OSError, match="too large"):
                    journal.append(*body(2))
        assert len(list(tmp_path.iterdir())) == 1
        journal.append(*body(2))
        journal.append(*body(3))
    assert found(tmp_path) == [body(1), body(2), body(3)]


def test_a_disk_that_fills_up_while_compacting_loses_nothing(tmp_path):
    many = [body(number) for number in range(9)]
    places: dict[str, Place] = {}
    with opened(tmp_path, segment_bytes=300) as (journal, _):
        for entry in many:
            places[str(entry[1]["id"])] = journal.append(*entry)
        moved = lambda record: places.update({record.head["id"]: record.place})  # noqa: E731
        last = max(tmp_path.iterdir())
        with (
            full_disk(last.stat().st_size + 100),
            pytest.raises(OSError, match="too large"),
        ):
            compact(journal, lambda _: True, moved)
        assert [journal.read(place) for place in places.values()] == [entry[2] for entry in many]
        compact(journal, lambda _: True, moved)
        assert [journal.read(place) for place in places.values()] == [entry[2] for entry in many]
    assert found(tmp_path) == many


# -- flushing ----------------------------------------------------------------------------------------


class SlowDisk:
    """A disk whose flushes wait for a word and are counted; what they do is real."""

    def __init__(self) -> None:
        self.flushes = 0
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, descriptor: int) -> None:
        self.flushes += 1
        self.begun.release()
        assert self.go.wait(30)
        os.fsync(descriptor)


def test_records_that_come_together_share_a_flush(tmp_path):
    disk = SlowDisk()

    async def write(journal: Journal, number: int) -> None:
        journal.append(*body(number))
        await journal.flushed()

    async def write_many(journal: Journal) -> None:
        first = asyncio.create_task(write(journal, 0))
        await asyncio.to_thread(disk.begun.acquire)
        others = [asyncio.create_task(write(journal, number)) for number in range(1, 100)]
        await asyncio.sleep(0)  # all of them have written and wait
        assert disk.flushes == 1
        assert not first.done()
        disk.go.set()
        await asyncio.gather(first, *others)

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(write_many(journal))
    assert disk.flushes == 2
    assert found(tmp_path) == [body(number) for number in range(100)]


def test_a_flush_that_is_under_way_does_not_count_for_what_comes_after(tmp_path):
    disk = SlowDisk()

    async def overlap(journal: Journal) -> None:
        journal.append(*body(0))
        early = asyncio.create_task(journal.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        journal.append(*body(1))
        late = asyncio.create_task(journal.flushed())
        disk.go.set()
        await early
        assert not late.done()
        await late
        assert disk.flushes == 2

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(overlap(journal))


def test_who_waits_for_one_record_waits_for_one_flush(tmp_path):
    disk = SlowDisk()

    async def overlap(journal: Journal) -> None:
        first = journal.append(*body(0))
        flushing = asyncio.create_task(journal.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        later = journal.append(*body(1))
        waiting = [asyncio.create_task(journal.flushed(place)) for place in (first, later)]
        await asyncio.sleep(0)
        disk.go.set()
        await waiting[0]
        assert flushing.done()
        assert disk.flushes == 1 or not waiting[1].done()
        await waiting[1]
        for place in (first, later):
            await journal.flushed(place)
        assert disk.flushes == 2

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(overlap(journal))


def test_what_was_flushed_is_known(tmp_path):
    with opened(tmp_path, segment_bytes=20) as (journal, _):
        first, second = (journal.append(REQUEST, {}, b"") for _ in range(2))
        assert not journal.is_flushed(first)
        asyncio.run(journal.flushed())
        assert journal.is_flushed(first)
        assert journal.is_flushed(second)
        assert not journal.is_flushed(journal.append(*body(1)))


def test_what_was_there_before_is_flushed_too(tmp_path):
    written(tmp_path, *(body(number) for number in range(6)), segment_bytes=150)
    synced: set[int] = set()
    with opened(tmp_path, sync=lambda each: synced.add(os.fstat(each).st_ino)) as (journal, _):
        asyncio.run(journal.flushed())
    assert synced == {file.stat().st_ino for file in tmp_path.iterdir()}


def test_every_segment_that_was_written_to_is_flushed(tmp_path):
    synced: set[int] = set()

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    with opened(tmp_path, segment_bytes=300, sync=sync) as (journal, _):
        for number in range(12):
            journal.append(*body(number))
        asyncio.run(journal.flushed())
    assert synced == {file.stat().st_ino for file in tmp_path.iterdir()}


def test_a_flush_that_fails_is_told_to_all_who_wait_and_tried_again_for_the_next(tmp_path):
    broken = [True]
    synced: list[int] = []

    def sync(descriptor: int) -> None:
        if broken[0]:
            raise OSError(5, "the disk is gone")
        synced.append(descriptor)

    async def fail(journal: Journal) -> None:
        journal.append(*body(0))
        told = await asyncio.gather(*(journal.flushed() for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in told] == ["[Errno 5] the disk is gone"] * 3
        broken[0] = False
        await journal.flushed()
        assert synced

    with opened(tmp_path, sync=sync) as (journal, _):
        asyncio.run(fail(journal))


def test_who_stops_waiting_does_not_disturb_the_others(tmp_path):
    disk = SlowDisk()

    async def leave(journal: Journal) -> None:
        journal.append(*body(0))
        leaving = asyncio.create_task(journal.flushed())
        staying = asyncio.create_task(journal.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        leaving.cancel()
        disk.go.set()
        await staying
        assert leaving.cancelled()

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(leave(journal))


def test_a_segment_is_not_closed_under_a_flush(tmp_path):
    disk = SlowDisk()

    async def overlap(journal: Journal) -> None:
        for number in range(12):
            journal.append(*body(number))
        flushing = asyncio.create_task(journal.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        compacting = asyncio.create_task(journal.compact(lambda _: False, lambda _: None))
        for _ in range(20):
            await asyncio.sleep(0)
        assert oldest.exists()
        disk.go.set()
        await flushing
        assert await compacting
        assert not oldest.exists()

    with opened(tmp_path, segment_bytes=300, sync=disk) as (journal, _):
        oldest = min(tmp_path.iterdir())
        asyncio.run(overlap(journal))


def test_others_have_their_turns_while_a_segment_is_compacted(tmp_path):
    large = 100 << 10
    turns = 0

    async def overlap(journal: Journal) -> None:
        places = {str(n): journal.append(REQUEST, {"id": str(n)}, bytes(large)) for n in range(9)}

        async def others() -> None:
            nonlocal turns
            while not compacting.done():
                turns += 1
                assert all(len(journal.read(place)) == large for place in places.values())
                journal.append(RESULT, {"id": f"meanwhile {turns}"}, b"")
                await asyncio.sleep(0)

        compacting = asyncio.create_task(
            journal.compact(
                lambda record: record.head["id"] != "3",
                lambda record: places.update({record.head["id"]: record.place}),
            )
        )
        del places["3"]
        await asyncio.gather(others(), compacting)

    with opened(tmp_path, segment_bytes=large * 8) as (journal, _):
        asyncio.run(overlap(journal))
    assert turns > 5
    kept = {entry[1]["id"] for entry in found(tmp_path)}
    assert kept == {*map(str, range(9)), *(f"meanwhile {n + 1}" for n in range(turns))} - {"3"}


def test_a_closed_journal_does_not_let_anybody_wait(tmp_path):
    journal = Journal(tmp_path)
    journal.open()
    journal.close()
    with pytest.raises(RuntimeError):
        asyncio.run(journal.flushed())


def test_a_copy_of_the_files_is_a_copy_of_the_journal(tmp_path):
    with opened(tmp_path / "here") as (journal, _):
        for entry in ENTRIES:
            journal.append(*entry)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert found(tmp_path / "there") == ENTRIES
