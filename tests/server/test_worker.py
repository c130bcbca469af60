"""The service's side of the pipe, and recovery from engine deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tinkex.engine.calls import (
    CloseSampler,
    CreateModel,
    EngineCall,
    OpenSampler,
    OptimStep,
    RunPass,
)
from tinkex.engine.interface import EngineDiedError, EngineLease
from tinkex.engine.process import Ready, Setup
from tinkex.engine.values import (
    AdamStep,
    Example,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleJob,
    StreamedToken,
)
from tinkex.errors import (
    APIStatusError,
    ConfigError,
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
)
from tinkex.server.supervisor import Supervisor
from tinkex.server.suspects import DEATHS_ALLOWED
from tinkex.server.worker import Worker

T = TypeVar("T")

TINY = "tinkex/tiny"
PATIENCE = 300.0  # seconds; engines are started several times, perhaps on a busy machine
PROMPT = np.arange(3, dtype=np.int32)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["thread", "process"])
def in_process(request):
    return request.param == "thread"


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def setup(cache_dir: Path, *base_models: str) -> Setup:
    return Setup(base_models or (TINY,), cache_dir, "fake")


@asynccontextmanager
async def working(cache_dir: Path, *, in_process: bool = False) -> AsyncIterator[Worker]:
    worker = Worker(setup(cache_dir), in_process=in_process)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


class PausedClock:
    """The time of a deadline. It passes only while a test lets it: an engine may be slow without being killed."""

    def __init__(self) -> None:
        self._now, self._step = 0.0, 0.0

    def __call__(self) -> float:
        self._now += self._step
        return self._now

    def go_on(self) -> None:
        self._step = 1.0

    def pause(self) -> None:
        self._step = 0.0


@asynccontextmanager
async def supervised(
    cache_dir: Path, deadline: float = inf, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(Worker(setup(cache_dir), deadline=deadline, clock=clock))
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


def kill(worker: Worker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Whether a process has ended and been waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def examples(count: int, length: int = 6) -> list[Example]:
    tokens = np.arange(length, dtype=np.int32)
    return [Example(tokens, {"target_tokens": tokens[::-1].astype(np.int64)})] * count


#: Minutes of work.
ENDLESS = PassJob(examples(10_000, 256), "cross_entropy")


async def make(worker: Worker) -> None:
    """Create a model and a sampler in the engine."""
    await worker.call(CreateModel("m", TINY, LoraSpec(4)))
    await worker.call(OpenSampler("s", TINY))


async def endless_pass(worker: Worker) -> asyncio.Task[Any]:
    """Start an endless call. Samples and passes alternate, so a token shows that it has started."""
    passing = asyncio.create_task(worker.call(RunPass("m", ENDLESS)))
    await asyncio.sleep(0)  # now it is sent
    begun = asyncio.Event()
    await worker.sample(job(max_tokens=2, stream=True), lambda _: begun.set())
    assert begun.is_set()
    return passing


def job(num_samples: int = 1, max_tokens: int = 4, **options: Any) -> SampleJob:
    return SampleJob("s", PROMPT, num_samples, max_tokens, stop_tokens=(), **options)


# -- calls -------------------------------------------------------------------------------------------


def test_a_worker_trains_and_samples(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            assert isinstance(worker.ready, Ready)
            assert [model.name for model in worker.ready.models] == [TINY]
            assert (worker.pid is None) is in_process
            await make(worker)
            asked = PassJob(examples(3), "cross_entropy")
            result = await worker.call(RunPass("m", asked))
            assert [logprobs.shape for logprobs in result.logprobs] == [(6,)] * 3
            assert (await worker.call(OptimStep("m", AdamStep())))["grad_norm"] > 0
            assert worker.busy_seconds > 0
            again = await worker.call(RunPass("m", asked))
            assert again.metrics["loss:sum"] < result.metrics["loss:sum"]

    run(work())


def test_each_call_gets_its_own_reply(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            await make(worker)
            sizes = range(1, 9)
            results: list[PassResult | SampledResult] = await asyncio.gather(
                *(
                    worker.call(RunPass("m", PassJob(examples(size), "cross_entropy")))
                    for size in sizes
                ),
                *(worker.sample(job(num_samples=size)) for size in sizes),
            )
            assert [len(result.logprobs) for result in results] == [*sizes, *sizes]

    run(work())


def test_engine_errors_are_raised_in_the_caller(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            with pytest.raises(NotFoundError, match="There is no model 'nobody'"):
                await worker.call(OptimStep("nobody", AdamStep()))
            with pytest.raises(InvalidInputError) as caught:
                await worker.call(OpenSampler("s", "another/model"))
            assert caught.value.field == "base_model"
            with pytest.raises(NotFoundError):
                await worker.sample(job())
            with pytest.raises(RuntimeError, match="TypeError: no engine runs"):
                await worker.call(EngineCall())
            assert not worker.died.is_set()

    run(work())


def test_large_values_cross_the_pipe(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            await make(worker)
            asked = job(num_samples=40, max_tokens=16, topk_sample_logprobs=20)
            result = await worker.sample(asked)
            assert result.topk_sampled is not None
            assert [ids.shape for ids, _ in result.topk_sampled] == [(16, 20)] * 40
            many = [
                Example(np.arange(50) + i, {"target_tokens": np.arange(50)}) for i in range(200)
            ]
            passed = await worker.call(RunPass("m", PassJob(many, "cross_entropy")))
            assert len(passed.logprobs) == 200

    run(work())


# -- samples -----------------------------------------------------------------------------------------


def test_tokens_are_streamed_as_they_are_sampled(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            await make(worker)
            told: list[StreamedToken] = []
            result = await worker.sample(job(2, 5, stream=True, seed=7), told.append)
            for index in (0, 1):
                mine = [token for token in told if token.index == index]
                assert [token.token for token in mine] == result.tokens[index].tolist()
                logprobs = np.array([token.logprob for token in mine], np.float32)
                assert logprobs.tolist() == result.logprobs[index].tolist()
            quiet = await worker.sample(job(2, 5, seed=7))
            assert [row.tolist() for row in quiet.tokens] == [row.tolist() for row in result.tokens]

    run(work())


def test_a_cancelled_sample_streams_no_more_tokens(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            await make(worker)
            told: list[StreamedToken] = []
            begun = asyncio.Event()

            def hear(token: StreamedToken) -> None:
                told.append(token)
                begun.set()

            asked = job(max_tokens=2000, stream=True)
            leaving = asyncio.create_task(worker.sample(asked, hear))
            staying = asyncio.create_task(worker.sample(job(max_tokens=50)))
            await begun.wait()
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            heard = len(told)
            assert (await staying).stop_reasons == ["length"]
            await worker.call(CloseSampler("s"))
            assert len(told) == heard < 2000

    run(work())


# -- stop and death ----------------------------------------------------------------------------------


def test_a_stopped_worker_can_be_started_again(cache_dir, in_process):
    async def work() -> None:
        async with working(cache_dir, in_process=in_process) as worker:
            await make(worker)
            pid = worker.pid
            await worker.stop()
            assert pid is None or is_gone(pid)
            with pytest.raises(EngineDiedError):
                await worker.call(OptimStep("m", AdamStep()))
            with pytest.raises(EngineDiedError):
                await worker.sample(job())
            await worker.start()
            with pytest.raises(NotFoundError):  # the new engine has no models loaded
                await worker.call(OptimStep("m", AdamStep()))
            await make(worker)

    run(work())


def test_stopping_fails_calls_in_flight(cache_dir):
    async def work() -> None:
        async with working(cache_dir) as worker:
            await make(worker)
            passing = await endless_pass(worker)
            assert worker.pid is not None
            pid = worker.pid
            await worker.stop()
            assert is_gone(pid)
            with pytest.raises(EngineDiedError):
                await passing

    run(work())


def test_a_killed_engine_fails_its_calls_and_can_be_started_again(cache_dir):
    async def work() -> None:
        async with working(cache_dir) as worker:
            await make(worker)
            passing = await endless_pass(worker)
            sampling = asyncio.create_task(worker.sample(job(max_tokens=2000)))
            await asyncio.sleep(0)
            assert not worker.died.is_set()
            killed = worker.pid
            kill(worker)
            for call in (passing, sampling):
                with pytest.raises(EngineDiedError):
                    await call
            await worker.died.wait()
            with pytest.raises(EngineDiedError):
                await worker.call(OptimStep("m", AdamStep()))
            with pytest.raises(EngineDiedError):
                await worker.call(CloseSampler("s"))
            await worker.stop()
            assert killed is not None
            assert is_gone(killed)
            await worker.start()
            assert not worker.died.is_set()
            assert worker.pid != killed
            await make(worker)
            assert (await worker.sample(job())).stop_reasons == ["length"]

    run(work())


def test_a_sample_that_is_cancelled_as_the_engine_dies_is_cancelled(cache_dir):
    async def work() -> None:
        async with working(cache_dir) as worker:
            await make(worker)

            async def be_first_to_hear() -> None:
                with pytest.raises(EngineDiedError):
                    await worker.call(RunPass("m", ENDLESS))
                # The sample's failure is on its way; if it were handled as one, the sample would be retried.
                sampling.cancel()

            first = asyncio.create_task(be_first_to_hear())
            sampling = asyncio.create_task(worker.sample(job(max_tokens=2000)))
            await asyncio.sleep(0)
            kill(worker)
            with pytest.raises(asyncio.CancelledError):
                await sampling
            await first

    run(work())


# -- starting ----------------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_raises_the_reason(cache_dir, in_process):
    async def work() -> None:
        worker = Worker(setup(cache_dir, "./not there"), in_process=in_process)
        with pytest.raises(InvalidInputError, match="not there"):
            await worker.start()
        assert worker.pid is None
        await worker.stop()

    run(work())


@pytest.fixture
def endless_model(tmp_path):
    """A model that never finishes loading: its first file is a pipe."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "slow"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(index)
    return index


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_engine_can_be_stopped_while_it_starts(cache_dir, endless_model, how):
    async def work() -> None:
        worker = Worker(setup(cache_dir, f"slow={endless_model.parent}"))
        starting = asyncio.create_task(worker.start())
        with await asyncio.to_thread(endless_model.open, "w"):  # returns once the engine reads it
            assert worker.pid is not None
            pid = worker.pid
            if how == "killed":
                kill(worker)
                with pytest.raises(
                    ConfigError, match=r"engine was killed by signal 9 .* while it was starting"
                ):
                    await starting
            else:
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
                await worker.stop()
            assert is_gone(pid)

    run(work())


