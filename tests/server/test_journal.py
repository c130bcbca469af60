"""Journal records are read back in order, also after torn writes, damage and failed flushes."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.server.journal import BodyPosition, Damage, Journal, Kind, Record
from tinkex.server.segments import PROLOGUE_BYTES, scope_sum

Entry = tuple[Kind, dict[str, object], bytes]

REQUEST, RESULT = Kind.REQUEST, Kind.RESULT
#: Size of the header, which is before and after each record.
HEADER_BYTES = 41
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
    journal.on_moved = moved
    return asyncio.run(journal.compact(needed))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes; a longer write is cut short, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- writing and reading -----------------------------------------------------------------------------


def test_a_new_journal_is_empty(tmp_path):
    assert found(tmp_path / "deep" / "journal") == []


def test_bodies_are_read_at_the_place_that_append_returned(tmp_path):
    with opened(tmp_path) as (journal, _):
        places = [journal.append(*entry) for entry in ENTRIES]
        assert [journal.read(place) for place in places] == [entry[2] for entry in ENTRIES]
        asyncio.run(journal.flushed())
        assert journal.size == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_reopening_returns_all_records_in_order(tmp_path):
    with opened(tmp_path) as (journal, _):
        places = [journal.append(*entry) for entry in ENTRIES]
        asyncio.run(journal.flushed())
    with opened(tmp_path) as (journal, records):
        assert entries(journal, records) == ENTRIES
        assert [record.place for record in records] == places


def test_unflushed_records_survive_a_process_crash(tmp_path):
    written(tmp_path, *ENTRIES)  # not flushed: only a crash of the machine could lose these
    assert found(tmp_path) == ENTRIES


def test_reopening_continues_the_last_segment(tmp_path):
    for entry in ENTRIES:
        written(tmp_path, entry)
    for _ in range(20):
        assert found(tmp_path) == ENTRIES
    assert len(list(tmp_path.iterdir())) == 1


def test_journal_files_are_readable_by_their_owner_only(tmp_path):
    written(tmp_path, *ENTRIES)
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


# -- torn and damaged --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a journal of three records, and the end of each."""
    directory = tmp_path_factory.mktemp("sound")
    with opened(directory) as (journal, _):
        ends = []
        for entry in ENTRIES:
            place = journal.append(*entry)
            ends.append(place.offset + place.length + HEADER_BYTES)
    [file] = directory.iterdir()
    return file.name, file.read_bytes(), ends


def check_recovery(name: str, data: bytes, expected: list[Entry]) -> None:
    """A journal with `data` as its file opens with the `expected` records, accepts writes, and reopens equal."""
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


def aside(directory: Path, data: bytes) -> tuple[list[Entry], list[Damage], list[Path]]:
    """The records of a journal with `data` as its file, its damage, and the files set aside."""
    (directory / "000000000000.log").write_bytes(data)
    kept: list[Path] = []
    with opened(directory, set_aside=lambda path, why: kept.append(path)) as (journal, records):
        return entries(journal, records), journal.damage, kept


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_bit_loses_at_most_one_record_and_is_reported(sound, data):
    """Every missing record is reported as damage that names its run."""
    _, content, _ = sound
    at = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as scratch:
        kept, damage, copied = aside(Path(scratch), bytes(damaged))
    missing = [entry for entry in ENTRIES if entry not in kept]
    assert kept == [entry for entry in ENTRIES if entry in kept]
    assert len(missing) <= 1
    if missing:
        [lost], [entry] = damage, missing
        assert lost.kind is entry[0]
        assert lost.scope == scope_sum("")
        assert lost.record is None or lost.record.head == entry[1]
        assert copied
    assert bool(copied) == bool(damage)


def test_a_flipped_bit_in_a_header_is_repaired_from_its_copy(sound, tmp_path):
    _, content, ends = sound
    for begin in (PROLOGUE_BYTES, *ends[:-1]):
        for at in range(begin, begin + HEADER_BYTES):
            damaged = bytearray(content)
            damaged[at] ^= 0x10
            assert aside(tmp_path, bytes(damaged))[:2] == (ENTRIES, []), at


