"""What a pool does when an engine fails at moving a model or at helping with a pass; engines here only answer or fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from tinkex.engine.interface import IN_LINE, EngineDiedError, EngineStuckError, Spot
from tinkex.engine.parcels import Parcel
from tinkex.engine.process import Ready
from tinkex.engine.shards import Block, ShardSums
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, PassResult
from tinkex.server.members import Member, Members
from tinkex.server.pool_trainer import AVOIDING, PoolTrainer
from tinkex.server.visits import visiting

from .test_pool import until
from .test_worker import TINY, run

SPEC = LoraSpec(4, seed=1)


class Lease:
    lost = False


class Engine:
    """Answers at once; `failures` has an error for the next call of a method, `gates` an event that it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.up, self.stranded, self.trouble = True, False, ""
        self.ready = Ready(token_budget=512)
        self.catalog = SimpleNamespace(has=lambda _: True, model=self._model)
        self.failures: dict[str, BaseException] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []

    async def _model(self, *_: object) -> None: ...

    async def wait_stranded(self) -> None:
        await asyncio.Event().wait()

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **_: Any) -> Any:
            self.calls.append(method)
            if gate := self.gates.get(method):
                await gate.wait()
            if failure := self.failures.pop(method, None):
                raise failure
            if method in {"run_shards", "help_pass"}:
                numbers = list(args[-1])
                first = numbers[0]
                block = Block(first, len(numbers), Parcel(f"{self.name} {first}", 1, None))
                return ShardSums(blocks=[block])
            if method in {"run_pass", "finish_pass"}:
                return PassResult([], {"by": 0.0})
            return {} if method == "optim_step" else Lease()

        if method.startswith("_"):
            raise AttributeError(method)
        return call


@dataclass
class Depot:
    """Remembers what was dropped."""

    dropped: list[str] = field(default_factory=list)

    def drop(self, parcel: Parcel) -> None:
        self.dropped.append(parcel.name)


