"""A pool of engine processes: where models and samplers are, and what happens when engines die."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tinkex.cli.serve import command as serve_command
from tinkex.cli.status import command as status_command
from tinkex.engine import directories
from tinkex.engine.interface import IN_LINE, EngineDiedError, Spot
from tinkex.engine.process import Setup, encode_frame
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, SampleJob
from tinkex.errors import APIStatusError, ConfigError, NotFoundError, RequestFailedError
from tinkex.server.engines import engine_count, make_engines, share_out, visible_gpus
from tinkex.server.members import Member
from tinkex.server.pool import EnginePool
from tinkex.server.service import Settings
from tinkex.server.supervisor import Supervisor
from tinkex.server.suspects import DEATHS_ALLOWED
from tinkex.server.worker import Worker
from tinkex.testing import service

from ..processes import children
from .api import Api
from .test_worker import TINY, run

SPEC = LoraSpec(4, seed=1)
STEP = AdamStep(0.1)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@asynccontextmanager
async def pooled(
    cache_dir: Path, count: int = 2, *, thread: bool = False
) -> AsyncIterator[EnginePool]:
    setup = Setup((TINY,), cache_dir, "fake")
    pool = make_engines(setup, count=count, in_process=thread, deadline=60.0, on_demand=False)
    assert isinstance(pool, EnginePool)
    for member in pool.members:
        member.engine._patience = 600.0  # however slow the machine is, its engines come back
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def kill(pool: EnginePool, name: str) -> None:
    pid = {engine.name: engine.pid for engine in pool.status()}[name]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def stay_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that die from now on cannot be started again."""
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr("tinkex.server.worker._command", lambda _: failing)


def home(pool: EnginePool, model_id: str) -> str:
    member = pool.trainer.home(model_id)
    assert member is not None
    return member.name


def request(count: int = 2) -> PassJob:
    example = Example(np.arange(5), {"target_tokens": np.arange(5) + 1})
    return PassJob([example] * count, "cross_entropy")


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what nothing tells of, such as the state of an engine; a minute at most."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def died(lease) -> None:
    await until(lambda: lease.lost)


# -- models ---------------------------------------------------------------------------------------


def test_models_spread_over_the_engines(cache_dir):
    async def main():
        async with pooled(cache_dir, 3, thread=True) as pool:
            for number in range(6):
                await pool.trainer.create_model(f"m{number}", TINY, SPEC)
            assert [engine.models for engine in pool.status()] == [2, 2, 2]
            await pool.trainer.unload_model("m0")
            await pool.trainer.create_model("m6", TINY, SPEC)
            assert [engine.models for engine in pool.status()] == [2, 2, 2]

    run(main())


def test_model_that_is_unloaded_before_its_engine_is_asked_to_load_it_does_not_stay_there(
    cache_dir, monkeypatch
):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            turn = take_turn(pool, "m")
            reached, go_on = asyncio.Event(), asyncio.Event()
            for member in pool.members:
                known = member.engine.catalog.model

                async def slow(*args, known=known):
                    reached.set()
                    await go_on.wait()
                    return await known(*args)

                monkeypatch.setattr(member.engine.catalog, "model", slow)
            creating = asyncio.create_task(pool.trainer.create_model("m", TINY, SPEC))
            await reached.wait()
            await pool.trainer.unload_model("m")
            go_on.set()
            await creating
            await pool.trainer.unload_model("m")
            turn.end()
            assert [engine.models for engine in pool.status()] == [0, 0]
            assert [member.load.models for member in pool.members] == [0, 0]

    run(main())


def test_model_that_is_unloaded_while_it_is_loaded_is_not_counted(cache_dir):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            creating = asyncio.create_task(pool.trainer.create_model("m", TINY, SPEC))
            workers = [member.engine._worker for member in pool.members]
            while not any(worker.busy for worker in workers):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0)
            await asyncio.gather(pool.trainer.unload_model("m"), creating)
            assert [engine.models for engine in pool.status()] == [0, 0]

    run(main())


def take_turn(pool: EnginePool, model_id: str):
    (spot,) = pool.trainer.spots([model_id])
    assert spot is not None
    return pool.trainer.take_turn(model_id, spot)


