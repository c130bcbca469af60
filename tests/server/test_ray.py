"""Engines of a cluster, with a stand-in for Ray: the bridge and its actors run in threads of this process.

The real cluster is in tests/ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socketpair
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkex.engine import bridge
from tinkex.engine.actor import ActorDepot, EngineActor, HostFacts, ParcelPlace
from tinkex.engine.actors import (
    ActorHandle,
    ActorLostError,
    ActorSilentError,
    NodeView,
    StoreFullError,
    fits,
    lacking,
)
from tinkex.engine.base_models import parse_spec, prepare
from tinkex.engine.bridge import Bridge
from tinkex.engine.interface import EngineDiedError
from tinkex.engine.parcels import Parcel, ParcelLostError
from tinkex.engine.process import Setup
from tinkex.engine.values import SampleJob, StreamedToken
from tinkex.errors import APIStatusError, ConfigError, RequestFailedError
from tinkex.server import ray_pool
from tinkex.server.engines import ray_members, vllm_member
from tinkex.server.members import Member
from tinkex.server.ray_cluster import BridgeProcess, RayCluster, RayOptions
from tinkex.server.ray_pool import RayPool
from tinkex.server.service import Settings
from tinkex.server.suspects import DEATHS_ALLOWED

from .test_pool import SPEC, STEP, died, home, request, until
from .test_vllm import drawn_by_stand_in, vllm_pids
from .test_vllm import python as python  # a fixture
from .test_worker import TINY, PausedClock, run


class Handle:
    """An actor that is an object of this process."""

    def __init__(self, name: str, node: str, actor: EngineActor) -> None:
        self.name, self.node, self.actor = name, node, actor
        self.dead = False
        self.facts: dict[str, str] = {}
        self.full = False
        self.deaf = False
        #: What a `push` raises that nobody expects.
        self.odd: Exception | None = None
        #: Whether it could remove its files before it was killed.
        self.ended = False

    def send(self, method: str, *args: object) -> None:
        self.ask(method, *args)

    def ask(self, method: str, *args: object, timeout: float | None = None) -> Any:
        if self.full and method == "push":
            raise StoreFullError("no room in the object store")
        if self.odd is not None and method == "push":
            raise self.odd
        answer = None
        self.ended |= method == "end" and not self.dead
        if not self.dead and not (self.deaf and method == "push"):
            answer = getattr(self.actor, method)(*args)
        if self.dead:
            raise ActorLostError("the actor is dead")
        return replace(answer, **self.facts) if isinstance(answer, HostFacts) else answer


@dataclass
class ThreadActors:
    """A cluster of nodes that exist only in name."""

    totals: dict[str, dict[str, float]]
    placed: list[Handle] = field(default_factory=list)
    #: Facts that differ on a node, such as the version of a package.
    different: dict[str, dict[str, str]] = field(default_factory=dict)
    reachable: bool = True
    #: Set while the head of the cluster is lost: who looks for an actor waits.
    lost_head: threading.Event = field(default_factory=threading.Event)
    found_head: threading.Event = field(default_factory=threading.Event)
    placing: threading.Lock = field(default_factory=threading.Lock)

    def connect(self) -> None:
        if not self.reachable:
            raise ConfigError("nothing answers", field="ray")

    def nodes(self) -> list[NodeView]:
        return [
            NodeView(name, name, total, self._free(name, total))
            for name, total in list(self.totals.items())
        ]

    def _free(self, name: str, total: Mapping[str, float]) -> dict[str, float]:
        used = sum(each.node == name and not each.dead for each in self.placed)
        return {kind: amount - used for kind, amount in total.items()}

    def place(
        self, name: str, resources: Mapping[str, float], avoid: Collection[str] = ()
    ) -> ActorHandle:
        with self.placing:
            suited = [node for node in self.nodes() if node.name not in avoid]
            free = [node.name for node in suited if fits([node], resources)]
            if not free:  # another engine was faster; on Ray the actor would not start in time
                raise ActorSilentError("no node has room")
            node = free[0]
            made = Handle(name, node, EngineActor(name, OnNode(self, node)))
            made.facts = self.different.get(node, {})
            self.placed.append(made)
        return made

    def here(self) -> str:
        raise NotImplementedError

    def find(self, name: str) -> Handle:
        if self.lost_head.is_set():
            self.found_head.wait()
        for each in self.placed:
            if each.name == name and not each.dead:
                return each
        raise ActorLostError(f"there is no {name}")

    def kill(self, actor: ActorHandle) -> None:
        assert isinstance(actor, Handle)
        actor.dead = True
        actor.actor.end()

    def close(self) -> None:
        for each in self.placed:
            self.kill(each)

    def lose_node(self, name: str) -> None:
        del self.totals[name]
        for each in self.placed:
            if each.node == name:
                self.kill(each)


class OnNode(ThreadActors):
    """The cluster as an actor sees it."""

    def __init__(self, whole: ThreadActors, node: str) -> None:
        super().__init__(whole.totals, whole.placed)
        self._node = node

    def here(self) -> str:
        return self._node


def cluster_of(actors: ThreadActors, options: RayOptions) -> RayCluster:
    def start(_: str) -> BridgeProcess:
        ours, theirs = socketpair()

        def bridge() -> None:
            with theirs:
                Bridge(theirs, lambda _: actors).run()

        thread = threading.Thread(target=bridge, daemon=True)
        thread.start()
        return BridgeProcess(ours, lambda: None, thread.join)

    return RayCluster(options, start)


@asynccontextmanager
async def on_cluster(
    actors: ThreadActors,
    cache_dir: Path,
    count: Any = "auto",
    base_models: Sequence[str] = (TINY,),
    deadline: float = 60.0,
    vllm: Path | None = None,
    on_demand: bool = False,
    **options: Any,
) -> AsyncIterator[RayPool]:
    cluster = cluster_of(actors, RayOptions("stand-in", **options))
    setup = Setup(base_models, cache_dir, "fake", "cpu", "float32")
    make = ray_members(setup, cluster, samples=vllm is None, deadline=deadline)
    beside = [] if vllm is None else [vllm_member(setup, vllm, deadline=deadline)]
    pool = RayPool(cluster, make, count, beside=beside, on_demand=on_demand)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()


def nodes(*names: str, **resources: float) -> ThreadActors:
    return ThreadActors({name: {"CPU": 1.0, **resources} for name in names})


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, cache_dir):
    """Actors use the cache of the machine they are on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))


