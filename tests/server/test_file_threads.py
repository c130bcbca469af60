"""Work on files runs in threads of its own."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import tinkex.engine.files
from tinkex.server.database import Database
from tinkex.server.file_threads import FileThreads
from tinkex.server.store import Store

from .test_storage import housed, new_model, told


@pytest.fixture
def files():
    files = FileThreads()
    yield files
    files.close()


def test_a_database_call_does_not_wait_for_file_work(files, tmp_path):
    database = Database(Store(f"sqlite:///{tmp_path}/tinkex.db"))
    go = threading.Event()

    async def scenario() -> None:
        await database(database.store.open)
        copying = asyncio.ensure_future(files(go.wait, 30))
        assert await database(database.store.counts) == (0, 0, 0)
        assert not copying.done()
        go.set()
        assert await copying

    asyncio.run(scenario())
    database.close()


def test_removing_a_missing_directory_is_no_error(files, tmp_path):
    (tmp_path / "there").mkdir()
    asyncio.run(files.remove(tmp_path / "there"))
    asyncio.run(files.remove(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_a_context_manager_is_entered_and_left_in_these_threads(files):
    seen: list[str] = []

    @contextmanager
    def noted() -> Iterator[str]:
        seen.append(threading.current_thread().name)
        try:
            yield "value"
        except ValueError:
            seen.append("undone")
            raise
        finally:
            seen.append(threading.current_thread().name)

    async def scenario(*, fails: bool) -> None:
        async with files.within(noted()) as value:
            assert value == "value"
            if fails:
                raise ValueError

    asyncio.run(scenario(fails=False))
    with pytest.raises(ValueError, match=r"^$"):
        asyncio.run(scenario(fails=True))
    assert seen.pop(3) == "undone"
    assert len(seen) == 4
    assert all(name.startswith("tinkex-files") for name in seen)


def test_the_database_thread_neither_syncs_nor_removes_nor_copies_files(tmp_path, monkeypatch):
    threads: dict[str, set[str]] = {"sync": set(), "rmtree": set(), "copyfile": set()}

    def spied(where: object, name: str) -> None:
        real = getattr(where, name)

        def call(*args: object, **options: object) -> object:
            threads[name].add(threading.current_thread().name.rpartition("_")[0])
            return real(*args, **options)

        monkeypatch.setattr(where, name, call)

    spied(tinkex.engine.files, "sync")
    spied(shutil, "rmtree")
    spied(shutil, "copyfile")

    async def scenario() -> None:
        async with housed(tmp_path, snapshot_every=0.0) as (made, client):
            # The very first start writes the identity of database and directory, while nobody waits.
            for seen in threads.values():
                seen.clear()
            model = await new_model(client)
            session = model.partition(":")[0]
            await told(client, "optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
            body = {"model_id": model, "path": "a", "overwrite": True}
            await told(client, "save_weights", body | {"seq_id": 2})
            path = (await told(client, "save_weights", body | {"seq_id": 3}))["path"]
            loading = {"session_id": session, "model_seq_id": 1, "path": path}
            await told(client, "load_weights", loading)
            await told(client, "copy_weights", {"source_path": path})
            await asyncio.gather(*made.models._tasks)
            await client.delete(f"training_runs/{model}/checkpoints/weights/a")
            await told(client, f"sessions/{session}/finish", {"reason": {"type": "success"}})
        async with housed(tmp_path):
            pass

    asyncio.run(scenario())
    for name, seen in threads.items():
        assert any("tinkex-files" in thread for thread in seen), name
        assert not any("tinkex-store" in thread for thread in seen), name