def test_each_engine_has_its_own_queue(cache_dir):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            turns = [take_turn(pool, f"m{number}") for number in range(2 * IN_LINE)]
            assert pool.trainer.spots(["another", "m0"]) == [None, None]
            assert [engine.in_line for engine in pool.status()] == [IN_LINE, IN_LINE]
            turns[0].end()
            another, m0, m1 = pool.trainer.spots(["another", "m0", "m1"])
            assert another == m0 == Spot("engine-0")
            assert m1 is None

    run(main())


def test_model_moves_to_an_idle_engine_with_its_optimizer_and_adapter(cache_dir, tmp_path):
    async def weights(pool: EnginePool, model_id: str) -> bytes:
        directory = tmp_path / f"{model_id}-{len(list(tmp_path.iterdir()))}"
        await pool.trainer.save_state(model_id, directory, optimizer=True)
        written: bytes = (directory / "adapter_model.safetensors").read_bytes()
        return written

    async def main():
        async with pooled(cache_dir, 2) as pool:
            trainer = pool.trainer
            for name in ("stays", "moves"):
                await trainer.create_model(name, TINY, SPEC)
                await trainer.run_pass(name, request())
                await trainer.optim_step(name, STEP)
            away = next(each.name for each in pool.members if each.name != home(pool, "moves"))
            turn = trainer.take_turn("moves", Spot(away, moves=True))
            await trainer.run_pass("moves", request())
            assert home(pool, "moves") == away
            assert sorted(each.models for each in pool.status()) == [0, 2]
            await trainer.optim_step("moves", STEP)
            turn.end()
            await trainer.run_pass("stays", request())
            await trainer.optim_step("stays", STEP)
            assert await weights(pool, "moves") == await weights(pool, "stays")

    run(main())


@pytest.mark.heavy
def test_model_stays_at_home_if_the_engine_it_moves_to_dies(cache_dir):
    async def main():
        async with pooled(cache_dir, 2) as pool:
            trainer = pool.trainer
            lease = await trainer.create_model("m", TINY, SPEC)
            first = home(pool, "m")
            away = next(each.name for each in pool.members if each.name != first)
            turn = trainer.take_turn("m", Spot(away, moves=True))
            kill(pool, away)
            with pytest.raises(EngineDiedError):
                await trainer.run_pass("m", request())
            assert not lease.lost
            await trainer.run_pass("m", request())
            assert home(pool, "m") == first
            assert turn.end() >= 0
            assert [each.in_line for each in pool.status()] == [0, 0]

    run(main())


def test_model_with_gradients_does_not_move(cache_dir):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            trainer = pool.trainer
            await trainer.create_model("m", TINY, SPEC)
            member = trainer.home("m")
            assert member is not None
            member.load.line.length, member.load.line.usual = IN_LINE, 10.0
            (between,) = trainer.spots(["m"])
            assert between is not None
            assert between.moves
            assert between.idle
            await trainer.run_pass("m", request())
            assert trainer.spots(["m"]) == [None]
            await trainer.optim_step("m", STEP)
            assert trainer.spots(["m"]) == [between]

    run(main())


@pytest.mark.heavy
def test_a_death_loses_only_the_models_of_that_engine(cache_dir, monkeypatch):
    async def main():
        async with pooled(cache_dir) as pool:
            leases = {
                name: await pool.trainer.create_model(name, TINY, SPEC) for name in ("a", "b")
            }
            lost, kept = home(pool, "a"), home(pool, "b")
            assert lost != kept
            stay_down(monkeypatch)
            kill(pool, lost)
            await died(leases["a"])
            assert not leases["b"].lost
            await pool.trainer.run_pass("b", request())
            with pytest.raises(EngineDiedError) as death:
                await pool.trainer.run_pass("a", request())
            assert death.value.cause_known
            # It is restored on an engine that works, without waiting for the dead one.
            await pool.trainer.create_model("a", TINY, SPEC)
            assert home(pool, "a") == kept

    run(main())