def test_an_engine_that_does_nothing_while_it_starts_is_killed(cache_dir, endless_model):
    async def work() -> None:
        worker = Worker(setup(cache_dir, f"slow={endless_model.parent}"), deadline=1.0)
        with pytest.raises(ConfigError, match="made no progress for 1 seconds and was killed"):
            await worker.start()  # nobody writes to the pipe that it reads
        assert worker.pid is None

    run(work())


def test_a_supervisor_goes_on_if_stopping_the_dead_engine_fails(cache_dir, monkeypatch, caplog):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            stop, failures = engine._worker.stop, [OSError("no descriptor is left")]

            async def failing() -> None:
                if failures:
                    raise failures.pop()
                await stop()

            monkeypatch.setattr(engine._worker, "stop", failing)
            kill(engine._worker)
            await engine.persist(lambda: make(engine._worker))
            assert "no descriptor is left" in caplog.text
            assert (
                "engine was killed by signal 9 (out of memory?); starting it again" in caplog.text
            )
            assert engine.status()[0].starts == 2

    run(work())


def test_a_call_to_an_engine_that_is_started_again_tells_of_the_life_that_ended(cache_dir):
    """Otherwise it would count as a death of the life that is about to begin."""

    async def work() -> None:
        async with working(cache_dir) as worker:
            kill(worker)
            await worker.died.wait()
            worker.life += 1  # as its supervisor does before it starts it again
            with pytest.raises(EngineDiedError) as told:
                await make(worker)
            assert told.value.life == 0

    run(work())


