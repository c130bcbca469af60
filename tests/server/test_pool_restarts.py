"""A pool while one of its engines is started again: it takes long, or hangs."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tinkex.engine.process import Setup, serve
from tinkex.engine.progress import EngineProgress
from tinkex.engine.shared_memory import SharedMemory
from tinkex.server.members import Member
from tinkex.server.pool import EnginePool
from tinkex.server.supervisor import Supervisor
from tinkex.server.worker import Worker

from .test_pool import SPEC, home, request
from .test_worker import TINY, run


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


class Threads:
    """Starts engines in threads; after `break_`, what it starts never answers."""

    def __init__(self) -> None:
        self._theirs: list[socket.socket] = []
        self._broken = False

    async def __call__(self, theirs: socket.socket, _: EngineProgress) -> None:
        self._theirs.append(theirs.dup())
        if not self._broken:
            threading.Thread(target=serve, args=(theirs.dup(),), daemon=True).start()

    def break_(self) -> None:
        """End the engine; the next ones hang while they start."""
        self._broken = True
        self._theirs[-1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._theirs:
            each.close()


@asynccontextmanager
async def pooled(
    cache_dir: Path, deadline: float = 60.0
) -> AsyncIterator[tuple[EnginePool, dict[str, Callable[[], None]]]]:
    launchers = {f"engine-{number}": Threads() for number in range(2)}
    setup = Setup((TINY,), cache_dir, "fake")
    members = [
        Member(
            Supervisor(Worker(setup, name=name, launcher=launcher, deadline=deadline), patience=0.1)
        )
        for name, launcher in launchers.items()
    ]
    pool = EnginePool(members, SharedMemory())
    await pool.start()
    try:
        yield pool, {name: launcher.break_ for name, launcher in launchers.items()}
    finally:
        await pool.stop()
        for launcher in launchers.values():
            launcher.close()


def test_an_engine_that_hangs_while_it_is_started_again_leaves_its_work_to_others(cache_dir):
    async def main():
        async with pooled(cache_dir) as (pool, breaks):
            tried = []

            async def work():
                await pool.trainer.create_model("m", TINY, SPEC)
                tried.append(home(pool, "m"))
                if len(tried) == 1:
                    breaks[tried[0]]()
                return await pool.trainer.run_pass("m", request())

            assert (await pool.persist(work)).logprobs
            first, second = tried
            assert first != second
            (stranded,) = [each for each in pool.status() if each.name == first]
            assert not stranded.up
            assert f"{first} was not up" in stranded.trouble
            assert stranded.starts == 1

    run(main())