def test_unknown_model_and_sampler_are_not_found(cache_dir):
    async def main():
        async with pooled(cache_dir, thread=True) as pool:
            with pytest.raises(NotFoundError):
                await pool.trainer.optim_step("nobody", STEP)
            with pytest.raises(NotFoundError):
                await pool.sampler.sample(SampleJob("nobody", np.arange(3)))

    run(main())


@pytest.mark.heavy
def test_a_request_that_kills_engines_fails_alone_and_kills_only_one(cache_dir):
    async def main():
        async with pooled(cache_dir) as pool:
            await pool.trainer.create_model("good", TINY, SPEC)
            kept = home(pool, "good")

            async def deadly():
                await pool.trainer.create_model("bad", TINY, SPEC)
                kill(pool, home(pool, "bad"))
                await pool.trainer.run_pass("bad", request())

            async def harmless():
                await pool.trainer.run_pass("good", request())

            killing = asyncio.create_task(pool.persist(deadly))
            while not killing.done():
                await pool.persist(harmless)
            with pytest.raises(RequestFailedError, match=f"died {DEATHS_ALLOWED} times"):
                await killing
            starts = {engine.name: engine.starts for engine in pool.status()}
            assert starts.pop(kept) == 1
            assert max(starts.values()) >= DEATHS_ALLOWED

    run(main())


def test_work_that_waits_for_an_engine_waits_on_when_another_joins(cache_dir):
    """Otherwise it would call the dead engine, and count as what killed it."""

    async def main():
        async with pooled(cache_dir, 2) as pool:
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            dead = pool.trainer.home("m")
            assert dead is not None
            kill(pool, dead.name)
            await died(lease)
            waiting = asyncio.create_task(pool.members.enter(dead))
            await asyncio.sleep(0)
            joins = next(each for each in pool.members if each is not dead)
            pool.members.add(joins)
            await waiting
            assert dead.up

    run(main())


def test_health_says_when_no_engine_is_left(cache_dir, monkeypatch):
    async def main():
        async with pooled(cache_dir) as pool:
            assert pool.check_health() == "idle"
            leases = [await pool.trainer.create_model(name, TINY, SPEC) for name in "ab"]
            names = [home(pool, name) for name in "ab"]
            stay_down(monkeypatch)
            kill(pool, names[0])
            await died(leases[0])
            assert pool.check_health() == "idle"  # the other one serves
            kill(pool, names[1])
            await died(leases[1])
            with pytest.raises(APIStatusError, match="No engine can serve"):
                pool.check_health()

    run(main())


def test_an_engine_that_is_silent_counts_as_down(cache_dir):
    async def main():
        async with pooled(cache_dir, thread=True) as pool:
            first, second = pool.members
            first.engine._worker.watch.silent = 31.0
            assert pool.check_health() == "idle"  # the other one serves
            assert "no progress" in pool.status()[0].trouble
            second.engine._worker.watch.silent = 42.0
            with pytest.raises(
                APIStatusError, match="engine-0 has made no progress for 31 seconds"
            ) as sick:
                pool.check_health()
            assert "engine-1 has made no progress for 42 seconds" in str(sick.value)

    run(main())


# -- samplers -------------------------------------------------------------------------------------


async def trained(pool: EnginePool, model_id: str, directory: Path, steps: int) -> Path:
    await pool.trainer.create_model(model_id, TINY, SPEC)
    for _ in range(steps):
        await pool.trainer.run_pass(model_id, request())
        await pool.trainer.optim_step(model_id, STEP)
    await pool.trainer.save_state(model_id, directory, optimizer=False)
    return directory


def test_samplers_with_equal_weights_share_one_adapter(cache_dir, tmp_path):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            place = await trained(pool, "m", tmp_path / "m", 1)
            for name in ("one", "two"):
                await pool.sampler.open_sampler(name, TINY, place)
            assert sum(len(opened) for opened in pool.sampler._opened.values()) == 1
            await pool.sampler.close_sampler("one")
            assert (await pool.sampler.sample(SampleJob("two", np.arange(3), max_tokens=2))).tokens
            await pool.sampler.close_sampler("two")
            assert sum(len(opened) for opened in pool.sampler._opened.values()) == 0

    run(main())


