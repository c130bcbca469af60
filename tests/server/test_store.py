"""The same contract on SQLite, and on PostgreSQL where its programs are installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinkex.server.store import CheckpointRow, RunRow, SamplerRow, SessionRow, Store

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def postgres_programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory):
    """A PostgreSQL of our own on loopback, gone with the tests."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL was not tried: its server programs are not installed")
    data = tmp_path_factory.mktemp("postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    user = (
        ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
    )  # PostgreSQL refuses to be root
    if user:
        shutil.chown(data, "nobody")
        for parent in data.parents[:3]:
            parent.chmod(0o755)
    subprocess.run(
        [*user, programs / "initdb", "-D", data / "d", "-U", "t", "-A", "trust"], check=True
    )
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
    control = [*user, programs / "pg_ctl", "-D", data / "d", "-w"]
    subprocess.run([*control, "-o", options, "-l", data / "log", "start"], check=True)
    yield f"postgresql+psycopg://t@127.0.0.1:{port}/postgres"
    subprocess.run([*control, "-m", "immediate", "stop"], check=True)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        empty(url)
    else:
        url = f"sqlite:///{tmp_path}/tinkex.db"
    opened = Store(url)
    opened.open()
    yield opened
    opened.close()


def empty(url):
    """A PostgreSQL outlives a test; its tables do not."""
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


def test_what_is_kept_comes_back_equal(store):
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


def test_a_repeated_creation_finds_the_first(store):
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


def test_facts_survive_a_restart_and_a_newer_database_is_left_alone(tmp_path):
    url = f"sqlite:///{tmp_path}/tinkex.db"
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
    with pytest.raises(RuntimeError, match="newer release"):
        Store(url).open()