# -- supervision -------------------------------------------------------------------------------------


def test_a_call_is_retried_after_the_engine_died(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            lives = []

            async def train() -> Any:
                lives.append(engine._worker.life)
                await make(engine._worker)
                if len(lives) == 1:
                    kill(engine._worker)
                return await engine._worker.call(OptimStep("m", AdamStep()))

            assert await engine.persist(train) == {"grad_norm": 0.0, "learning_rate": 1e-4}
            assert lives == [0, 1]
            assert engine._worker.life == 1

    run(work())


def test_all_calls_continue_after_an_engine_death(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            begun = 0
            all_begun = asyncio.Event()

            async def sample() -> Any:
                nonlocal begun
                begun += 1
                first_life = not engine._worker.life
                if begun == 20:
                    all_begun.set()
                await engine._worker.call(OpenSampler("s", TINY))
                if first_life:
                    await endless_pass_of_its_own
                return await engine._worker.sample(job())

            await make(engine._worker)
            endless_pass_of_its_own = await endless_pass(engine._worker)
            sampling = [asyncio.create_task(engine.persist(sample)) for _ in range(20)]
            await all_begun.wait()
            kill(engine._worker)
            results = await asyncio.gather(*sampling)
            await asyncio.gather(endless_pass_of_its_own, return_exceptions=True)
            assert [result.stop_reasons for result in results] == [["length"]] * 20
            assert begun == 40
            assert engine._worker.life == 1

    run(work())


@pytest.mark.heavy
def test_a_request_that_always_kills_the_engine_fails(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            killed = []

            async def deadly() -> None:
                killed.append(engine._worker.pid)
                kill(engine._worker)
                await engine._worker.call(CreateModel("m", TINY, LoraSpec(4)))

            with pytest.raises(RequestFailedError, match=f"died {DEATHS_ALLOWED} times") as caught:
                await engine.persist(deadly)
            assert caught.value.category is RequestErrorCategory.Server
            assert len(set(killed)) == DEATHS_ALLOWED
            await engine.persist(lambda: make(engine._worker))  # other calls have an engine again
            assert engine._worker.life == DEATHS_ALLOWED

    run(work())


@pytest.mark.heavy
def test_only_the_request_that_kills_the_engine_fails(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            deadly_is_there, alongside = False, []

            async def deadly() -> None:
                nonlocal deadly_is_there
                deadly_is_there = True
                alongside.append(0)
                kill(engine._worker)
                try:
                    await engine._worker.died.wait()
                    await engine._worker.call(CreateModel("m", TINY, LoraSpec(4)))
                finally:
                    deadly_is_there = False

            async def harmless() -> Any:
                if deadly_is_there:
                    alongside[-1] += 1
                    await engine._worker.died.wait()
                await engine._worker.call(OpenSampler("s", TINY))
                return await engine._worker.sample(job())

            killing = asyncio.create_task(engine.persist(deadly))
            await asyncio.sleep(0)
            others = [asyncio.create_task(engine.persist(harmless)) for _ in range(11)]
            results = await asyncio.gather(*others)
            assert [result.stop_reasons for result in results] == [["length"]] * 11
            with pytest.raises(RequestFailedError, match=r"died \d times"):
                await killing
            assert alongside[0] == 11
            assert sorted(alongside, reverse=True) == alongside  # fewer with each death …
            assert alongside[-1] == 0  # … until it ran alone
            together = [asyncio.create_task(engine.persist(harmless)) for _ in range(11)]
            await asyncio.gather(*together)
            assert engine._worker.life == len(alongside)

    run(work())


def test_a_call_waiting_for_a_slot_can_be_cancelled(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            group = engine._suspects
            group.suspect()
            await group.enter()
            assert group.alone_at_death("engine", 0)
            waiting = [asyncio.create_task(group.enter()) for _ in range(3)]
            await asyncio.sleep(0)
            group.leave()  # the first one gets the slot …
            waiting[0].cancel()  # … and is cancelled at the same time
            await waiting[1]
            assert not waiting[2].done()
            group.clear(cause=False)
            await waiting[2]

    run(work())


def test_errors_of_the_engine_are_not_retried(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            tries = []

            async def wrong() -> Any:
                tries.append(engine._worker.life)
                return await engine._worker.call(OptimStep("nobody", AdamStep()))

            with pytest.raises(NotFoundError):
                await engine.persist(wrong)
            assert tries == [0]

    run(work())


@pytest.mark.heavy
def test_a_call_is_retried_if_a_restarted_engine_lost_its_object(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            leases: list[EngineLease] = []

            async def slow() -> Any:
                leases.append(await engine.create_model("m", TINY, LoraSpec(4)))
                if len(leases) == 1:  # the engine dies and restarts before the next call
                    kill(engine._worker)
                    await engine._worker.died.wait()
                    await engine.persist(lambda: engine.create_model("other", TINY, LoraSpec(4)))
                return await engine.optim_step("m", AdamStep())

            assert (await engine.persist(slow))["grad_norm"] == 0.0
            assert [lease.lost for lease in leases] == [True, False]

    run(work())


@pytest.mark.heavy
def test_a_lease_is_lost_when_the_engine_dies(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            model = await engine.create_model("m", TINY, LoraSpec(4))
            sampler = await engine.open_sampler("s", TINY, None, trained_as="m")
            kill(engine._worker)
            await engine._worker.died.wait()
            await engine.persist(lambda: engine.create_model("other", TINY, LoraSpec(4)))
            assert model.lost
            assert sampler.lost
            for use in (engine.optim_step("m", AdamStep()), engine.sample(job())):
                with pytest.raises(EngineDiedError) as caught:
                    await use
                assert caught.value.cause_known
            # The model is gone, so the weights come from the base model here.
            again = await engine.open_sampler("s", TINY, None, trained_as="m")
            assert not again.lost
            assert (await engine.sample(job())).stop_reasons == ["length"]

    run(work())


@pytest.mark.heavy
def test_freeing_something_in_a_dead_engine_is_no_error(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            await make(engine._worker)
            await engine.close_sampler("s")
            kill(engine._worker)
            await engine.unload_model("m")
            await engine.persist(lambda: make(engine._worker))
            assert engine._worker.life == 1

    run(work())


def test_stopping_cancels_retried_calls(cache_dir):
    async def work() -> None:
        engine = Supervisor(Worker(setup(cache_dir)))
        await engine.start()
        await make(engine._worker)
        assert engine._worker.pid is not None
        pid = engine._worker.pid
        passing = await endless_pass(engine._worker)
        persisting = asyncio.create_task(engine.persist(lambda: asyncio.shield(passing)))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(asyncio.CancelledError):
            await persisting
        assert is_gone(pid)
        assert engine._worker.life == 0  # a stopped engine has not died

    run(work())


def test_a_service_serves_only_its_configured_base_models(cache_dir):
    async def work() -> None:
        async with supervised(cache_dir) as engine:
            assert [model.name for model in engine.catalog.models] == [TINY]
            assert (await engine.catalog.model(TINY, "base_model")).name == TINY
            async with engine.catalog._loading:  # another model is being loaded
                assert (await engine.catalog.model(TINY, "base_model")).name == TINY
            with pytest.raises(InvalidInputError, match="it has tinkex/tiny") as caught:
                await engine.catalog.model("another/model", "base_model")
            assert caught.value.field == "base_model"

    run(work())


@pytest.mark.heavy
def test_a_base_model_loaded_on_demand_is_loaded_again_after_a_death(cache_dir):
    async def work() -> None:
        engine = Supervisor(Worker(Setup((), cache_dir, "fake")), on_demand=True)
        await engine.start()
        try:
            assert engine.catalog.models == []
            with pytest.raises(InvalidInputError):
                await engine.catalog.model("./not there", "base_model")
            asked = await asyncio.gather(
                *(engine.catalog.model(TINY, "base_model") for _ in range(3))
            )
            assert {model.name for model in asked} == {TINY}
            kill(engine._worker)
            await engine._worker.died.wait()
            await engine.persist(lambda: make(engine._worker))
            assert [model.name for model in engine.catalog.models] == [TINY]
        finally:
            await engine.stop()

    run(work())


# -- an engine that is stuck -------------------------------------------------------------------------


def endless_name() -> Any:
    """Hashing it takes 2 ** 60 steps in C while holding the GIL."""
    name: tuple[Any, ...] = ()
    for _ in range(60):
        name = (name, name)
    return name


async def blocked(worker: Worker) -> None:
    """Wait until the engine works on the first call."""
    while worker._progress.read()[1] != 1:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0.01)


@pytest.mark.heavy
def test_a_call_that_blocks_the_engine_fails_alone_and_once(cache_dir):
    async def work() -> None:
        clock = PausedClock()
        async with supervised(cache_dir, deadline=1.0, clock=clock) as engine:
            tried, sampled = 0, 0

            async def wedge() -> None:
                nonlocal tried
                tried += 1
                await engine._worker.call(CreateModel("m", endless_name(), LoraSpec(4)))

            async def sample() -> Any:
                nonlocal sampled
                sampled += 1
                await engine._worker.call(OpenSampler("s", TINY))
                return await engine._worker.sample(job())

            wedging = asyncio.create_task(engine.persist(wedge))
            await asyncio.sleep(0)
            others = [asyncio.create_task(engine.persist(sample)) for _ in range(10)]
            await blocked(engine._worker)
            clock.go_on()
            with pytest.raises(RequestFailedError, match="engine_deadline") as caught:
                await wedging
            clock.pause()
            assert caught.value.category is RequestErrorCategory.User  # not retried by clients
            results = await asyncio.gather(*others)
            assert [result.stop_reasons for result in results] == [["length"]] * 10
            assert (tried, engine._worker.life) == (1, 1)
            assert sampled == 20  # all run together again: none is a suspect

    run(work())


@pytest.mark.heavy
def test_an_engine_that_ignores_calls_is_killed_and_they_are_retried(cache_dir):
    async def work() -> None:
        clock = PausedClock()
        async with supervised(cache_dir, deadline=1.0, clock=clock) as engine:
            assert engine._worker.pid is not None
            os.kill(engine._worker.pid, signal.SIGSTOP)
            making = asyncio.create_task(engine.persist(lambda: make(engine._worker)))
            clock.go_on()
            await engine._worker.died.wait()
            clock.pause()
            await making
            assert engine._worker.life == 1

    run(work())


@pytest.mark.heavy
def test_health_reports_an_engine_that_makes_no_progress(cache_dir):
    async def work() -> None:
        clock = PausedClock()
        async with supervised(cache_dir, deadline=2.0, clock=clock) as engine:
            assert engine.check_health() == "idle"
            wedged = asyncio.create_task(
                engine._worker.call(CreateModel("m", endless_name(), LoraSpec(4)))
            )
            await asyncio.sleep(0)
            assert engine.check_health() == "working"
            await blocked(engine._worker)
            clock.go_on()
            while engine._worker.watch.silent <= 1.0:  # noqa: ASYNC110 - half of the deadline
                await asyncio.sleep(0.05)
            clock.pause()
            with pytest.raises(APIStatusError, match="no progress for") as caught:
                engine.check_health()
            (status,) = engine.status()
            assert (status.up, status.works) == (True, False)  # `tinkex_engine_up` is `works`
            assert caught.value.status_code == 503
            clock.go_on()
            await asyncio.gather(wedged, return_exceptions=True)
            clock.pause()
            await engine.persist(lambda: make(engine._worker))
            assert engine.check_health() == "idle"

    run(work())


ORPHAN = """
import asyncio, sys
from pathlib import Path
from tinkex.engine.calls import CreateModel
from tinkex.engine.process import Setup
from tinkex.engine.values import LoraSpec
from tinkex.server.worker import Worker
from tests.server.test_worker import endless_name

async def main():
    worker = Worker(Setup(("tinkex/tiny",), Path(sys.argv[1]), "fake"))
    await worker.start()
    asyncio.create_task(worker.call(CreateModel("m", endless_name(), LoraSpec(4))))
    while worker._progress.read()[1] != 1:  # until it is stuck in the call
        await asyncio.sleep(0.01)
    print("stuck", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels have no such call")
def test_a_stuck_engine_is_killed_with_its_service(cache_dir):
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(cache_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"stuck\n"
        parent.kill()
        # The engine inherits this pipe, so it closes only when service and engine have both ended.
        _, said = parent.communicate(timeout=PATIENCE)
        assert said == b""