def test_engines_fill_the_cluster_and_report_their_nodes(cache_dir):
    async def main():
        async with on_cluster(nodes("a", "b"), cache_dir) as pool:
            assert {(each.node, each.up) for each in pool.status()} == {("a", True), ("b", True)}
            assert all(each.memory for each in pool.status())
            assert pool.check_health() == "idle"
            await pool.trainer.create_model("m", TINY, SPEC)
            result = await pool.trainer.run_pass("m", request())
            assert len(result.logprobs) == 2
            await pool.trainer.optim_step("m", STEP)

    run(main())


def test_checkpoints_travel_as_bytes_in_both_directions(cache_dir, tmp_path):
    async def main():
        actors = nodes("a", "b")
        async with on_cluster(actors, cache_dir) as pool:
            await pool.trainer.create_model("m", TINY, SPEC)
            await pool.trainer.run_pass("m", request())
            await pool.trainer.optim_step("m", STEP)
            size = await pool.trainer.save_state("m", tmp_path / "saved", optimizer=True)
            assert size == sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
            assert await pool.trainer.snapshot("m", tmp_path / "snapshot")
            await pool.trainer.restore_model("n", TINY, tmp_path / "saved", optimizer=True)
            await pool.trainer.restore_snapshot("o", TINY, tmp_path / "snapshot")
            losses = [
                (await pool.trainer.run_pass(name, request())).metrics["loss:sum"] for name in "mno"
            ]
            assert losses[0] == losses[1] == losses[2]
            await pool.sampler.open_sampler("s", TINY, tmp_path / "saved")
            drawn = await pool.sampler.sample(SampleJob("s", np.arange(3), max_tokens=4, seed=1))
            assert len(drawn.tokens[0]) == 4
            with pytest.raises(Exception, match="there is no such checkpoint"):
                await pool.trainer.restore_model("p", TINY, tmp_path / "gone", optimizer=True)
            left = {
                file.name
                for each in actors.placed
                for file in each.actor._memory.directory.iterdir()
            }
            assert left == {".lock"}

    run(main())