def test_samples_spread_over_engines_and_each_is_of_its_own_adapter(cache_dir, tmp_path):
    async def main():
        async with pooled(cache_dir, 2) as pool:
            places = [
                await trained(pool, f"m{number}", tmp_path / str(number), number)
                for number in range(4)
            ]
            jobs = [
                SampleJob(f"s{number % 4}", np.arange(4), max_tokens=6, seed=number)
                for number in range(32)
            ]
            for number, place in enumerate(places):
                await pool.sampler.open_sampler(f"s{number}", TINY, place)
            results = await asyncio.gather(*(pool.sampler.sample(job) for job in jobs))
            assert {len(opened) for opened in pool.sampler._opened.values()} != {0}
            assert len(pool.sampler._opened) == 2
        async with pooled(cache_dir, 2, thread=True) as pool:
            for number, place in enumerate(places):
                await pool.sampler.open_sampler(f"s{number}", TINY, place)
            for job, result in zip(jobs, results, strict=True):
                expected = await pool.sampler.sample(job)
                assert result.tokens[0].tolist() == expected.tokens[0].tolist()

    run(main())


def test_adapters_that_are_being_opened_are_not_closed(cache_dir, tmp_path, monkeypatch):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            places = [await trained(pool, f"m{n}", tmp_path / str(n), n) for n in range(3)]
            await pool.sampler.open_sampler("s0", TINY, places[0])
            arrived, go_on, closed = asyncio.Semaphore(0), asyncio.Event(), []

            async def slow(engine, *args, **options):
                arrived.release()
                await go_on.wait()
                return await Supervisor.open_sampler(engine, *args, **options)

            async def closing(engine, name):
                closed.append(name)

            for member in pool.members:
                monkeypatch.setattr(member.engine, "open_sampler", partial(slow, member.engine))
                monkeypatch.setattr(member.engine, "close_sampler", partial(closing, member.engine))
            opening = [
                asyncio.create_task(pool.sampler.open_sampler(f"s{n}", TINY, places[n]))
                for n in (1, 2)
            ]
            for _ in opening:
                await arrived.acquire()
            # Each engine ends a sample, and looks for adapters to close.
            for member in pool.members:
                await pool.sampler._close_unused(member)
            go_on.set()
            await asyncio.gather(*opening)
            assert closed == []

    run(main())


def test_an_adapter_used_again_while_another_is_closed_stays_open(cache_dir, tmp_path, monkeypatch):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            places = [await trained(pool, f"m{n}", tmp_path / str(n), n) for n in range(2)]
            first = next(iter(pool.members))
            monkeypatch.setattr(Member, "up", property(lambda self: self is first))
            for n, place in enumerate(places):
                await pool.sampler.open_sampler(f"s{n}", TINY, place)
            names = list(pool.sampler._opened[first])
            known = dict(pool.sampler._samplers)
            pool.sampler._samplers.clear()  # nobody needs them
            started, go_on, closed = asyncio.Event(), asyncio.Event(), []

            async def closing(name):
                closed.append(name)
                started.set()
                await go_on.wait()

            monkeypatch.setattr(first.engine, "close_sampler", closing)
            tidying = asyncio.create_task(pool.sampler._close_unused(first))
            await started.wait()
            pool.sampler._samplers.update(known)  # the second one is needed again
            go_on.set()
            await tidying
            assert closed == names[:1]

    run(main())


def test_a_sample_neither_waits_for_an_adapter_to_be_closed_nor_fails_with_it(
    cache_dir, tmp_path, monkeypatch, caplog
):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            place = await trained(pool, "m", tmp_path / "m", 1)
            await pool.sampler.open_sampler("base", TINY, None)
            await pool.sampler.open_sampler("s", TINY, place)
            del pool.sampler._samplers["s"]  # nobody needs it, and an engine still has it open
            reached, go_on = asyncio.Event(), asyncio.Event()

            async def failing(_: str) -> None:
                reached.set()
                await go_on.wait()
                raise RuntimeError("remove_lora failed")

            for member in pool.members:
                monkeypatch.setattr(member.engine, "close_sampler", failing)
            while not reached.is_set():  # on the engine that has it
                job = SampleJob("base", np.arange(3), max_tokens=2)
                assert (await pool.sampler.sample(job)).tokens
                await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(*pool.sampler._tasks)
            assert "RuntimeError: remove_lora failed" in caplog.text

    run(main())


