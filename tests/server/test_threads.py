"""Whose work waits for whose: threads have turns by key, and what keeps engines running waits for nobody."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkex.server.threads import KeyThreads, in_new_thread

from .test_storage import housed, new_model, told

ONE = {
    "data": [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [6], "dtype": "int64", "shape": [1]}},
        }
    ],
    "loss_fn": "cross_entropy",
}


@pytest.fixture
def threads():
    threads = KeyThreads(2, "tinkex-test")
    yield threads
    threads.close()


def test_work_of_a_key_waits_for_its_own_and_not_for_that_of_others(threads):
    async def scenario() -> None:
        go_on = threading.Event()
        anns = [asyncio.ensure_future(threads("ann", go_on.wait)) for _ in range(20)]
        assert await threads("bob", lambda: "done") == "done"
        assert not any(task.done() for task in anns)
        go_on.set()
        assert all(await asyncio.gather(*anns))

    asyncio.run(scenario())


def test_key_that_stops_waiting_keeps_its_turn_until_its_thread_is_free(threads):
    async def scenario() -> None:
        begun, go_on, order = threading.Event(), threading.Event(), []

        def slow() -> None:
            begun.set()
            go_on.wait()
            order.append("slow")

        leaving = asyncio.ensure_future(threads("ann", slow))
        await in_new_thread(begun.wait)
        leaving.cancel()
        await asyncio.wait([leaving])
        after = asyncio.ensure_future(threads("ann", order.append, "next"))
        assert await threads("bob", lambda: "done") == "done"
        go_on.set()
        await after
        assert order == ["slow", "next"]

    asyncio.run(scenario())


def test_error_of_the_work_is_the_callers_and_ends_its_turn(threads):
    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await threads("ann", lambda: 1 // 0)
        assert await threads("ann", lambda: "done") == "done"

    asyncio.run(scenario())


def test_service_needs_none_of_the_threads_that_everybody_shares(tmp_path):
    """All calls that work in a thread, while asyncio's own are busy for ever."""

    async def scenario() -> None:
        busy = threading.Event()
        shared = ThreadPoolExecutor(1)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(shared)
        loop.run_in_executor(None, busy.wait)
        try:
            async with housed(tmp_path, engines=2) as (made, client):
                model = await new_model(client)
                passing = {"model_id": model, "seq_id": 1, "forward_backward_input": ONE}
                assert "metrics" in await told(client, "forward_backward", passing)
                sample = {"tokens": [5, 6], "alternatives": [[[5, -1.0]], []]}
                entry = {"step": 1, "metrics": {"loss": 1.0}, "samples": [sample]}
                await told(client, f"training_runs/{model}/log", {"entries": [entry]})
                saving = {"model_id": model, "seq_id": 2, "path": "a"}
                path = (await told(client, "save_weights_for_sampler", saving))["path"]
                asked = {"model": path, "prompt": "a", "max_tokens": 1}
                assert (
                    await client.post("http://localhost/v1/completions", json=asked)
                ).status_code == 200
                for route, text in (
                    ("http://localhost/v1/completions", {"prompt": "x" * 9_000}),
                    (
                        "http://localhost/v1/messages",
                        {"messages": [{"role": "user", "content": "x" * 17_000}]},
                    ),
                ):
                    body = {"model": "tinkex/tiny", "max_tokens": 1, **text}
                    answer = await client.post(route, json=body)
                    assert "context" in answer.text  # it was read as tokens, and they are too many
                run = f"http://localhost/local/runs/{model}"
                reads = ("", "/metrics", "/samples", "/sample_steps", "/samples/0")
                for read in (
                    "http://localhost/local/runs",
                    "http://localhost/local/service",
                    *(f"{run}{part}" for part in reads),
                ):
                    assert (await client.get(read)).status_code == 200, read
                for member in made.engine.members:
                    member.engine._worker._writer.close()  # the engine ends
                passing["seq_id"] = 3
                assert "metrics" in await told(client, "forward_backward", passing)
        finally:
            busy.set()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_reads_of_a_key_delay_neither_those_of_another_nor_sampling(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            go_on = threading.Event()
            reads = [asyncio.ensure_future(made.reading("ann", go_on.wait)) for _ in range(60)]
            assert (await client.get("http://localhost/local/runs")).json()["total"] == 1
            saving = {"model_id": model, "seq_id": 1, "path": "a"}
            path = (await told(client, "save_weights_for_sampler", saving))["path"]
            asked = {"model": path, "prompt": "a", "max_tokens": 1}
            assert (
                await client.post("http://localhost/v1/completions", json=asked)
            ).status_code == 200
            assert not any(read.done() for read in reads)
            go_on.set()
            await asyncio.gather(*reads)

    asyncio.run(scenario())