def test_two_lost_headers_mean_that_any_record_may_be_lost(sound, tmp_path):
    _, content, ends = sound
    damaged = bytearray(content)
    damaged[ends[0] + 3] ^= 1
    damaged[ends[1] - 3] ^= 1
    kept, damage, copied = aside(tmp_path, bytes(damaged))
    assert kept == [ENTRIES[0], ENTRIES[2]]
    assert damage == [Damage(ends[0], ends[1] - ends[0])]
    assert copied


def test_a_hole_across_several_records_ends_at_the_next_valid_one(tmp_path):
    many = [body(number) for number in range(9)]
    written(tmp_path, *many)
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    size = (len(content) - PROLOGUE_BYTES) // 9
    begin, end = PROLOGUE_BYTES + 2 * size + 7, PROLOGUE_BYTES + 6 * size + 7
    kept, damage, _ = aside(tmp_path, content[:begin] + bytes(end - begin) + content[end:])
    # The last one has lost only the header before its body.
    assert kept == [*many[:2], *many[6:]]
    assert damage[0].kind is None


def test_mend_removes_damage_and_keeps_the_other_records(sound, tmp_path, caplog):
    name, content, ends = sound
    damaged = bytearray(content)
    damaged[ends[1] - HEADER_BYTES - 1] ^= 1  # the head of the second record, which has no body
    (tmp_path / name).write_bytes(damaged)
    with caplog.at_level(logging.ERROR), opened(tmp_path) as (journal, records):
        assert entries(journal, records) == [ENTRIES[0], ENTRIES[2]]
        journal.append(*body(7))
        asyncio.run(journal.mend())
        assert journal.damage == []
    assert f"{name} is damaged: {ends[1] - ends[0]} bytes cannot be read" in caplog.text
    caplog.clear()
    assert found(tmp_path) == [ENTRIES[0], ENTRIES[2], body(7)]
    assert not caplog.records


def test_damage_is_reported_until_it_is_mended(sound, tmp_path):
    name, content, ends = sound
    damaged = bytearray(content)
    damaged[ends[0] - HEADER_BYTES - 1] ^= 1
    for _ in range(2):  # a crash before the affected runs are marked
        kept, damage, _ = aside(tmp_path, bytes(damaged))
        assert kept == ENTRIES[1:]
        assert damage[0].record is not None
        assert damage[0].record.head == ENTRIES[0][1]
    assert (tmp_path / name).read_bytes() == damaged


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_garbage_after_the_last_record_loses_no_record(sound, rest):
    name, content, _ = sound
    check_recovery(name, content + rest, ENTRIES)


def test_a_tail_of_zeros_is_cut_off(sound, tmp_path):
    name, content, ends = sound  # file systems leave zeros if only the size was written
    check_recovery(name, content + bytes(4096), ENTRIES)
    for cut in range(ends[-2], len(content)):
        kept, damage, _ = aside(tmp_path, content[:cut] + bytes(len(content) - cut))
        torn = cut < len(content) - HEADER_BYTES
        assert kept == ENTRIES[: 2 if torn else 3]
        if damage:  # a torn write cannot lose the body and both of its headers
            assert cut > len(content) - HEADER_BYTES


def test_a_fully_unreadable_segment_is_damage(sound, tmp_path):
    _, content, _ = sound
    kept, damage, copied = aside(tmp_path, b"?" * 32 + content[32:])
    assert (kept, damage) == ([], [Damage(0, len(content))])
    assert copied
    written(tmp_path, body(7))
    assert found(tmp_path) == [body(7)]


@pytest.mark.parametrize("torn", [30, 1, 100])
def test_a_forged_record_inside_a_torn_body_is_ignored(tmp_path, sound, torn):
    """A client controls the body of its request; it must not be able to forge a record of another."""
    _, content, ends = sound
    forged = content[ends[0] : ends[1]]  # a whole record of another segment
    written(tmp_path, (REQUEST, {"id": "x"}, forged * 5 + bytes(40)))
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-torn])
    assert found(tmp_path) == []