def test_a_comparison_that_fails_is_logged(cache_dir, tmp_path, monkeypatch, caplog):
    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            await pool.sampler.open_sampler("s", TINY, None)
            result = await pool.sampler.sample(job := SampleJob("s", np.arange(3), max_tokens=2))

            async def failing(*_: object) -> None:
                raise OSError("the disk is full")

            for member in pool.members:
                monkeypatch.setattr(member.engine, "sample", failing)
            sampler, adapter = next(iter(pool.members)), pool.sampler._samplers["s"]
            await pool.sampler._check(sampler, adapter, job, result)
            assert "A sample of engine-0 was not compared: OSError: the disk is full" in caplog.text

    run(main())


@pytest.mark.parametrize("during", ["link", "close"])
def test_files_of_an_engine_that_reads_them_again_are_removed_after_a_cancelled_call(
    cache_dir, tmp_path, monkeypatch, during
):
    reached, go_on, link = threading.Event(), threading.Event(), directories.link

    def slow_link(source: Path, target: Path) -> None:
        reached.set()
        go_on.wait()
        link(source, target)

    async def slow_close(engine: Supervisor, name: str) -> None:
        reached.set()
        await asyncio.to_thread(go_on.wait)
        await Supervisor.close_sampler(engine, name)

    async def main():
        async with pooled(cache_dir, 2, thread=True) as pool:
            place = await trained(pool, "m", tmp_path / "m", 1)
            if during == "link":
                monkeypatch.setattr(directories, "link", slow_link)
            for member in pool.members:
                member.reads_again = True
                if during == "close":
                    closing = partial(slow_close, member.engine)
                    monkeypatch.setattr(member.engine, "close_sampler", closing)

            async def use():
                await pool.sampler.open_sampler("s", TINY, place)
                await pool.sampler.close_sampler("s")

            using = asyncio.create_task(use())
            await asyncio.to_thread(reached.wait)
            using.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(using, return_exceptions=True)
            for member in pool.members:
                await pool.sampler._close_unused(member)
            assert list(tmp_path.iterdir()) == [place]

    run(main())


def test_samples_are_retried_on_another_engine_when_one_dies(cache_dir, tmp_path):
    async def main():
        async with pooled(cache_dir) as pool:
            place = await trained(pool, "m", tmp_path / "m", 1)
            await pool.sampler.open_sampler("s", TINY, place)
            job = SampleJob("s", np.arange(4), max_tokens=6, seed=1)
            expected = await pool.sampler.sample(job)
            for engine in pool.status():
                kill(pool, engine.name)
                again = await pool.persist(lambda: pool.sampler.sample(job))
                assert again.tokens[0].tolist() == expected.tokens[0].tolist()

    run(main())


def test_an_engine_that_is_killed_while_the_service_starts_is_named(cache_dir, monkeypatch):
    killed: list[str] = []

    async def main():
        pool = make_engines(
            Setup((TINY,), cache_dir, "fake"),
            count=3,
            in_process=False,
            deadline=60.0,
            on_demand=False,
        )
        assert isinstance(pool, EnginePool)

        def encode(value):
            """Kill an engine before it is told what to serve: it cannot be up yet."""
            if isinstance(value, Setup) and not killed and pool.status()[1].pid is not None:
                killed.append("engine-1")
                kill(pool, "engine-1")
            return encode_frame(value)

        monkeypatch.setattr("tinkex.server.worker.encode_frame", encode)
        try:
            with pytest.raises(ConfigError, match=r"^engine-1 was killed by signal 9 \(out of mem"):
                await pool.start()
        finally:
            await pool.stop()

    run(main())


# -- the service ----------------------------------------------------------------------------------


def test_service_lists_its_engines():
    with service("fake", engines=2) as running, Api(running.url) as api:
        health = api.got("healthz")
        assert [engine["name"] for engine in health["engines"]] == ["engine-0", "engine-1"]
        assert all(engine["up"] for engine in health["engines"])
        text = api.http.get("/metrics").text
        assert 'tinkex_engine_up{base_models="tinkex/tiny",device="none",engine="engine-1"' in text
        assert 'tinkex_engine_restarts_total{engine="engine-0"} 0.0' in text