def test_streamed_tokens_and_cancelled_samples(cache_dir):
    async def main():
        async with on_cluster(nodes("a"), cache_dir) as pool:
            await pool.sampler.open_sampler("s", TINY, None)
            tokens: list[StreamedToken] = []
            job = SampleJob("s", np.arange(3), max_tokens=5, seed=1, stream=True)
            result = await pool.sampler.sample(job, tokens.append)
            assert [each.token for each in tokens] == result.tokens[0].tolist()
            long = SampleJob("s", np.arange(3), max_tokens=2000, stop_tokens=())
            sampling = asyncio.create_task(pool.sampler.sample(long))
            await asyncio.sleep(0)
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            await pool.sampler.sample(job)

    run(main())


def test_a_node_that_joins_is_used_and_a_lost_one_leaves(cache_dir, monkeypatch):
    monkeypatch.setattr(ray_pool, "LOOKING", 0.01)
    monkeypatch.setattr(ray_pool, "_LEAVING", 0.05)

    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            actors.totals["b"] = {"CPU": 1.0}
            await until(lambda: len(pool.status()) == 2)
            assert {each.node for each in pool.status()} == {"a", "b"}
            actors.lose_node("a")
            await died(lease)
            await pool.trainer.create_model("m", TINY, SPEC)
            assert home(pool, "m") == "engine-1"
            await until(lambda: len(pool.status()) == 1)
            assert pool.check_health() == "idle"

    run(main())


def test_pool_follows_the_cluster_although_one_look_failed(cache_dir, monkeypatch, caplog):
    monkeypatch.setattr(ray_pool, "LOOKING", 0.01)

    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            look = pool._cluster.look

            async def broken():
                monkeypatch.setattr(pool._cluster, "look", look)
                raise RuntimeError("odd")

            monkeypatch.setattr(pool._cluster, "look", broken)
            await until(lambda: "could not follow the cluster" in caplog.text)
            actors.totals["b"] = {"CPU": 1.0}
            await until(lambda: len(pool.status()) == 2)

    run(main())


def test_engine_that_comes_back_while_another_one_is_let_go_stays(monkeypatch):
    monkeypatch.setattr(ray_pool, "_LEAVING", 0.0)

    async def main():
        cluster = cluster_of(nodes("a"), RayOptions("stand-in"))
        pool = RayPool(cluster, lambda *_: None, "auto")  # type: ignore[arg-type]

        async def stop():
            engines["back"].up = True

        engines: dict[str, Any] = {
            name: SimpleNamespace(name=name, up=name == "good", stop=stop, trouble="")
            for name in ("gone", "back", "good")
        }
        gone, back, good = (Member(engine) for engine in engines.values())
        for each in (gone, back, good):
            pool.members.add(each)
        pool._down_since = {gone: -1.0, back: -1.0}
        await pool._let_go([gone, back])
        assert list(pool.members) == [back, good]

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_actor_is_let_go_if_the_bridge_fails_to_send_it_a_call(cache_dir):
    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            actors.placed[0].odd = RuntimeError("nobody expects this")
            with pytest.raises(EngineDiedError):
                await pool.trainer.run_pass("m", request())
            await died(lease)
            await until(lambda: len(actors.placed) == 2)  # the node has room again
            assert actors.placed[0].dead

    run(main())