def test_a_forged_record_inside_a_damaged_body_is_ignored(tmp_path, sound):
    _, content, ends = sound
    forged = content[ends[0] : ends[1]]
    written(tmp_path, (REQUEST, {"id": "x"}, forged * 5), body(1))
    [file] = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[PROLOGUE_BYTES + 3] ^= 1  # the start of the record …
    data[data.index(forged)] ^= 1  # … and its body
    kept, [damage], _ = aside(tmp_path, bytes(data))
    assert kept == [body(1)]
    assert damage.record is not None


# -- version 1 -----------------------------------------------------------------------------------------


def version_1(*records: Entry) -> bytes:
    """A segment in the format of earlier releases."""
    content = b"tinkexj1"
    for number, (kind, head, body) in enumerate(records):
        rest = orjson.dumps(head) + body
        header = struct.pack("<BQII", kind, number, len(rest) - len(body), len(body))
        content += zlib.crc32(rest, zlib.crc32(header)).to_bytes(4, "little") + header + rest
    return content


def test_segments_of_version_1_are_read_and_not_written_to(tmp_path):
    old = version_1(*ENTRIES)
    (tmp_path / "000000000000.log").write_bytes(old)
    written(tmp_path, body(7))
    assert (tmp_path / "000000000000.log").read_bytes() == old
    assert found(tmp_path) == [*ENTRIES, body(7)]
    with opened(tmp_path) as (journal, _):
        compact(journal, lambda _: True, lambda _: None)
    [file] = tmp_path.iterdir()
    assert file.read_bytes().startswith(b"tinkexj2")
    assert found(tmp_path) == [*ENTRIES, body(7)]


def test_a_torn_end_of_version_1_is_cut_off(tmp_path):
    for cut in range(1, 200):
        (tmp_path / "000000000000.log").write_bytes(version_1(*ENTRIES)[:-cut])
        with opened(tmp_path) as (journal, records):
            assert (entries(journal, records), journal.damage) == (ENTRIES[:2], [])
        for file in tmp_path.iterdir():
            file.unlink()


def test_damage_of_version_1_is_reported(tmp_path):
    data = bytearray(version_1(*ENTRIES))
    data[60] ^= 1
    kept, [damage], copied = aside(tmp_path, bytes(data))
    assert (kept, damage.kind, len(copied)) == (ENTRIES[1:], None, 1)


# -- segments and compaction -------------------------------------------------------------------------


def test_segments_roll_and_keep_the_order(tmp_path):
    many = [body(number) for number in range(40)]
    written(tmp_path, *many, segment_bytes=560)
    assert len(list(tmp_path.iterdir())) > 5
    assert found(tmp_path, segment_bytes=560) == many


def test_compaction_keeps_needed_records_and_reports_their_new_places(tmp_path):
    with opened(tmp_path, segment_bytes=560) as (journal, _):
        places = {str(number): journal.append(*body(number)) for number in range(12)}
        oldest = min(tmp_path.iterdir())
        in_oldest = {name for name, place in places.items() if place.segment == 0}
        assert len(in_oldest) > 2
        before = journal.size
        asked: list[str] = []
        moved: dict[str, BodyPosition] = {}

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
    # The order is that of the first write: a request is read before its result.
    kept = [body(1), *(body(number) for number in range(12) if str(number) not in in_oldest)]
    assert found(tmp_path, segment_bytes=560) == kept