@pytest.mark.heavy
def test_engines_are_listed_when_none_can_serve(monkeypatch):
    others = children()
    with service("fake", engines=2, engine_in_process=False) as running, Api(running.url) as api:
        engines = children() - others
        assert len(engines) == 2
        stay_down(monkeypatch)
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        patience = time.monotonic() + 120
        while True:
            answer = api.http.get("/api/v1/healthz")
            troubles = [each.get("trouble", "") for each in answer.json()["engines"]]
            if all("exit code 3" in trouble for trouble in troubles):
                break
            assert time.monotonic() < patience, answer.text
            time.sleep(0.02)
        assert answer.status_code == 503
        assert (
            "engine-0 is being started. engine-0 ended with exit code 3" in answer.json()["detail"]
        )
        assert [each["up"] for each in answer.json()["engines"]] == [False, False]
        without_key = api.http.get("/health")
        assert without_key.status_code == 503
        assert "engine-" not in without_key.text
        shown = api.http.get("/local/service").json()["engine"]
        assert shown["state"] == "cannot serve"
        assert "engine-1 is being started" in shown["trouble"]
        assert [each["up"] for each in shown["engines"]] == [False, False]
        assert {"node", "device", "memory_bytes", "models", "samples"} <= shown["engines"][0].keys()
        asked = CliRunner().invoke(
            status_command, ["--base-url", running.url, "--api-key", "tml-local"]
        )
        assert asked.exit_code == 0, asked.output
        assert re.search(
            r"^Trouble: +No engine can serve: engine-0 is being started", asked.output, re.MULTILINE
        )
        assert re.search(r"engine-1  fake on none  starting", asked.output)


def test_runs_of_a_pool_continue_with_another_number_of_engines(tmp_path):
    losses = []
    for engines in (1, 3, 2):
        with (
            service("fake", data_dir=tmp_path, engines=engines) as running,
            Api(running.url) as api,
        ):
            if engines == 1:
                model = api.model()
            else:
                model.api = api
            losses.append(model.step())
    assert losses[0] > losses[1] > losses[2]


# -- sharing out ----------------------------------------------------------------------------------


def test_processors_and_memory_are_divided_between_engines_on_a_cpu(monkeypatch, cache_dir):
    monkeypatch.setattr("tinkex.server.engines.usable_processors", lambda: 8)
    monkeypatch.setattr("tinkex.server.engines.visible_gpus", lambda: 0)
    setup = Setup((TINY,), cache_dir)
    assert share_out(setup, 4) == [replace(setup, threads=2, memory_share=1 / 4)] * 4
    assert share_out(setup, 20) == [replace(setup, threads=1, memory_share=1 / 20)] * 20
    assert engine_count("auto", "auto") == 1


def test_more_engines_than_processors_are_warned_about(monkeypatch, cache_dir, caplog):
    monkeypatch.setattr("tinkex.server.engines.usable_processors", lambda: 2)
    monkeypatch.setattr("tinkex.server.engines.visible_gpus", lambda: 0)
    setup = Setup((TINY,), cache_dir)
    for count in (2, 3):
        make_engines(setup, count=count, in_process=False, deadline=60.0, on_demand=False)
    assert [record.message[:27] for record in caplog.records] == ["3 engines share 2 processor"]


def test_each_gpu_gets_an_engine(monkeypatch, cache_dir):
    monkeypatch.setattr("tinkex.server.engines.visible_gpus", lambda: 4)
    setup = Setup((TINY,), cache_dir)
    assert engine_count("auto", "auto") == 4
    assert engine_count("auto", "cpu") == 1
    assert [each.device for each in share_out(setup, 4)] == [f"cuda:{n}" for n in range(4)]
    assert {each.memory_share for each in share_out(setup, 4)} == {1.0}


def test_engines_of_one_gpu_divide_its_memory(monkeypatch, cache_dir):
    monkeypatch.setattr("tinkex.server.engines.visible_gpus", lambda: 2)
    shared = share_out(Setup((TINY,), cache_dir, device="cuda"), 4)
    assert [each.device for each in shared] == ["cuda:0", "cuda:1"] * 2
    assert {each.memory_share for each in shared} == {0.5}


