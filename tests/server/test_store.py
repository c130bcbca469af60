"""The same tests on SQLite and, if its programs are installed, on PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tinkex.errors import ConfigError, InvalidInputError
from tinkex.server.database import Database
from tinkex.server.service import Service, Settings
from tinkex.server.store import Store
from tinkex.server.tables import (
    CheckpointRow,
    RunRow,
    SamplerRow,
    SessionRow,
    TelemetryRow,
    UsageRow,
)
from tinkex.types import CreateSessionRequest

from ..ports import reserved

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def postgres_programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


@pytest.fixture(scope="session")
def postgres_url():
    """A temporary PostgreSQL server on loopback."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL was not tried: its server programs are not installed")
    data = Path(tempfile.mkdtemp(prefix="tinkex-postgres-"))  # pytest's own directories are private
    kept, port = reserved()
    user = (
        ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
    )  # PostgreSQL refuses to run as root
    if user:
        shutil.chown(data, "nobody")
    subprocess.run(
        [*user, programs / "initdb", "-D", data / "d", "-U", "t", "-A", "trust"], check=True
    )
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
    control: list[str | Path] = [*user, programs / "pg_ctl", "-D", data / "d", "-w"]
    subprocess.run([*control, "-o", options, "-l", data / "log", "start"], check=True)
    kept.close()
    yield f"postgresql+psycopg://t@127.0.0.1:{port}/postgres"
    subprocess.run([*control, "-m", "immediate", "stop"], check=True)
    shutil.rmtree(data)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tinkex.db"
    url = request.getfixturevalue("postgres_url")
    empty(url)
    return url


@pytest.fixture
def store(url):
    opened = Store(url)
    opened.open()
    yield opened
    opened.close()