def test_a_request_moved_after_its_result_is_still_read_first(tmp_path):
    with opened(tmp_path, segment_bytes=180) as (journal, _):
        journal.append(REQUEST, {"id": "a"}, b"." * 200)
        journal.append(RESULT, {"id": "a"}, b"")
        assert not compact(
            journal, lambda _: True, lambda _: None
        )  # all records moved, nothing freed
        journal.append(RESULT, {"id": "b"}, b"")
    with opened(tmp_path) as (journal, records):
        assert [(record.kind, record.head["id"]) for record in records] == [
            (REQUEST, "a"),
            (RESULT, "a"),
            (RESULT, "b"),
        ]
        assert [record.number for record in records] == [0, 1, 2]


def test_the_current_segment_is_never_compacted(tmp_path):
    with opened(tmp_path) as (journal, _):
        journal.append(*ENTRIES[0])
        assert not compact(journal, lambda _: False, lambda _: None)
    assert found(tmp_path) == ENTRIES[:1]


def test_compaction_reports_when_it_frees_nothing(tmp_path):
    with opened(tmp_path, segment_bytes=560) as (journal, _):
        for number in range(20):
            journal.append(*body(number))
        needed = lambda record: record.head["id"] != "9"  # noqa: E731
        gains = [compact(journal, needed, lambda _: None) for _ in range(8)]
    assert gains == [False, False, True, False, False, False, False, False]
    assert found(tmp_path) == [body(number) for number in range(20) if number != 9]


def test_a_crash_during_compaction_leaves_each_record_once(tmp_path):
    with opened(tmp_path, segment_bytes=560) as (journal, _):
        for number in range(8):
            journal.append(*body(number))
        oldest = min(tmp_path.iterdir())
        saved = oldest.read_bytes()
        compact(journal, lambda _: True, lambda _: None)
    oldest.write_bytes(saved)
    with opened(tmp_path, segment_bytes=560) as (journal, records):
        assert entries(journal, records) == [body(number) for number in range(8)]
        compact(journal, lambda _: True, lambda _: None)
    assert found(tmp_path, segment_bytes=560) == [body(number) for number in range(8)]


def test_moved_records_are_flushed_before_the_old_segment_is_deleted(tmp_path):
    synced: set[int] = set()

    def sync(descriptor: int) -> None:
        assert oldest.exists()
        synced.add(os.fstat(descriptor).st_ino)
        os.fsync(descriptor)

    with opened(tmp_path, segment_bytes=560, sync=sync) as (journal, _):
        for number in range(6):
            journal.append(*body(number))
        oldest = min(tmp_path.iterdir())
        asyncio.run(journal.flushed())
        synced.clear()
        places: list[BodyPosition] = []
        compact(journal, lambda _: True, lambda record: places.append(record.place))
        assert len({place.segment for place in places}) == 2  # they did not fit into one segment
        assert {file.stat().st_ino for file in tmp_path.iterdir()} <= synced


# -- a full disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 10, 21, 30, 60, 100])
def test_append_on_a_full_disk_raises_and_writes_nothing(tmp_path, room):
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
def test_a_journal_continues_once_a_full_disk_has_space_for_a_new_segment(tmp_path, room):
    with opened(tmp_path, segment_bytes=40) as (journal, _):
        journal.append(*body(1))
        with full_disk(room):
            for _ in range(3):
                with pytest.raises(OSError, match="too large"):
                    journal.append(*body(2))
        assert len(list(tmp_path.iterdir())) == 1
        journal.append(*body(2))
        journal.append(*body(3))
    assert found(tmp_path) == [body(1), body(2), body(3)]


def test_a_disk_that_fills_up_during_compaction_loses_nothing(tmp_path):
    many = [body(number) for number in range(9)]
    places: dict[str, BodyPosition] = {}
    with opened(tmp_path, segment_bytes=560) as (journal, _):
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
    """Counts real flushes and makes them wait until the test releases them."""

    def __init__(self) -> None:
        self.flushes = 0
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, descriptor: int) -> None:
        self.flushes += 1
        self.begun.release()
        assert self.go.wait(30)
        os.fsync(descriptor)