def test_bridge_answers_while_it_looks_for_an_actor_in_vain(cache_dir):
    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            actors.lost_head.set()
            place = ParcelPlace(actors.placed[0].name, "sum")
            actors.placed[0].actor._depot.put("sum", b"numbers")
            try:
                pool._cluster.drop(Parcel("sum", 7, place))
                await asyncio.sleep(0)  # the request to forget it is sent first
                assert await asyncio.wait_for(pool._cluster.look(), 60)
            finally:
                actors.lost_head.clear()
                actors.found_head.set()
            await until(lambda: actors.placed[0].actor._depot.kept("sum") is None)

    run(main())


def test_actors_remove_their_files_before_they_are_killed(cache_dir):
    async def main():
        actors = nodes("a", "b")
        async with on_cluster(actors, cache_dir):
            kept = [each.actor._memory.directory for each in actors.placed]
            assert all(directory.exists() for directory in kept)
        await until(lambda: all(each.dead for each in actors.placed))
        assert all(each.ended for each in actors.placed)
        assert not any(directory.exists() for directory in kept)

    run(main())


def test_a_request_that_kills_engines_fails_alone(cache_dir):
    async def main():
        actors = nodes("a", "b")
        async with on_cluster(actors, cache_dir) as pool:
            await pool.trainer.create_model("good", TINY, SPEC)
            kept = home(pool, "good")

            async def deadly():
                await pool.trainer.create_model("bad", TINY, SPEC)
                node = {each.name: each.node for each in pool.status()}[home(pool, "bad")]
                for each in actors.placed:
                    if each.node == node and not each.dead:
                        actors.kill(each)
                await pool.trainer.run_pass("bad", request())

            killing = asyncio.create_task(pool.persist(deadly))
            while not killing.done():
                await pool.persist(lambda: pool.trainer.run_pass("good", request()))
            with pytest.raises(RequestFailedError, match=f"died {DEATHS_ALLOWED} times"):
                await killing
            assert {each.name: each.starts for each in pool.status()}[kept] == 1

    run(main())


def test_an_engine_that_makes_no_progress_is_killed(cache_dir):
    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir, deadline=0.5) as pool:
            (member,) = pool.members
            worker, clock = member.engine._worker, PausedClock()
            worker._clock = clock
            await pool.trainer.create_model("m", TINY, SPEC)
            stuck = actors.placed[0]
            stuck.deaf = True  # calls are lost

            async def work():
                await pool.trainer.create_model("m", TINY, SPEC)
                await pool.trainer.run_pass("m", request())

            working = asyncio.create_task(pool.persist(work))
            clock.go_on()
            await worker.died.wait()
            clock.pause()
            await working
            assert stuck.dead
            assert pool.status()[0].starts == 2

    run(main())


async def trained(pool: RayPool, directory: Path) -> None:
    """Open a sampler `s` of weights that an engine has trained and saved."""
    await pool.trainer.create_model("m", TINY, SPEC)
    await pool.trainer.run_pass("m", request())
    await pool.trainer.optim_step("m", STEP)
    await pool.trainer.save_state("m", directory, optimizer=False)
    await pool.sampler.open_sampler("s", TINY, directory, trained_as="m")


def test_vllm_beside_the_cluster_draws_from_adapters_that_its_engines_trained(
    cache_dir, tmp_path, python
):
    async def main():
        async with on_cluster(nodes("a", "b"), cache_dir, vllm=python) as pool:
            assert [(each.name, each.kind) for each in pool.status()] == [
                ("engine-0", "fake"),
                ("engine-1", "fake"),
                ("vllm", "vllm"),
            ]
            await trained(pool, tmp_path / "saved")
            job = SampleJob("s", np.arange(3), max_tokens=4, seed=1)
            expected = drawn_by_stand_in(tmp_path / "saved", range(3), 1, 4)
            assert (await pool.sampler.sample(job)).tokens[0].tolist() == expected
            # What vLLM would give another meaning is drawn by an engine of the cluster.
            own = await pool.sampler.sample(replace(job, topk_prompt_logprobs=2))
            assert own.tokens[0].tolist() != expected
            (pid,) = vllm_pids()
            os.kill(pid, signal.SIGKILL)
            again = await pool.persist(lambda: pool.sampler.sample(job))
            assert again.tokens[0].tolist() == expected
            assert [each.starts for each in pool.status()] == [1, 1, 2]

    run(main())


