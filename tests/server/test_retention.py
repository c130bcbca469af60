"""How long results are kept, and in which order they are evicted."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from tinkex.server.quotas import KeyLimits

from .test_storage import full, housed, new_model, told

STEP = {"adam_params": {"learning_rate": 0.1}}


async def drawn(client: httpx.AsyncClient, count: int) -> list[dict[str, str]]:
    """Finished samples that no client has fetched."""
    session = await told(client, "create_session", {"tags": [], "sdk_version": "0"})
    body = {
        "session_id": session["session_id"],
        "sampling_session_seq_id": 0,
        "base_model": "tinkex/tiny",
    }
    sampler = await told(client, "create_sampling_session", body)
    promises = []
    for number in range(count):
        request = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 1},
        }
        answer = await client.post("asample", json=request)
        promises.append({"request_id": answer.json()["request_id"]})
    return promises


async def asked(client: httpx.AsyncClient, promises: list[dict[str, str]]) -> list[int]:
    answers = [await client.post("retrieve_future", json=each) for each in promises]
    return [answer.status_code for answer in answers]


def test_fetched_results_are_evicted_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with housed(tmp_path, kept_results=5, told_retention=-1.0) as (made, client):
            promises = await drawn(client, 12)
            await asked(client, promises[2:])
            await made.keep_house()
            assert len(made.promises) == 5
            # No unfetched result is evicted; of the others the newest stay.
            assert await asked(client, promises) == [200] * 2 + [410] * 7 + [200] * 3

    asyncio.run(scenario())


def test_under_load_results_are_evicted_continuously(tmp_path: Path) -> None:
    """Memory does not grow until the next periodic cleanup."""
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        async with housed(tmp_path, kept_results=5, now=lambda: moment[0]) as (made, client):
            promises = await drawn(client, 40)
            kept = []
            for promise in promises:
                moment[0] += timedelta(seconds=10)
                # A client that lost the response fetches again, which restarts the retention time.
                assert await asked(client, [promise, promises[0]]) == [200, 200]
                kept.append(len(made.promises))
            # These were fetched two minutes ago: one is evicted for each new fetch.
            assert kept[:13] == [40] * 13
            assert kept[13:] == list(range(39, 12, -1))
            assert await asked(client, promises[1:29]) == [410] * 27 + [200]

    asyncio.run(scenario())


def test_above_its_limit_fetched_results_are_evicted_before_abandoned_ones(
    tmp_path: Path,
) -> None:
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            promises = await drawn(client, 12)
            for promise in made.promises:
                await promise.finished.wait()
        # A lower limit after a restart: there are more results than allowed.
        limits = KeyLimits(results=5)
        async with housed(tmp_path, limits=limits, now=lambda: moment[0]) as (made, client):
            for promise in made.promises:
                moment[0] = max(moment[0], datetime.fromtimestamp(promise.finished_at, UTC))
            await asked(client, promises[6:9])
            await made.keep_house()
            assert len(made.promises) == 9
            moment[0] += timedelta(minutes=11)
            await made.keep_house()
            assert len(made.promises) == 5
            assert await asked(client, promises) == [410] * 4 + [200] * 2 + [410] * 3 + [200] * 3

    asyncio.run(scenario())


def test_all_times_come_from_the_service_clock(tmp_path: Path) -> None:
    then = datetime(2020, 2, 2, tzinfo=UTC)

    async def scenario() -> None:
        async with housed(tmp_path, now=lambda: then) as (made, client):
            await asked(client, await drawn(client, 1))
            model = await new_model(client)
            await made.keep_house()
            run = await made.database(made.database.store.run, model)
            sample, created = made.promises
            sampler = await made.samplers.get(sample.scope, "local")
            assert run is not None
            assert {run.created_at, run.last_request_at, sampler.created_at} == {then}
            for moment in (sample.accepted_at, created.started_at, created.finished_at):
                assert moment == then.timestamp()

    asyncio.run(scenario())


def test_an_abandoned_feed_keeps_no_evicted_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with housed(tmp_path, result_retention=-1.0) as (made, client):
            promises = await drawn(client, 3)
            await asked(client, promises)
            sampler = made.promises.get(promises[0]["request_id"], "local").scope
            feed = await made.samplers.feed(sampler, 0, "local")
            assert len(feed.after(0)) == 3
            await made.keep_house()
            assert feed.after(0) == []

    asyncio.run(scenario())


def test_results_needed_for_a_replay_are_never_evicted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with housed(tmp_path, kept_results=0, told_retention=-1.0) as (made, client):
            model = await new_model(client)
            for number in range(1, 6):
                await told(client, "optim_step", {"model_id": model, "seq_id": number, **STEP})
            await made.keep_house()
            assert len(made.promises) == 6

    asyncio.run(scenario())


def test_a_retried_create_model_after_eviction_returns_the_live_model(tmp_path: Path) -> None:
    """The promise of its creation is evicted; the model still lives."""

    async def scenario() -> None:
        settings = {"kept_results": 0, "told_retention": -1.0, "snapshot_every": 0.0}
        async with housed(tmp_path, **settings) as (made, client):
            model_id = await new_model(client)
            (model,) = made.models
            number = 0
            while model.past.snapshot is None:  # written in the background
                number += 1
                await told(client, "optim_step", {"model_id": model_id, "seq_id": number, **STEP})
            await made.keep_house()
            assert made.promises.duplicate(model_id, 0) is None
            changes = model.past.changes
            session, _, seq = model_id.split(":")
            body = {"session_id": session, "model_seq_id": int(seq), "base_model": "tinkex/tiny"}
            with full(os.getpid()):
                assert (await client.post("create_model", json=body)).status_code == 507
            assert await told(client, "create_model", body) == {
                "model_id": model_id,
                "type": "create_model",
            }
            assert list(made.models) == [model]
        async with housed(tmp_path) as (made, client):
            (model,) = made.models
            assert model.past.changes == changes
            body = {"model_id": model_id, "seq_id": number + 1, **STEP}
            assert "metrics" in await told(client, "optim_step", body)

    asyncio.run(scenario())


def test_an_unloaded_model_is_not_recreated_by_a_late_retry(tmp_path: Path) -> None:
    """All of its promises are evicted, but the service still knows that it existed."""

    async def scenario() -> None:
        async with housed(tmp_path, result_retention=-1.0) as (made, client):
            model_id = await new_model(client)
            await told(client, "unload_model", {"model_id": model_id})
            await made.keep_house()
            assert len(made.promises) == 0
            session, _, seq = model_id.split(":")
            body = {"session_id": session, "model_seq_id": int(seq), "base_model": "tinkex/tiny"}
            refused = await client.post("create_model", json=body)
            assert (refused.status_code, refused.json()["field"]) == (400, "model_seq_id")
            assert "unloaded" in refused.json()["detail"]
            assert list(made.models) == []

    asyncio.run(scenario())