class Pool:
    """Two engines; "m" lives on engine-0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.depot = Depot()
        self.engines = [Engine("engine-0"), Engine("engine-1")]
        self.members = [Member(engine) for engine in self.engines]  # type: ignore[arg-type]
        members = Members()
        for member in self.members:
            members.add(member)
        scratch = SharedMemory()
        scratch.open()
        self._scratch = scratch
        self.trainer = PoolTrainer(members, self.depot, scratch, lambda: self.now)  # type: ignore[arg-type]

    async def __aenter__(self) -> Self:
        await self.trainer.create_model("m", TINY, SPEC)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.trainer.stop()
        self._scratch.close()


def large_pass() -> PassJob:
    """A pass that two engines share."""
    example = Example(np.arange(512), {"target_tokens": np.arange(512)})
    return PassJob([example] * 4, "cross_entropy", backward=True)


# -- moving ----------------------------------------------------------------------------------------


def test_a_model_stays_at_home_if_the_other_engine_lacks_memory():
    async def main():
        async with Pool() as pool:
            home, away = pool.engines
            away.failures["restore_snapshot"] = RuntimeError("OutOfMemoryError: CUDA")
            turn = pool.trainer.take_turn("m", Spot("engine-1", moves=True))
            assert await pool.trainer.optim_step("m", AdamStep()) == {}
            turn.end()
            assert home.calls[-1] == "optim_step"
            load = pool.members[0].load
            load.line.length, load.line.usual = IN_LINE, 10.0
            assert pool.trainer.spots(["m"]) == [None]  # engine-1 is avoided …
            pool.now += AVOIDING + 1
            (spot,) = pool.trainer.spots(["m"])  # … for a while
            assert spot is not None
            assert (spot.engine, spot.moves) == ("engine-1", True)

    run(main())


def test_a_model_that_has_moved_is_used_even_if_its_old_home_cannot_free_it():
    async def main():
        async with Pool() as pool:
            home, away = pool.engines
            home.failures["unload_model"] = RuntimeError("no")
            pool.trainer.take_turn("m", Spot("engine-1", moves=True))
            await pool.trainer.optim_step("m", AdamStep())
            assert away.calls[-1] == "optim_step"

    run(main())


def test_two_models_that_move_in_opposite_directions_do_not_wait_for_each_other():
    async def main():
        async with Pool() as pool:
            await pool.trainer.create_model("n", TINY, SPEC)
            assert pool.trainer.home("n") is pool.members[1]
            groups = [member.suspects for member in pool.members]
            for member in pool.members:  # as after a death: one piece of work at a time
                member.suspects.suspect()
                await member.suspects.enter()
                member.suspects.alone_at_death(member.name, 0)
                member.suspects.leave()
            for model_id, away in (("m", "engine-1"), ("n", "engine-0")):
                pool.trainer.take_turn(model_id, Spot(away, moves=True))

            async def step(model_id: str, at_home: Member) -> None:
                with visiting() as visit:
                    try:
                        await visit.enter(at_home)
                        await asyncio.sleep(0)  # until the other one is at its home, too
                        await pool.trainer.optim_step(model_id, AdamStep())
                    finally:
                        visit.end(cause=False)

            await asyncio.wait_for(asyncio.gather(*map(step, "mn", pool.members)), 60)
            assert [group.calm for group in groups] == [False, False]

    run(main())


# -- divided passes ----------------------------------------------------------------------------------


def test_a_stuck_helper_does_not_fail_a_pass():
    async def main():
        async with Pool() as pool:
            home, helper = pool.engines
            helper.failures["help_pass"] = EngineStuckError("killed", engine="engine-1", deadline=8)
            await pool.trainer.run_pass("m", large_pass())
            assert home.calls[-1] == "run_pass"
            assert pool.depot.dropped == ["engine-0 0"]

    run(main())


def test_a_helper_that_dies_is_known_to_the_one_who_asked():
    async def main():
        async with Pool() as pool:
            pool.engines[1].failures["help_pass"] = EngineDiedError("gone", engine="engine-1")
            with pytest.raises(EngineDiedError, match="gone"):
                await pool.trainer.run_pass("m", large_pass())

    run(main())


@pytest.mark.parametrize("error", [RuntimeError("no memory"), EngineDiedError("died")])
def test_parts_of_a_pass_that_cannot_be_finished_are_dropped(error):
    async def main():
        async with Pool() as pool:
            pool.engines[0].failures["finish_pass"] = error
            with pytest.raises(type(error)):
                await pool.trainer.run_pass("m", large_pass())
            assert sorted(pool.depot.dropped) == ["engine-0 0", "engine-1 2"]

    run(main())


@pytest.mark.parametrize("method", ["help_pass", "finish_pass"])
def test_parts_of_a_cancelled_pass_are_dropped(method):
    async def main():
        async with Pool() as pool:
            engine = pool.engines[1 if method == "help_pass" else 0]
            gate = engine.gates[method] = asyncio.Event()
            passing = asyncio.create_task(pool.trainer.run_pass("m", large_pass()))
            await until(lambda: method in engine.calls)
            passing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await passing
            gate.set()
            await until(lambda: len(pool.depot.dropped) >= 2)
            assert sorted(pool.depot.dropped) == ["engine-0 0", "engine-1 2"]

    run(main())


def test_results_of_users_are_not_logged(caplog):
    async def main():
        async with Pool() as pool:
            pool.engines[1].failures["help_pass"] = OSError("no room in shared memory")
            await pool.trainer.run_pass("m", large_pass())
            assert "OSError: no room in shared memory" in caplog.text
            assert "ShardSums" not in caplog.text

    run(main())


def test_no_change_of_the_engines_is_missed():
    async def main():
        async with Pool() as pool:
            members = pool.trainer._members

            async def add() -> None:
                members.add(pool.members[0])

            def wait() -> asyncio.Task[None]:
                return asyncio.create_task(members._first(asyncio.Event().wait()))

            # The third begins to wait before anything that the first has started runs.
            first, _, third = wait(), asyncio.create_task(add()), wait()
            await asyncio.wait_for(first, 60)
            third.cancel()

    run(main())