def test_vllm_stays_when_the_nodes_of_the_cluster_leave(cache_dir, tmp_path, python, monkeypatch):
    monkeypatch.setattr(ray_pool, "LOOKING", 0.01)
    monkeypatch.setattr(ray_pool, "_LEAVING", 0.05)

    async def main():
        actors = nodes("a", "b")
        async with on_cluster(actors, cache_dir, vllm=python) as pool:
            await trained(pool, tmp_path / "saved")
            actors.lose_node("a")
            actors.lose_node("b")
            await until(lambda: len(pool.status()) == 2)
            assert [(each.kind, each.up) for each in pool.status()] == [
                ("fake", False),
                ("vllm", True),
            ]
            with pytest.raises(APIStatusError, match="No engine can serve"):
                pool.check_health()
            job = SampleJob("s", np.arange(3), max_tokens=4, seed=1)
            expected = drawn_by_stand_in(tmp_path / "saved", range(3), 1, 4)
            assert (await pool.sampler.sample(job)).tokens[0].tolist() == expected
            actors.totals["c"] = {"CPU": 1.0}
            await until(lambda: all(each.up for each in pool.status()))
            await pool.trainer.create_model("n", TINY, SPEC)

    run(main())


def test_fewer_engines_than_asked_for_with_vllm_counts_engines_alone(cache_dir, python, caplog):
    async def main():
        async with on_cluster(nodes("a"), cache_dir, 2, vllm=python) as pool:
            await until(lambda: "1 of 2 engines run" in caplog.text)
            names = [each.name for each in pool.status()]
            assert names == ["engine-0", "vllm", "waiting-0"]
            assert [each.starts for each in pool.status()] == [1, 1, 0]

    run(main())


def test_vllm_that_does_not_start_is_said_at_once(cache_dir, tmp_path):
    async def main():
        missing = tmp_path / "python"
        missing.write_text("#!/bin/sh\nexit 1\n")
        missing.chmod(0o755)
        with pytest.raises(ConfigError, match="is no Python"):
            async with on_cluster(nodes("a"), cache_dir, vllm=missing):
                pass

    run(main())


def test_a_sample_that_waits_goes_to_an_engine_that_has_joined_meanwhile(cache_dir):
    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            await pool.sampler.open_sampler("s", TINY, None)
            (old,) = pool.members
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            actors.lose_node("a")
            await died(lease)
            job = SampleJob("s", np.arange(3), max_tokens=4, seed=1)
            waiting = asyncio.create_task(pool.persist(lambda: pool.sampler.sample(job)))
            await asyncio.sleep(0)
            actors.totals["b"] = {"CPU": 1.0}
            pool.members.remove(old)
            await old.engine.stop()
            await pool._join(pool._new())
            assert len((await waiting).tokens[0]) == 4

    run(main())


