"""A run on several real engines ends in the bits of a run on one, also when engines die and when their number changes.

`--long` trains 40 steps on 1 to 4 engines, with 20 kills.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tinkex.engine.process import Setup
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob
from tinkex.server.engines import make_engines
from tinkex.server.pool import EnginePool
from tinkex.server.serve import ServiceThread
from tinkex.server.service import Settings
from tinkex.testing import service

from ..environments import environment
from ..ports import reserved
from ..processes import children, command

SCRIPT = Path(__file__).with_name("pool_run.py")


@pytest.fixture(scope="module")
def steps(request) -> int:
    return 40 if request.config.getoption("--long") else 4


@pytest.fixture(scope="module", params=["tinkex", "tinker"])
def client(request) -> tuple[str, str | Path]:
    """The module that trains, and the interpreter that has it."""
    if request.param == "tinkex":
        return "tinkex", sys.executable
    return "tinker", environment("tinker-0.36.0", "tinker==0.36.0")


def engine_pids() -> set[int]:
    """The engine processes that this process has started."""
    return {pid for pid in children() if b"tinkex.engine" in command(pid)}


class Run:
    """A client in its own process; `in_step` is called in the middle of every step."""

    def __init__(self, client: tuple[str, str | Path], url: str, steps: int) -> None:
        module, python = client
        self._process = subprocess.Popen(
            [python, SCRIPT, module, url, str(steps), "last"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def finish(self, in_step: Callable[[int], None] = lambda _: None) -> None:
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step "):
                    in_step(int(line.split()[1]))
                    print(file=process.stdin, flush=True)
        assert process.returncode == 0


def saved(directory: Path) -> dict[str, bytes]:
    """The files of the last checkpoint that hold numbers."""
    (found,) = directory.glob("checkpoints/*/*/last")
    return {file.name: file.read_bytes() for file in sorted(found.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, steps):
    directory = tmp_path_factory.mktemp("one")
    with service("torch", data_dir=directory) as running:
        Run(("tinkex", sys.executable), running.url, steps).finish()
    return saved(directory)


def pytest_generate_tests(metafunc):
    if "engines" in metafunc.fixturenames:
        numbers = [1, 2, 3, 4] if metafunc.config.getoption("--long") else [2]
        metafunc.parametrize("engines", numbers)


def test_any_number_of_engines_ends_in_the_bits_of_one(client, engines, expected, steps, tmp_path):
    with service("torch", data_dir=tmp_path, engines=engines) as running:
        Run(client, running.url, steps).finish()
    assert saved(tmp_path) == expected


def test_engines_that_are_killed_change_no_bit(expected, steps, tmp_path):
    chance = random.Random(steps)
    fatal = set(chance.sample(range(steps), min(20, steps)))

    others = engine_pids()

    def kill(step: int) -> None:
        if step in fatal and (pids := engine_pids() - others):
            os.kill(chance.choice(sorted(pids)), signal.SIGKILL)

    with service("torch", data_dir=tmp_path, engines=3) as running:
        Run(("tinkex", sys.executable), running.url, steps).finish(kill)
    assert saved(tmp_path) == expected


def test_large_pass_is_computed_at_home_if_there_is_no_room_to_share_it(
    tmp_path, monkeypatch, caplog
):
    written = Path.write_bytes

    def half(path, data):
        written(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    random = np.random.default_rng(0)
    lines = random.integers(0, 256, (16, 200))
    request = PassJob([Example(line, {"target_tokens": line}) for line in lines], "cross_entropy")

    async def trained(count: int) -> list[dict[str, float]]:
        setup = Setup(("tinkex/tiny",), tmp_path, device="cpu", dtype="float32")
        pool = make_engines(setup, count=count, in_process=True, deadline=60.0, on_demand=False)
        await pool.start()
        await pool.trainer.create_model("m", "tinkex/tiny", LoraSpec(4, seed=1))
        metrics = []
        for _ in range(2):
            metrics.append(dict((await pool.trainer.run_pass("m", request)).metrics))
            await pool.trainer.optim_step("m", AdamStep(1e-2))
        if isinstance(pool, EnginePool):
            assert isinstance(pool._exchange, SharedMemory)
            lives = list(pool._exchange.directory.glob("tinkex-*"))
            assert len(lives) == count
            assert {file.name for life in lives for file in life.iterdir()} == {".lock"}
        await pool.stop()
        return metrics

    expected = asyncio.run(trained(1))
    monkeypatch.setattr(Path, "write_bytes", half)
    assert asyncio.run(trained(2)) == expected
    (told,) = [record for record in caplog.records if record.name == "tinkex.server"]
    assert "computed by its home alone: OSError: [Errno 28]" in told.getMessage()


def test_number_of_engines_may_change_across_a_restart(expected, steps, tmp_path):
    """The service restarts in the middle of two steps, with more and with fewer engines; the client only waits."""
    kept, port = reserved()
    settings = Settings(tmp_path, ("tinkex/tiny",), engine="torch", engines=2)
    served = ServiceThread(settings, port)
    run = Run(("tinkex", sys.executable), served.start(), steps)
    numbers = {1: 3, steps - 2: 1}

    def restart(step: int) -> None:
        nonlocal served
        if step in numbers:
            served.close()
            served = ServiceThread(replace(settings, engines=numbers[step]), port)
            served.start()

    try:
        run.finish(restart)
    finally:
        served.close()
        kept.close()
    assert saved(tmp_path) == expected
