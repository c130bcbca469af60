"""Checkpoints and their expiry, with a fake clock."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest

from tinkex.engine import directories
from tinkex.errors import InvalidInputError, InvalidPathError, NotFoundError
from tinkex.server.checkpoints import Checkpoints, checkpoint_of, tinker_path
from tinkex.server.database import Database
from tinkex.server.file_threads import FileThreads
from tinkex.server.quotas import KeyLimits, Quota, Quotas
from tinkex.server.service import Service, Settings
from tinkex.server.store import Store
from tinkex.server.tables import RunRow, SessionRow

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = "s:train:0"


class FakeClock:
    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def database(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/tinkex.db")
    store.open()
    store.add_session(
        SessionRow("s", "me", START, START, [], None, "0", "p", None, {"type": "active"})
    )
    store.add_run(RunRow(RUN, "s", "me", "tinkex/tiny", {"rank": 8}, None, START, START))
    database = Database(store)
    yield database
    database.close()


def quota() -> Quota:
    return Quotas.of(KeyLimits()).checkpoint_bytes


@pytest.fixture
def files():
    files = FileThreads()
    yield files
    files.close()


@pytest.fixture
def checkpoints(tmp_path, database, files, clock):
    return Checkpoints(tmp_path / "checkpoints", database, files, quota(), now=clock)


async def save(checkpoints, name="a", kind="training", ttl_seconds=None):
    place = await checkpoints.check_free("me", RUN, kind, name)
    place.mkdir(parents=True)
    (place / "file").write_text(name)
    return await checkpoints.add(RUN, kind, name, "me", 1, ttl_seconds=ttl_seconds)


def events(database):
    day = {"start": START - timedelta(days=1), "end": START + timedelta(days=9000)}
    return [row.event for row in database.store.audit("me", topic="checkpoints", **day)]


def test_only_expired_checkpoints_are_deleted(checkpoints, database, clock):
    async def scenario():
        short = await save(checkpoints, "short", ttl_seconds=3600)
        long = await save(checkpoints, "long", ttl_seconds=7200)
        kept = await save(checkpoints, "kept")
        assert await checkpoints.delete_expired() == 0
        clock.now += timedelta(seconds=3599)
        _, place = await checkpoints.readable("me", tinker_path(short))
        assert place.is_dir()
        clock.now += timedelta(seconds=1)
        # It cannot be read from that time on, even before the cleanup.
        with pytest.raises(NotFoundError, match="expired"):
            await checkpoints.readable("me", tinker_path(short))
        assert await checkpoints.delete_expired() == 1
        assert not place.exists()
        assert list(place.parent.glob(".*")) == []
        with pytest.raises(NotFoundError):
            await checkpoints.owned("me", RUN, "weights/short")
        for row in (long, kept):
            assert (await checkpoints.readable("me", tinker_path(row)))[1].is_dir()
        clock.now += timedelta(days=4000)
        assert await checkpoints.delete_expired() == 1
        assert (await checkpoints.readable("me", tinker_path(kept)))[1].is_dir()

    asyncio.run(scenario())
    assert events(database) == ["checkpoint_created"] * 3 + ["checkpoint_expired"] * 2


def test_a_checkpoint_that_replaced_an_expired_one_stays(checkpoints, clock):
    async def scenario():
        old = await save(checkpoints, "a", ttl_seconds=3600)
        extended = await save(checkpoints, "b", ttl_seconds=3600)
        clock.now += timedelta(hours=1)
        # The cleanup is about to delete both when their owner saves again.
        new = await checkpoints.add(RUN, "training", "a", "me", 1, ttl_seconds=None)
        await checkpoints.set_ttl(extended, None)
        for row in (old, extended):
            await checkpoints.delete(row, expired=True)
        for row in (new, extended):
            assert (await checkpoints.readable("me", tinker_path(row)))[1].is_dir()

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["it is written", "it is listed"])
def test_a_checkpoint_may_expire_or_be_deleted_while_it_is_overwritten(checkpoints, clock, when):
    async def scenario():
        old = await save(checkpoints, ttl_seconds=3600)
        place = await checkpoints.check_free("me", RUN, "training", "a", overwrite=True)
        written = place.with_name(".new")
        written.mkdir()
        (written / "file").write_text("new")
        clock.now += timedelta(hours=1)
        if when == "it is written":
            assert await checkpoints.delete_expired() == 1
        options = {"ttl_seconds": None, "written": written}
        new = await checkpoints.add(RUN, "training", "a", "me", 1, **options)
        await checkpoints.delete(old, expired=True)
        _, directory = await checkpoints.readable("me", tinker_path(new))
        assert (directory / "file").read_text() == "new"
        assert [each.name for each in directory.parent.iterdir()] == ["a"]

    asyncio.run(scenario())


def test_a_name_is_free_once_its_checkpoint_has_expired(checkpoints, database, clock):
    async def scenario():
        await save(checkpoints, ttl_seconds=3600)
        clock.now += timedelta(hours=1)
        new = await save(checkpoints)
        assert await checkpoints.delete_expired() == 0
        assert (await checkpoints.readable("me", tinker_path(new)))[1].is_dir()

    asyncio.run(scenario())
    created = "checkpoint_created"
    assert events(database) == [created, "checkpoint_expired", created]


def test_a_copy_in_progress_blocks_no_other_call(checkpoints, database, monkeypatch):
    begun, go, copy = threading.Event(), threading.Event(), directories.copy

    def slow(source, target):
        begun.set()
        assert go.wait(30)
        copy(source, target)

    monkeypatch.setattr(directories, "copy", slow)
    database.store.add_run(RunRow("t", "s", "me", "tinkex/tiny", {"rank": 8}, None, START, START))

    async def scenario():
        row = await save(checkpoints)
        copying = asyncio.create_task(checkpoints.copy(row, "t", "me", None))
        await asyncio.to_thread(begun.wait, 30)
        assert await asyncio.wait_for(checkpoints.owned("me", RUN, "weights/a"), 30) == row
        go.set()
        copied = await copying
        assert (await checkpoints.readable("me", tinker_path(copied)))[1].is_dir()

    asyncio.run(scenario())


def test_a_ttl_counts_from_when_it_is_set(checkpoints, clock):
    async def scenario():
        row = await save(checkpoints)
        clock.now += timedelta(days=100)
        await checkpoints.set_ttl(row, 3600)
        limited = await checkpoints.owned("me", RUN, "weights/a")
        assert limited.expires_at == clock.now + timedelta(hours=1)
        clock.now += timedelta(minutes=59)
        assert await checkpoints.delete_expired() == 0
        await checkpoints.set_ttl(row, None)
        clock.now += timedelta(days=100)
        assert await checkpoints.delete_expired() == 0
        await checkpoints.set_ttl(row, 3600)
        clock.now += timedelta(hours=1)
        assert await checkpoints.delete_expired() == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [0, -1, 60, 3599, 10 * 365 * 86_400 + 1])
def test_ttl_bounds_are_enforced(checkpoints, seconds):
    async def scenario():
        row = await save(checkpoints)
        with pytest.raises(InvalidInputError, match="ttl_seconds"):
            await checkpoints.set_ttl(row, seconds)
        assert (await checkpoints.owned("me", RUN, "weights/a")).expires_at is None

    asyncio.run(scenario())


def test_a_public_checkpoint_is_readable_but_not_owned(checkpoints):
    async def scenario():
        row = await save(checkpoints)
        with pytest.raises(NotFoundError):
            await checkpoints.readable("you", tinker_path(row))
        await checkpoints.publish(row, public=True)
        read, place = await checkpoints.readable("you", tinker_path(row))
        assert (read.owner, place.is_dir()) == ("me", True)
        with pytest.raises(NotFoundError):
            await checkpoints.owned("you", RUN, "weights/a")
        await checkpoints.publish(row, public=False)
        with pytest.raises(NotFoundError):
            await checkpoints.readable("you", tinker_path(row))

    asyncio.run(scenario())


def test_a_copy_is_complete_and_independent(checkpoints, database):
    database.store.add_run(
        RunRow("s:train:1", "s", "me", "tinkex/tiny", {"rank": 8}, None, START, START)
    )

    async def scenario():
        row = await save(checkpoints, ttl_seconds=3600)
        copied = await checkpoints.copy(row, "s:train:1", "me", None)
        assert copied.expires_at is None
        await checkpoints.delete(row)
        _, place = await checkpoints.readable("me", tinker_path(copied))
        assert (place / "file").read_text() == "a"
        with pytest.raises(InvalidInputError, match="path"):
            await checkpoints.copy(copied, "s:train:1", "me", None)  # the name is in use
        with pytest.raises(InvalidInputError, match="ttl_seconds"):
            await checkpoints.copy(copied, "s:train:1", "me", 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 256, "", ".", "a b", "a\0"])
def test_invalid_names_are_refused(checkpoints, name):
    with pytest.raises(InvalidInputError, match="path"):
        asyncio.run(checkpoints.check_free("me", RUN, "training", name))


@pytest.mark.parametrize(
    "path", ["", "tinker://", f"tinker://{RUN}/weights/..", f"tinker://{RUN}/nonsense/a"]
)
def test_invalid_paths_are_refused(checkpoints, path):
    with pytest.raises(InvalidPathError):
        asyncio.run(checkpoints.readable("me", path))


@pytest.mark.parametrize("checkpoint_id", ["a", "weights/", "nonsense/a", "/a", ""])
def test_invalid_checkpoint_ids_are_refused(checkpoints, checkpoint_id):
    with pytest.raises(InvalidInputError, match="checkpoint_id"):
        asyncio.run(checkpoints.owned("me", RUN, checkpoint_id))


def test_incomplete_directories_are_removed_at_startup(checkpoints, tmp_path):
    async def scenario():
        await save(checkpoints)

    asyncio.run(scenario())
    leftover = tmp_path / "checkpoints" / RUN / "training" / ".scratch"
    leftover.mkdir()
    checkpoints.clear_scratch()
    assert not leftover.exists()
    assert (leftover.parent / "a" / "file").exists()


def test_a_row_is_converted_to_the_clients_format(checkpoints):
    row = asyncio.run(save(checkpoints, "x", "external", ttl_seconds=3600))
    shown = checkpoint_of(row)
    assert shown.checkpoint_id == "external_weights/x"
    assert shown.tinker_path == f"tinker://{RUN}/external_weights/x"
    assert shown.training_run_id == RUN
    assert shown.expires_at == START + timedelta(hours=1)


def test_housekeeping_deletes_expired_checkpoints(tmp_path):
    """Runs the real housekeeping with a checkpoint that has expired before it starts."""

    async def scenario():
        settings = Settings(
            data_dir=tmp_path, base_models=("tinkex/tiny",), engine="fake", engine_in_process=True
        )
        service = Service(settings)
        await service.start()
        try:
            store = service.database.store
            await service.database(
                store.add_session,
                SessionRow("s", "me", START, START, [], None, "0", "p", None, {"type": "active"}),
            )
            run = RunRow(RUN, "s", "me", "tinkex/tiny", {"rank": 8}, None, START, START)
            await service.database(store.add_run, run)
            past = Checkpoints(
                tmp_path / "checkpoints",
                service.database,
                service.files,
                quota(),
                now=lambda: START,
            )
            await save(past, "old", ttl_seconds=3600)
            await save(past, "kept")
            await service.keep_house()
            names = [row.name for row in store.checkpoints_of_run(RUN)]
            assert names == ["kept"]
            assert not past.place(RUN, "training", "old").exists()
            assert past.place(RUN, "training", "kept").exists()
        finally:
            await service.stop()

    asyncio.run(scenario())


def test_checkpoint_whose_ttl_changes_meanwhile_is_deleted(checkpoints):
    async def scenario():
        listed = await save(checkpoints)
        await checkpoints.set_ttl(listed, 3600)
        await checkpoints.delete(listed)
        with pytest.raises(NotFoundError):
            await checkpoints.owned("me", RUN, "weights/a")
        assert not checkpoints.place(RUN, "training", "a").exists()

    asyncio.run(scenario())