def test_work_of_a_lost_node_is_done_elsewhere_though_its_engine_never_comes_back(
    cache_dir, monkeypatch
):
    """With a fixed number of engines a lost one stays a member, and waits for room."""
    monkeypatch.setattr(bridge, "PLACEMENT", 0.05)

    async def main():
        actors = nodes("a", "b")
        async with on_cluster(actors, cache_dir, 2) as pool:
            await pool.sampler.open_sampler("s", TINY, None)
            await pool.trainer.create_model("m", TINY, SPEC)
            for each in actors.placed:
                each.deaf = True  # calls are lost, so that all of them are in flight

            async def train():
                if pool.trainer.home("m") is None:
                    await pool.trainer.create_model("m", TINY, SPEC)
                return await pool.trainer.run_pass("m", request())

            job = SampleJob("s", np.arange(3), max_tokens=4, seed=1)
            working = [
                asyncio.create_task(pool.persist(train)),
                *(
                    asyncio.create_task(pool.persist(lambda: pool.sampler.sample(job)))
                    for _ in range(2)
                ),
            ]
            await until(
                lambda: sum(each.engine.check_health() == "working" for each in pool.members) == 2
            )
            for each in actors.placed:
                each.deaf = False
            actors.lose_node("b")
            (there,) = [each for each in actors.placed if each.node == "a"]
            actors.kill(there)  # this engine is started again
            for done in asyncio.as_completed(working):
                await done
            assert sorted(each.up for each in pool.status()) == [False, True]

    run(main())


@pytest.mark.parametrize("known", [False, True], ids=["for the service", "for a model"])
def test_a_base_model_that_a_lost_node_was_loading_is_loaded_elsewhere(
    cache_dir, monkeypatch, known
):
    monkeypatch.setattr(bridge, "PLACEMENT", 0.05)
    twin = str(prepare(parse_spec(TINY), cache_dir).directory)

    async def main():
        actors = nodes("a", "b")
        async with on_cluster(actors, cache_dir, 2, on_demand=True) as pool:
            if known:
                first, _ = pool.members
                await first.engine.catalog.model(twin, "base_model")
                first.load.models += 1  # so that the model goes to the other one

            async def work() -> None:
                if known:
                    await pool.persist(lambda: pool.trainer.create_model("m", twin, SPEC))
                else:
                    await pool.catalog.model(twin, "base_model")

            for each in actors.placed:
                each.deaf = True
            working = asyncio.create_task(work())
            await until(
                lambda: any(each.engine.check_health() == "working" for each in pool.members)
            )
            (busy,) = [each for each in pool.members if each.engine.check_health() == "working"]
            for each in actors.placed:
                each.deaf = False
            actors.lose_node(busy.engine.ready.node)
            await working
            assert sorted(each.up for each in pool.status()) == [False, True]
            assert not busy.up

    run(main())


def test_a_model_moves_through_a_directory_that_a_killed_service_would_not_leave(cache_dir):
    async def main():
        async with on_cluster(nodes("a"), cache_dir) as pool:
            # The next service removes directories whose lock nobody holds.
            assert (pool._scratch.directory / ".lock").exists()
        assert not pool._scratch.directory.exists()

    run(main())


def test_fewer_engines_than_asked_for_serve_until_there_is_room(cache_dir, monkeypatch, caplog):
    monkeypatch.setattr(ray_pool, "LOOKING", 0.01)

    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir, 2) as pool:
            await until(lambda: "1 of 2 engines run" in caplog.text)
            assert "no node has 1 CPU free" in caplog.text
            (placed, waiting) = pool.status()
            assert (placed.up, waiting.up) == (True, False)
            assert "no node has 1 CPU free" in waiting.trouble
            actors.totals["b"] = {"CPU": 1.0}
            await until(lambda: all(each.up for each in pool.status()))
            assert [each.name for each in pool.status()] == ["engine-0", "engine-1"]

    run(main())


def test_an_engine_gets_a_gpu_if_the_cluster_has_any(cache_dir):
    async def main():
        actors = ThreadActors({"a": {"CPU": 4.0}, "b": {"CPU": 4.0, "GPU": 2.0}})
        async with on_cluster(actors, cache_dir) as pool:
            assert [each.node for each in pool.status()] == ["b", "b"]

    run(main())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 2.0}, "no node has 2 GPU; the most is 0"),
        ({"cpus": 3.0}, "no node has 3 CPU; the most is 1"),
    ],
)
def test_start_is_refused_if_no_node_has_the_resources(options, said, cache_dir):
    async def main():
        with pytest.raises(ConfigError, match=said):
            async with on_cluster(nodes("a", "b"), cache_dir, **options):
                pass

    run(main())