def test_shared_memory_of_a_killed_service_is_removed(tmp_path):
    abandoned, live, new = (SharedMemory(tmp_path) for _ in range(3))
    abandoned.open()
    assert abandoned._lock is not None
    os.close(abandoned._lock)  # as the kernel does when a process ends
    live.open()
    new.open()
    assert not abandoned.directory.exists()
    assert live.directory.exists()
    for each in (live, new):
        each.close()
        assert not each.directory.exists()


def directory_of(pool: EnginePool) -> Path:
    assert isinstance(pool._exchange, SharedMemory)
    return pool._exchange.directory


def test_killed_engine_leaves_nothing_in_the_exchange(cache_dir):
    async def main():
        async with pooled(cache_dir, 2) as pool:
            exchange = directory_of(pool)
            before = set(exchange.glob("tinkex-*"))
            assert len(before) == 2
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            kill(pool, home(pool, "m"))
            await died(lease)
            await until(lambda: all(engine.up for engine in pool.status()))
            after = set(exchange.glob("tinkex-*"))
            assert len(after) == 2
            assert len(after & before) == 1

    run(main())


def test_engine_starts_again_after_the_system_has_removed_the_exchange(cache_dir):
    async def main():
        async with pooled(cache_dir, 2) as pool:
            shutil.rmtree(directory_of(pool))
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            kill(pool, home(pool, "m"))
            await died(lease)
            await until(lambda: all(engine.up for engine in pool.status()))
            assert (directory_of(pool) / ".lock").exists()

    run(main())


def test_shared_memory_that_is_being_opened_does_not_look_abandoned(tmp_path, monkeypatch):
    first, second = SharedMemory(tmp_path), SharedMemory(tmp_path)
    lock, opening = fcntl.flock, [second]

    def locking(descriptor, operation):
        if opening:
            opening.pop().open()  # another process, just before the first one has its lock
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", locking)
    first.open()
    assert first.directory.exists()
    assert second.directory.exists()
    for each in (first, second):
        each.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["0", "-1", "two"])
def test_number_of_engines_that_makes_no_sense_is_refused(wrong, tmp_path):
    answer = CliRunner().invoke(serve_command, ["--engines", wrong, "--data-dir", str(tmp_path)])
    assert answer.exit_code == 2
    assert f"must be a number of at least 1, or auto, got '{wrong}'" in answer.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [0, 1025, 10**20])
def test_number_of_engines_is_checked_in_settings_too(tmp_path, wrong):
    with pytest.raises(ConfigError, match="must be between 1 and 1,024, or auto") as refused:
        Settings(tmp_path, engines=wrong)
    assert refused.value.field == "engines"


def test_more_engines_than_the_service_may_open_files_for_are_refused(cache_dir):
    async def full(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main():
        with pytest.raises(ConfigError, match="ulimit -n") as refused:
            await Worker(Setup((TINY,), cache_dir, "fake"), launcher=full).start()
        assert refused.value.field == "engines"

    run(main())


def test_processors_for_engines_need_a_cluster(tmp_path):
    with pytest.raises(ConfigError, match="give --ray") as refused:
        Settings(tmp_path, engine_cpus=2.0)
    assert refused.value.field == "engine_cpus"


@pytest.mark.parametrize(("drivers", "count"), [((), 0), ((__file__,), 2)])
def test_cuda_visible_devices_counts_where_there_is_a_driver(monkeypatch, drivers, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("tinkex.server.engines._DRIVERS", drivers)
    assert visible_gpus() == count


def test_service_with_one_engine_frees_what_a_killed_pool_has_left(cache_dir):
    left = SharedMemory()
    left.open()
    assert left._lock is not None
    os.close(left._lock)  # as the kernel does when a process ends

    async def main():
        setup = Setup((TINY,), cache_dir, "fake")
        engine = make_engines(setup, count=1, in_process=True, deadline=60.0, on_demand=False)
        await engine.start()
        assert not left.directory.exists()
        await engine.stop()

    run(main())