def empty(url):
    """Drop the tables: the PostgreSQL server is shared by all tests."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


def session(name="s", owner="me", **changes):
    return SessionRow(
        **{
            "session_id": name,
            "owner": owner,
            "created_at": NOW,
            "last_heartbeat": NOW,
            "tags": ["a"],
            "user_metadata": {"k": [1, None]},
            "sdk_version": "0.36.0",
            "project_id": None,
            "display_name": "näme",
            "status": {"type": "active"},
            **changes,
        }
    )


def run(name="s:train:0", **changes):
    return RunRow(
        **{
            "run_id": name,
            "session_id": "s",
            "owner": "me",
            "base_model": "tinkex/tiny",
            "lora": {"rank": 8},
            "user_metadata": None,
            "created_at": NOW,
            "last_request_at": NOW,
            **changes,
        }
    )


def checkpoint(name="a", kind="training", **changes):
    return CheckpointRow(
        **{
            "run_id": "s:train:0",
            "kind": kind,
            "name": name,
            "owner": "me",
            "created_at": NOW,
            "size_bytes": 2**40,
            **changes,
        }
    )


def test_stored_rows_are_read_back_equal(store):
    store.add_session(session())
    store.add_run(run())
    store.put_checkpoint(checkpoint(expires_at=NOW + timedelta(days=1), user_metadata={"x": "y"}))
    sampler = SamplerRow("s:sample:0", "s", "me", "tinkex/tiny", None, NOW)
    store.add_sampler(sampler)
    assert store.session("s") == session()
    assert store.run("s:train:0") == run()
    assert store.checkpoint("s:train:0", "training", "a") == checkpoint(
        expires_at=NOW + timedelta(days=1), user_metadata={"x": "y"}
    )
    assert store.sampler("s:sample:0") == sampler
    assert (store.session("?"), store.run("?"), store.sampler("?")) == (None, None, None)


def test_a_repeated_insert_returns_the_first_row(store):
    first = store.add_session(session("one", idempotency_key="k"))
    assert store.add_session(session("two", idempotency_key="k")) == first
    assert store.session("two") is None
    store.add_sampler(SamplerRow("x", "one", "me", "m", None, NOW))
    assert store.add_sampler(SamplerRow("x", "one", "me", "other", None, NOW)).base_model == "m"


def test_pages_are_newest_first_and_do_not_overlap(store):
    store.add_session(session())
    for index in range(7):
        store.add_run(run(f"r{index}", last_request_at=NOW + timedelta(seconds=index // 2)))
    store.add_session(session("other", owner="you"))
    seen, total = [], 0
    for offset in range(0, 9, 3):
        page, total = store.runs("me", limit=3, offset=offset)
        seen += [row.run_id for row in page]
    assert total == 7
    assert len(set(seen)) == 7
    assert seen[0] == "r6"
    assert store.runs("you", limit=9, offset=0) == ([], 0)
    assert [row.session_id for row in store.sessions(None, limit=9, offset=0)] == ["s", "other"]


def test_checkpoints_are_replaced_changed_expired_and_deleted(store):
    store.add_session(session())
    store.add_run(run())
    store.put_checkpoint(checkpoint(size_bytes=1))
    store.put_checkpoint(checkpoint(size_bytes=2, expires_at=NOW))
    store.put_checkpoint(checkpoint("b", "sampler"))
    assert [row.size_bytes for row in store.checkpoints_of_run("s:train:0") if row.name == "a"] == [
        2
    ]
    assert [row.name for row in store.expired_checkpoints(NOW)] == ["a"]
    assert store.expired_checkpoints(NOW - timedelta(seconds=1)) == []
    assert store.update_checkpoint("s:train:0", "training", "a", expires_at=None, public=True)
    assert store.checkpoint("s:train:0", "training", "a").public
    assert store.expired_checkpoints(NOW) == []
    assert store.delete_checkpoint("s:train:0", "training", "a")
    assert not store.delete_checkpoint("s:train:0", "training", "a")
    assert store.checkpoints("me", limit=10, offset=0)[1] == 1


def test_the_newest_checkpoints_of_several_runs_are_read_together(store):
    store.add_session(session())
    for name in ("r0", "r1", "r2"):
        store.add_run(run(name))
        for second, public in ((1, True), (3, False), (2, False)):
            at = NOW + timedelta(seconds=second)
            store.put_checkpoint(checkpoint(str(second), run_id=name, created_at=at, public=public))
        store.put_checkpoint(checkpoint("s", "sampler", run_id=name))
    mine = store.newest_checkpoints(["r0", "r2"], "me")
    assert {key: row.name for key, row in mine.items()} == {
        ("r0", "training"): "3",
        ("r0", "sampler"): "s",
        ("r2", "training"): "3",
        ("r2", "sampler"): "s",
    }
    theirs = store.newest_checkpoints(["r0"], "you")
    assert {key: row.name for key, row in theirs.items()} == {("r0", "training"): "1"}
    assert store.newest_checkpoints([], "me") == {}


def test_many_runs_are_touched_in_one_call(store):
    store.add_session(session())
    for name in ("r0", "r1"):
        store.add_run(run(name))
    later = NOW + timedelta(minutes=1)
    store.touch_runs({"r1": later})
    store.touch_runs({})
    assert [store.run(name).last_request_at for name in ("r0", "r1")] == [NOW, later]


def test_pages_are_filled_without_external_checkpoints(store):
    store.add_session(session())
    store.add_run(run())
    for index, kind in enumerate(("training", "external", "sampler", "external", "training")):
        at = NOW + timedelta(seconds=index)
        store.put_checkpoint(checkpoint(str(index), kind, created_at=at))
    page, total = store.checkpoints("me", limit=2, offset=0, external=False)
    assert ([row.name for row in page], total) == (["4", "2"], 3)
    page, total = store.checkpoints("me", limit=2, offset=2, external=False)
    assert ([row.name for row in page], total) == (["0"], 3)
    assert store.checkpoints("me", limit=9, offset=0)[1] == 5


def test_active_sessions_of_all_owners_are_listed(store):
    store.add_session(session("a"))
    store.add_session(session("b", "you"))
    store.add_session(session("c", status={"type": "cancelled", "detail": "active"}))
    assert {row.session_id for row in store.active_sessions()} == {"a", "b"}


def test_copies_of_a_sampler_never_share_a_number(store):
    store.add_session(session())
    store.add_sampler(SamplerRow("x", "s", "me", "m", None, NOW))
    numbers: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: numbers.append(store.next_clone("x"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(filter(None, numbers)) == list(range(1, 9))
    assert store.next_clone("nobody") is None


def test_samplers_expire_and_can_be_deleted(store):
    store.add_session(session())
    for number in (1, 2):
        expires_at = NOW + timedelta(hours=number)
        store.add_sampler(SamplerRow(f"{number}", "s", "me", "m", None, NOW, expires_at=expires_at))
    store.add_sampler(SamplerRow("x", "s", "me", "m", None, NOW))
    assert store.expired_samplers(NOW) == []
    (expired,) = store.expired_samplers(NOW + timedelta(hours=1))
    store.delete_sampler(expired.sampler_id)
    left = {row.sampler_id for row in store.samplers_of_session("s")}
    assert (expired.sampler_id, left) == ("1", {"2", "x"})


def test_rows_survive_reopening_and_a_newer_database_is_refused(url):
    first = Store(url)
    first.open()
    first.add_session(session())
    first.close()
    second = Store(url)
    second.open()
    assert second.session("s") == session()
    with second._transaction() as connection:
        connection.exec_driver_sql("UPDATE schema_version SET version = 999")
    second.close()
    refused = Store(url)
    with pytest.raises(RuntimeError, match="newer release"):
        refused.open()
    assert not refused.is_open


def event(event_id: str | None, **changes: Any) -> TelemetryRow:
    facts = {"owner": "me", "session_id": "s", "event": {"event": "SESSION_START"}} | changes
    return TelemetryRow(received_at=NOW, event_id=event_id, **facts)


def test_an_event_is_kept_once_per_owner_and_session(store):
    store.add_telemetry([event("a"), event("b"), event("a")])
    store.add_telemetry([event("b"), event("c"), event("b", session_id="t")])
    store.add_telemetry([event("a", owner="you")])
    page, total = store.telemetry("me", "s", limit=2, offset=1)
    assert ([row.event_id for row in page], total) == (["b", "c"], 3)
    assert store.telemetry("me", None, limit=9, offset=0)[1] == 4
    assert store.telemetry("you", None, limit=9, offset=0)[1] == 1


def test_bytes_are_summed_by_owner_and_the_oldest_events_are_trimmed(store):
    store.add_session(session("s"))
    store.add_run(run())
    for name, owner in (("a", "me"), ("b", "me"), ("c", "you")):
        store.put_checkpoint(checkpoint(name, owner=owner))
    assert store.checkpoint_bytes() == {"me": 2 << 40, "you": 1 << 40}
    for owner in ("ann", "bob"):
        rows = [TelemetryRow(NOW, owner, "s", {"text": "é" * 100}, str(n)) for n in range(10)]
        store.add_telemetry(rows)
    size = len(json.dumps({"text": "é" * 100}))
    assert store.telemetry_bytes() == {"ann": 10 * size, "bob": 10 * size}
    store.trim_telemetry("ann", 3 * size - 1)
    assert store.telemetry_bytes("ann") == {"ann": 7 * size}
    kept, _ = store.telemetry("ann", None, limit=99, offset=0)
    assert [row.event_id for row in kept] == [str(n) for n in range(3, 10)]
    store.trim_telemetry("ann", 99 * size)
    assert store.telemetry_bytes() == {"bob": 10 * size}


def test_samplers_count_while_their_session_is_active(store):
    for name in ("live", "over"):
        store.add_session(session(name))
        store.add_sampler(SamplerRow(f"{name}:sample:0", name, "ann", "m", None, NOW))
    store.update_session("over", status={"type": "cancelled"})
    assert store.active_samplers() == [("live", "ann")]


def make_first_release(url):
    """A database of version 1: telemetry without event ids, samplers that never expire."""
    old = Store(url)
    old.open()
    old.add_session(session())
    old.add_sampler(SamplerRow("x", "s", "me", "m", None, NOW))
    with old._transaction() as connection:
        connection.exec_driver_sql("DROP TABLE identity")
        connection.exec_driver_sql("DROP INDEX ix_samplers_expires_at")
        for column in ("unnamed", "expires_at"):
            connection.exec_driver_sql(f"ALTER TABLE samplers DROP COLUMN {column}")
        connection.exec_driver_sql("DROP INDEX telemetry_once")
        connection.exec_driver_sql("ALTER TABLE telemetry DROP COLUMN event_id")
        connection.exec_driver_sql("UPDATE schema_version SET version = 1")
        connection.exec_driver_sql(
            "INSERT INTO telemetry (received_at, owner, session_id, event) "
            "VALUES ('2026-01-02 03:04:05.000000', 'me', 's', '{}')"
        )
    old.close()


def check_is_up_to_date(url):
    """A migrated database of the first release works like a new one and has kept its rows."""
    new = Store(url)
    new.open()
    new.add_telemetry([event("a"), event("a")])
    found, total = new.telemetry("me", "s", limit=9, offset=0)
    assert ([row.event_id for row in found], total) == ([None, "a"], 2)
    made = SamplerRow("y", "s", "me", "m", None, NOW, unnamed=True, expires_at=NOW)
    new.add_sampler(made)
    assert new.sampler("x") == SamplerRow("x", "s", "me", "m", None, NOW)
    assert new.expired_samplers(NOW) == [made]
    assert new.identity() is None
    new.close()


def test_a_database_of_the_first_release_is_migrated(url):
    make_first_release(url)
    check_is_up_to_date(url)


def open_and_die(url: str, statement: int) -> bool:
    """Open a store in a process that is killed before its n-th statement; return whether it was killed."""
    child = os.fork()
    if child == 0:
        left = [statement]

        @sa.event.listens_for(sa.Engine, "before_cursor_execute")
        def die(*_: object) -> None:
            left[0] -= 1
            if not left[0]:
                os._exit(9)

        try:
            Store(url).open()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(make_first_release, id="old"),
        pytest.param(lambda _: None, id="new", marks=pytest.mark.heavy),
    ],
)
def test_a_kill_at_any_statement_of_a_migration_is_recoverable(url, prepare):
    statement = 0
    killed = True
    while killed:
        statement += 1
        if url.startswith("sqlite"):
            for file in Path(url.removeprefix("sqlite:///")).parent.iterdir():
                file.unlink()
        else:
            empty(url)
        prepare(url)
        killed = open_and_die(url, statement)
        if prepare is make_first_release:
            check_is_up_to_date(url)
        else:
            made = Store(url)
            made.open()
            made.add_session(session())
            made.close()
    assert statement > 5


def test_only_counters_may_be_lost_in_a_power_cut(tmp_path):
    """SQLite waits for the disk at each commit that is acknowledged, but not for counters."""
    store = Store(f"sqlite:///{tmp_path}/tinkex.db")
    store.open()
    modes: list[str] = []

    @sa.event.listens_for(store._engine, "begin")
    def note(connection: sa.Connection) -> None:
        [mode] = connection.exec_driver_sql("PRAGMA synchronous").one()
        modes.append({1: "NORMAL", 2: "FULL"}[mode])

    writes = {
        "add_session": lambda: store.add_session(session()),
        "add_run": lambda: store.add_run(run()),
        "put_checkpoint": lambda: store.put_checkpoint(checkpoint()),
        "add_sampler": lambda: store.add_sampler(SamplerRow("x", "s", "me", "m", None, NOW)),
        "update_session": lambda: store.update_session("s", status={"type": "x"}),
        "touch_runs": lambda: store.touch_runs({"s:train:0": NOW}),
        "add_telemetry": lambda: store.add_telemetry([event("a")]),
        "add_usage": lambda: store.add_usage([UsageRow(NOW, "me", "s", "m", "training", 1)]),
    }
    for write in writes.values():
        write()
    store.close()
    counted = {"touch_runs", "add_telemetry", "add_usage"}
    assert modes == ["NORMAL" if name in counted else "FULL" for name in writes]


# -- from inside the event loop ----------------------------------------------------------------------


def count_commits(store: Store) -> list[None]:
    commits: list[None] = []
    sa.event.listen(store._engine, "commit", lambda _: commits.append(None))
    return commits


async def occupied(database: Database) -> tuple[asyncio.Future[None], threading.Event]:
    """Have the thread of a database work on a call until the event is set; the next calls wait."""
    begun, held = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        held.wait()

    working = asyncio.ensure_future(database(wait))
    await asyncio.to_thread(begun.wait)
    return working, held


def test_waiting_calls_are_committed_together(store):
    async def many() -> list[Any]:
        database = Database(store)
        first, held = await occupied(database)
        calls = [
            asyncio.ensure_future(database(store.add_session, session(str(n)))) for n in range(20)
        ]
        await asyncio.sleep(0)
        held.set()
        await first
        return await asyncio.gather(*calls)

    commits = count_commits(store)
    made = asyncio.run(many())
    assert [row.session_id for row in made] == [str(n) for n in range(20)]
    assert len(commits) == 1
    assert len(store.sessions(None, limit=50, offset=0)) == 20


def test_a_call_that_fails_fails_alone(store):
    async def many() -> list[Any]:
        database = Database(store)
        first, held = await occupied(database)
        names = ["a", "b", "a", "c"]
        calls = [
            asyncio.ensure_future(database(store.add_session, session(name))) for name in names
        ]
        reading = asyncio.ensure_future(database(store.session, "b"))
        await asyncio.sleep(0)
        calls[1].cancel()
        for _ in range(3):  # the thread receives it a moment later
            await asyncio.sleep(0)
        held.set()
        await first
        return await asyncio.gather(*calls, reading, return_exceptions=True)

    made = asyncio.run(many())
    kinds = [type(each) for each in made]
    assert kinds == [
        SessionRow,
        asyncio.CancelledError,
        sa.exc.IntegrityError,
        SessionRow,
        type(None),
    ]
    assert {row.session_id for row in store.sessions(None, limit=50, offset=0)} == {"a", "c"}


# -- the write-ahead log of SQLite -------------------------------------------------------------------


def test_commits_do_not_make_the_log_longer(tmp_path):
    """A commit that makes the file longer waits for the disk twice as long."""
    store, log = Store(f"sqlite:///{tmp_path / 'facts.db'}"), tmp_path / "facts.db-wal"
    store.open()
    try:
        size = log.stat().st_size
        for number in range(300):
            store.add_session(session(str(number)))
            assert log.stat().st_size == size
        # The copy is what a power cut leaves: the log has frames, then zeros.
        for suffix in ("", "-wal"):
            shutil.copy(tmp_path / f"facts.db{suffix}", tmp_path / f"copy.db{suffix}")
    finally:
        store.close()
    copy = Store(f"sqlite:///{tmp_path / 'copy.db'}")
    copy.open()
    try:
        assert len(copy.sessions(None, limit=500, offset=0)) == 300
    finally:
        copy.close()


# -- one service at a time ---------------------------------------------------------------------------


def test_database_has_one_service_at_a_time(postgres_url):
    empty(postgres_url)
    first, second = Store(postgres_url), Store(postgres_url)
    try:
        for each in (first, second):
            each.open()
        assert first.take_lease()
        assert first.take_lease()  # still held
        assert not second.take_lease()
        first.close()
        assert second.take_lease()
    finally:
        first.close()
        second.close()


def test_a_lost_lease_is_taken_again_unless_another_store_has_it(postgres_url):
    empty(postgres_url)
    first, second = Store(postgres_url), Store(postgres_url)
    administrator = sa.create_engine(postgres_url)

    def cut() -> None:
        with administrator.begin() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'"
            )

    try:
        for each in (first, second):
            each.open()
        assert first.take_lease()
        cut()
        assert first.take_lease()
        cut()
        assert second.take_lease()
        assert not first.take_lease()
    finally:
        first.close()
        second.close()
        administrator.dispose()


def test_second_service_on_a_database_does_not_start_and_ends_no_session_of_the_first(
    postgres_url, tmp_path
):
    """The data directories and the database are empty, so only the lease can prevent the start."""
    empty(postgres_url)

    def made(name: str) -> Service:
        settings = Settings(
            tmp_path / name,
            ("tinkex/tiny",),
            engine="fake",
            engine_in_process=True,
            database_url=postgres_url,
            session_expiry=0.0,
        )
        return Service(settings)

    async def scenario() -> None:
        first = made("first")
        await first.start()
        second = made("second")
        with pytest.raises(ConfigError, match=r"database_url: .*another service"):
            await second.start()
        assert not (tmp_path / "second" / "identity").exists()
        begin = CreateSessionRequest(tags=[], sdk_version="0")
        session_id = await first.sessions.create("me", begin, None)
        # A service that has lost the lease to another one changes nothing.
        taken = Store(postgres_url)
        taken.open()
        engine = sa.create_engine(postgres_url)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'"
            )
        engine.dispose()
        assert taken.take_lease()
        await first.keep_house()
        await first.sessions.check_active(session_id, "me")
        taken.close()
        await first.stop()
        third = made("first")
        await third.start()
        await third.keep_house()
        with pytest.raises(InvalidInputError, match="has ended"):
            await third.sessions.check_active(session_id, "me")
        await third.stop()

    asyncio.run(scenario())