def test_concurrent_records_share_a_flush(tmp_path):
    disk = SlowDisk()

    async def write(journal: Journal, number: int) -> None:
        journal.append(*body(number))
        await journal.flushed()

    async def write_many(journal: Journal) -> None:
        first = asyncio.create_task(write(journal, 0))
        await asyncio.to_thread(disk.begun.acquire)
        others = [asyncio.create_task(write(journal, number)) for number in range(1, 100)]
        await asyncio.sleep(0)  # all have written and wait for the flush
        assert disk.flushes == 1
        assert not first.done()
        disk.go.set()
        await asyncio.gather(first, *others)

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(write_many(journal))
    assert disk.flushes == 2
    assert found(tmp_path) == [body(number) for number in range(100)]


def test_a_running_flush_does_not_cover_later_records(tmp_path):
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


def test_waiting_for_one_record_takes_one_flush(tmp_path):
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


def test_is_flushed_reports_flushed_records(tmp_path):
    with opened(tmp_path, segment_bytes=40) as (journal, _):
        first, second = (journal.append(REQUEST, {}, b"") for _ in range(2))
        assert not journal.is_flushed(first)
        asyncio.run(journal.flushed())
        assert journal.is_flushed(first)
        assert journal.is_flushed(second)
        assert not journal.is_flushed(journal.append(*body(1)))


def test_open_flushes_existing_segments(tmp_path):
    written(tmp_path, *(body(number) for number in range(6)), segment_bytes=280)
    synced: set[int] = set()
    with opened(tmp_path, sync=lambda each: synced.add(os.fstat(each).st_ino)) as (journal, _):
        asyncio.run(journal.flushed())
    assert synced == {file.stat().st_ino for file in tmp_path.iterdir()}


def test_a_flush_covers_every_written_segment(tmp_path):
    synced: set[int] = set()

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    with opened(tmp_path, segment_bytes=560, sync=sync) as (journal, _):
        for number in range(12):
            journal.append(*body(number))
        asyncio.run(journal.flushed())
    assert synced == {file.stat().st_ino for file in tmp_path.iterdir()}


class FailingDisk:
    """A disk whose next flushes fail. Like a kernel, it drops unflushed data and reports that only once."""

    def __init__(self) -> None:
        self.failures = 0
        self._flushed: dict[int, int] = {}

    def __call__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        begin = min(self._flushed.get(descriptor, 0), size)
        if self.failures:
            self.failures -= 1
            os.pwrite(descriptor, bytes(size - begin), begin)
            raise OSError(5, "the disk is gone")
        self._flushed[descriptor] = size


def test_after_a_failed_flush_unflushed_records_are_rewritten(tmp_path):
    disk = FailingDisk()
    places: dict[str, BodyPosition] = {}

    async def fail(journal: Journal) -> None:
        journal.on_moved = lambda record: places.update({record.head["id"]: record.place})
        for number in range(4):
            places[str(number)] = journal.append(*body(number))
            if number == 1:
                await journal.flushed()
        disk.failures = 1
        await asyncio.gather(*(journal.flushed() for _ in range(3)))
        assert all(map(journal.is_flushed, places.values()))
        for number in range(4):
            assert journal.read(places[str(number)]) == body(number)[2]
        journal.append(*body(4))
        await journal.flushed()

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(fail(journal))
    with opened(tmp_path) as (journal, records):
        assert entries(journal, records) == [body(number) for number in range(5)]
        assert journal.damage == []