def test_a_node_with_another_version_is_refused_and_others_serve(cache_dir, caplog):
    async def main():
        actors = nodes("a", "b")
        actors.different["a"] = {"tinkex": "0.0.1"}
        async with on_cluster(actors, cache_dir) as pool:
            assert [each.node for each in pool.status()] == ["b"]
        assert "on node a: tinkex is 0.0.1" in caplog.text

    run(main())


def test_a_base_model_that_a_node_lacks_is_named_with_the_node(cache_dir, tmp_path):
    async def main():
        with pytest.raises(ConfigError, match=r"on node a: .*there is no directory"):
            async with on_cluster(
                nodes("a"), cache_dir, base_models=(f"mine={tmp_path / 'not here'}",)
            ):
                pass

    run(main())


def test_health_reports_a_cluster_that_cannot_be_reached(cache_dir):
    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            lease = await pool.trainer.create_model("m", TINY, SPEC)
            actors.reachable = False
            bridge = pool._cluster._bridge
            assert bridge is not None
            await pool._cluster.stop()  # as when the bridge ends with the head
            actors.lose_node("a")
            await died(lease)

            def unwell() -> bool:
                try:
                    pool.check_health()
                except APIStatusError as error:
                    return "nothing answers" in str(error)
                return False

            await until(unwell)
            actors.reachable = True
            actors.totals["a"] = {"CPU": 1.0}
            await until(lambda: pool.status()[0].up)
            assert pool.check_health() == "idle"

    run(main())


def test_no_room_in_the_object_store_fails_the_call_alone(cache_dir):
    async def main():
        actors = nodes("a")
        async with on_cluster(actors, cache_dir) as pool:
            await pool.trainer.create_model("m", TINY, SPEC)
            actors.placed[0].full = True
            with pytest.raises(MemoryError, match="no room in the object store"):
                await pool.trainer.run_pass("m", request())
            actors.placed[0].full = False
            await pool.trainer.run_pass("m", request())

    run(main())


def test_parcels_are_fetched_from_the_engine_that_keeps_them():
    actors = nodes("a", "b")
    first, second = (actors.place(name, {"CPU": 1.0}) for name in ("one", "two"))
    assert isinstance(first, Handle)
    assert isinstance(second, Handle)
    depot, other = first.actor._depot, second.actor._depot
    assert isinstance(depot, ActorDepot)
    parcel = depot.put("sum", b"numbers")
    assert depot.get(parcel) == other.get(parcel) == b"numbers"
    other.drop(parcel)
    for each in (depot, other):
        with pytest.raises(ParcelLostError, match="has dropped"):
            each.get(parcel)
    parcel = depot.put("sum", b"numbers")
    actors.kill(first)
    with pytest.raises(ParcelLostError, match="cannot send"):
        other.get(parcel)
    other.drop(parcel)
    actors.kill(second)


def test_reasons_name_the_missing_resource():
    busy = NodeView("1", "a", {"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 0.0})
    idle = NodeView("2", "b", {"CPU": 4.0}, {"CPU": 4.0})
    assert fits([busy, idle], {"CPU": 2.0}) == 4
    assert lacking([busy, idle], {"CPU": 2.0}) is None
    said = lacking([busy, idle], {"CPU": 1.0, "GPU": 1.0})
    assert said is not None
    assert "no node has 1 GPU free; the most is 0" in said
    assert "a 4 of 4 CPU free, 0 of 1 GPU free" in said
    assert "the cluster has no nodes" in str(lacking([], {"CPU": 1.0}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shared_dir": Path("/")}, "shared_dir: .*--ray"),
        ({"engine_gpus": 1.0}, "engine_gpus: .*--ray"),
        ({"ray": "local"}, "pip install"),
    ],
)
def test_settings_that_do_not_fit(settings, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        Settings(data_dir=tmp_path, **settings)
