"""Internals of samplers: limits, expiry, end of session, and death of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from tinkex.engine.interface import EngineDiedError
from tinkex.engine.values import SampledResult, SampleJob
from tinkex.errors import RequestFailedError
from tinkex.server.futures import Promises
from tinkex.server.quotas import KeyLimits
from tinkex.server.service import Service
from tinkex.types import FinishSessionRequest, ModelInput, SampleRequest, SamplingParams

from .test_storage import housed, new_model, on_disk, told, told_failure

OWNER = "local"
FINISH = {"reason": {"type": "success"}}


async def unnamed(client: httpx.AsyncClient, model: str, number: int, **fields: Any) -> str:
    body = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number, **fields}
    return (await told(client, "save_weights_for_sampler", body))["sampling_session_id"]


async def of_base_model(client: httpx.AsyncClient) -> str:
    session = (await told(client, "create_session", {"tags": [], "sdk_version": "0"}))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinkex/tiny"}
    return (await told(client, "create_sampling_session", body))["sampling_session_id"]


def body_of(sampler: str) -> dict[str, Any]:
    return {
        "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": []},
        "sampling_session_id": sampler,
    }


async def sent(client: httpx.AsyncClient, sampler: str) -> dict[str, str]:
    answer = await client.post("asample", json=body_of(sampler))
    assert answer.status_code == 200, answer.text
    promise: dict[str, str] = {"request_id": answer.json()["request_id"]}
    return promise


def request_of(sampler: str) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints([5, 6, 7]),
        sampling_params=SamplingParams(max_tokens=4, seed=1, stop=[]),
        sampling_session_id=sampler,
    )


# -- limits and expiry -------------------------------------------------------------------------


def test_unnamed_samplers_are_closed_in_the_engine_like_others(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            made.samplers._open_limit, made.samplers._open_bytes = 2, 0
            closed = []
            close_sampler = made.engine.sampler.close_sampler

            async def heard(sampler_id: str) -> None:
                closed.append(sampler_id)
                await close_sampler(sampler_id)

            made.engine.sampler.close_sampler = heard
            model = await new_model(client)
            samplers = [await unnamed(client, model, number) for number in range(4)]
            assert closed == samplers[:2]
            assert "sequences" in await told(client, "asample", body_of(samplers[0]))
            assert closed == samplers[:3]

    asyncio.run(scenario())


def test_an_unnamed_sampler_expires(tmp_path):
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        async with housed(tmp_path, now=lambda: moment[0]) as (made, client):
            model = await new_model(client)
            sampler = await unnamed(client, model, 0, ttl_seconds=3600)
            stays = await unnamed(client, model, 1)
            both = on_disk(tmp_path / "samplers")
            await told(client, "asample", body_of(sampler))
            moment[0] += timedelta(hours=1)
            refused = await client.post("asample", json=body_of(sampler))
            assert refused.status_code == 404
            assert "has expired" in refused.text
            await made.samplers.delete_expired()
            assert 0 < on_disk(tmp_path / "samplers") < both
            assert (await client.get(f"samplers/{sampler}")).status_code == 404
            assert "sequences" in await told(client, "asample", body_of(stays))

    asyncio.run(scenario())


def test_what_a_killed_engine_left_of_a_sampler_is_removed_later(tmp_path, monkeypatch):
    async def main():
        async with housed(tmp_path) as (made, _):
            left = tmp_path / "samplers" / ".0123"
            left.mkdir(parents=True)
            await made.samplers.delete_expired()
            assert left.exists()  # an engine may still be writing it
            monkeypatch.setattr("tinkex.server.samplers._WRITING", 0.0)
            await made.samplers.delete_expired()
            assert not left.exists()

    asyncio.run(main())


def test_adding_an_unnamed_sampler_closes_the_least_recently_used_one(tmp_path):
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        async with housed(tmp_path, now=lambda: moment[0]) as (_, client):
            model = await new_model(client)
            for number in range(5):
                await unnamed(client, model, number, ttl_seconds=3600)
                moment[0] += timedelta(hours=1)
            assert len(list((tmp_path / "samplers").iterdir())) == 1

    asyncio.run(scenario())


def test_a_sampler_with_missing_weights_fails_instead_of_using_the_base_model(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (_, client):
            sampler = await unnamed(client, await new_model(client), 0)
        shutil.rmtree(tmp_path / "samplers")
        async with housed(tmp_path) as (_, client):
            failed = await told_failure(client, await sent(client, sampler))
            assert "weights" in failed["error"]
            assert failed["category"] == "server"

    asyncio.run(scenario())


# -- waiting for any -----------------------------------------------------------------------------


def test_a_poll_for_any_and_a_trace_do_not_go_through_all_promises(tmp_path, monkeypatch):
    async def scenario() -> None:
        async with housed(tmp_path, hold=0.0) as (made, client):
            sampler = await of_base_model(client)
            promise = await sent(client, sampler)
            await made.promises.get(promise["request_id"], OWNER).finished.wait()
            session = sampler.partition(":")[0]
            link = (await client.get(f"sessions/{session}/trace_export")).json()["url"]
            scans = []

            def scanned(promises: Promises) -> Any:
                scans.append(promises)
                return iter(())

            monkeypatch.setattr(Promises, "__iter__", scanned)
            for clone in (-1, 0, 7):
                target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
                heard = await told(client, "retrieve_futures", {"target": target})
                assert len(heard["completions"]) == (clone == -1)  # the request has no number
            assert (await client.get(link)).json()["traceEvents"]
            assert scans == []
            monkeypatch.undo()

    asyncio.run(scenario())


def test_a_trace_counts_as_a_request_of_its_owner(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path, limits=KeyLimits(requests=1)) as (made, client):
            sampler = await of_base_model(client)
            await told(client, "asample", body_of(sampler))
            session = sampler.partition(":")[0]
            link = (await client.get(f"sessions/{session}/trace_export")).json()["url"]
            made.quotas.requests.take(OWNER)
            assert (await client.get(link)).status_code == 429
            made.quotas.requests.release(OWNER)
            assert (await client.get(link)).status_code == 200
            assert made.quotas.requests.used(OWNER) == 0

    asyncio.run(scenario())


# -- the end of a session ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def drawing(made: Any, client: httpx.AsyncClient, sampler: str):
    """A sample and a stream that wait for an engine that is down."""
    made.engine._alive.clear()
    stream, _ = await made.samplers.stream(OWNER, request_of(sampler))
    streaming = asyncio.ensure_future(anext(stream))
    yield await sent(client, sampler), streaming
    made.engine._alive.set()


def test_samples_in_flight_are_cancelled_with_their_session(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            sampler = await of_base_model(client)
            async with drawing(made, client, sampler) as (promise, streaming):
                session = sampler.partition(":")[0]
                await told(client, f"sessions/{session}/finish", FINISH)
                failed = await told_failure(client, promise)
                assert "its session has ended" in failed["error"]
                assert failed["category"] == "user"
                with pytest.raises(RequestFailedError, match="its session has ended"):
                    await streaming
            assert made.samplers.under_way == 0

    asyncio.run(scenario())


def test_samples_of_an_ended_session_are_not_resumed(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            sampler = await of_base_model(client)
            made.engine._alive.clear()
            promise = await sent(client, sampler)
            # The service stops before it has cleaned up after the session.
            request = FinishSessionRequest.model_validate(FINISH)
            await made.sessions.finish(sampler.partition(":")[0], OWNER, request)
        async with housed(tmp_path) as (_, client):
            failed = await told_failure(client, promise)
            assert "has ended" in failed["error"]

    asyncio.run(scenario())


# -- an engine that dies -----------------------------------------------------------------------


class Dying:
    """An engine that dies once: before the first token of a sample, or after the last one and before the result."""

    def __init__(self, made: Service, *, tokens: bool) -> None:
        self._sample, self._tokens, self._died = made.engine.sampler.sample, tokens, False
        made.engine.sampler.sample = self  # type: ignore[method-assign]

    async def __call__(self, job: SampleJob, on_token: Any = None) -> SampledResult:
        if self._died:
            return await self._sample(job, on_token)
        self._died = True
        if self._tokens:
            await self._sample(job, on_token)
        raise EngineDiedError("The engine's process ended.")


async def streamed(made: Service, sampler: str, into: list[int]) -> None:
    chunks, _ = await made.samplers.stream(OWNER, request_of(sampler))
    async for chunk in chunks:
        into += [] if chunk.token_id is None else [chunk.token_id]


def test_a_stream_never_repeats_tokens_when_the_engine_dies(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            sampler = await of_base_model(client)
            whole: list[int] = []
            await streamed(made, sampler, whole)
            assert len(whole) == 4
            Dying(made, tokens=True)
            heard: list[int] = []
            with pytest.raises(RequestFailedError, match="died after 4 tokens"):
                await streamed(made, sampler, heard)
            assert heard == whole
            Dying(made, tokens=False)
            heard.clear()
            await streamed(made, sampler, heard)
            assert heard == whole

    asyncio.run(scenario())


def test_a_sampler_is_reopened_after_an_engine_restart(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            engine = made.engine
            open_sampler = engine.open_sampler

            async def dies(*args: Any, **options: Any) -> Any:
                lease = await open_sampler(*args, **options)
                engine._worker._writer.close()
                await engine._worker.died.wait()
                await engine._alive.wait()
                engine.open_sampler = open_sampler
                return lease

            engine.open_sampler = dies
            sampler = await unnamed(client, model, 0)
            assert [each.starts for each in engine.status()] == [2]
            assert "sequences" in await told(client, "asample", body_of(sampler))

    asyncio.run(scenario())