def test_a_flush_that_fails_twice_is_reported_and_the_next_one_rewrites_again(tmp_path):
    disk = FailingDisk()

    async def fail(journal: Journal) -> None:
        journal.append(*body(0))
        disk.failures = 2
        told = await asyncio.gather(*(journal.flushed() for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in told] == ["[Errno 5] the disk is gone"] * 3
        place = journal.append(*body(1))
        assert not journal.is_flushed(place)
        await journal.flushed(place)

    with opened(tmp_path, sync=disk) as (journal, _):
        asyncio.run(fail(journal))
    with opened(tmp_path) as (journal, records):
        assert entries(journal, records) == [body(0), body(1)]
        assert journal.damage == []


def test_records_appended_during_a_failing_flush_are_rewritten(tmp_path):
    slow, disk = SlowDisk(), FailingDisk()

    def sync(descriptor: int) -> None:
        slow(descriptor)
        disk(descriptor)

    async def overlap(journal: Journal) -> None:
        journal.append(*body(0))
        disk.failures = 1
        early = asyncio.create_task(journal.flushed())
        await asyncio.to_thread(slow.begun.acquire)
        late = journal.append(*body(1))
        waiting = asyncio.create_task(journal.flushed(late))
        await asyncio.sleep(0)
        slow.go.set()
        await asyncio.gather(early, waiting)

    with opened(tmp_path, sync=sync) as (journal, _):
        asyncio.run(overlap(journal))
    assert found(tmp_path) == [body(0), body(1)]


def test_unflushed_bytes_are_bounded_when_the_disk_never_flushes(tmp_path):
    disk = FailingDisk()

    async def fill(journal: Journal) -> None:
        disk.failures = 1000
        for _ in range(11):
            journal.append(REQUEST, {}, bytes(1000))
            with pytest.raises(OSError, match="the disk is gone"):
                await journal.flushed()
        with pytest.raises(OSError, match="fails to flush"):
            journal.append(REQUEST, {}, bytes(1000))
        disk.failures = 0
        await journal.flushed()
        journal.append(*body(0))

    with opened(tmp_path, sync=disk, unflushed_bytes=10_000) as (journal, _):
        asyncio.run(fill(journal))


def test_many_bytes_without_a_waiter_are_flushed(tmp_path):
    disk = SlowDisk()
    disk.go.set()

    async def fill(journal: Journal) -> None:
        for _ in range(50):
            last = journal.append(RESULT, {}, bytes(1000))
        assert await asyncio.to_thread(disk.begun.acquire, timeout=60), "nothing was flushed"
        async with asyncio.timeout(60):
            while not journal.is_flushed(last):  # noqa: ASYNC110 - nothing else tells it
                await asyncio.sleep(0)

    with opened(tmp_path, sync=disk, unflushed_bytes=100_000) as (journal, _):
        asyncio.run(fill(journal))


def test_a_flush_error_at_open_is_raised(tmp_path):
    written(tmp_path, *ENTRIES)
    disk = FailingDisk()
    disk.failures = 1
    with pytest.raises(OSError, match="the disk is gone"), opened(tmp_path, sync=disk):
        pass


def test_a_cancelled_waiter_does_not_affect_the_others(tmp_path):
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


def test_a_segment_is_not_closed_during_its_flush(tmp_path):
    disk = SlowDisk()

    async def overlap(journal: Journal) -> None:
        for number in range(12):
            journal.append(*body(number))
        flushing = asyncio.create_task(journal.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        compacting = asyncio.create_task(journal.compact(lambda _: False))
        for _ in range(20):
            await asyncio.sleep(0)
        assert oldest.exists()
        disk.go.set()
        await flushing
        assert await compacting
        assert not oldest.exists()

    with opened(tmp_path, segment_bytes=560, sync=disk) as (journal, _):
        oldest = min(tmp_path.iterdir())
        asyncio.run(overlap(journal))


def test_compaction_yields_to_the_event_loop(tmp_path):
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

        journal.on_moved = lambda record: places.update({record.head["id"]: record.place})
        compacting = asyncio.create_task(
            journal.compact(lambda record: bool(record.head["id"] != "3"))
        )
        del places["3"]
        await asyncio.gather(others(), compacting)

    with opened(tmp_path, segment_bytes=large * 8) as (journal, _):
        asyncio.run(overlap(journal))
    assert turns > 5
    kept = {entry[1]["id"] for entry in found(tmp_path)}
    assert kept == {*map(str, range(9)), *(f"meanwhile {n + 1}" for n in range(turns))} - {"3"}


def test_waiting_on_a_closed_journal_raises(tmp_path):
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
