"""Internals of models: fair shares, creation across a restart, snapshots."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx

from tinkex.server.app import build_app
from tinkex.server.auth import Keys
from tinkex.server.futures import Promise
from tinkex.server.service import Service

from .test_storage import housed, inputs, new_model, told


def test_a_returning_key_shares_the_engine_with_a_busy_one(tmp_path):
    """Regardless of how little it used before, and of how many models it has."""
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")

    async def scenario() -> None:
        async with housed(tmp_path / "data", keys=Keys.from_file(file)) as (made, bob):
            bob.headers["X-API-Key"] = "tml-key-of-bob"
            ann = httpx.AsyncClient(
                transport=httpx.ASGITransport(build_app(made)),
                base_url=bob.base_url,
                headers={"X-API-Key": "tml-key-of-ann"},
            )
            order: list[str] = []
            moment = [0.0]

            def finished(promise: Promise) -> None:
                order.append(promise.owner)
                moment[0] += 1.0  # every request takes a second

            made.promises.on_finish.append(finished)
            made.models._clock = lambda: moment[0]
            models = [(ann, await new_model(ann)) for _ in range(3)]
            models.append((bob, await new_model(bob)))

            async def send(client: httpx.AsyncClient, model: str, number: int) -> dict[str, str]:
                body: dict[str, Any] = {"model_id": model, "seq_id": number}
                body["forward_backward_input"] = inputs()
                answer = (await client.post("forward_backward", json=body)).json()
                return {"request_id": answer["request_id"]}

            for number in range(1, 31):  # ann sends nothing
                await told(bob, "retrieve_future", await send(*models[-1], number))
            order.clear()
            made.engine._alive.clear()
            promised = [
                (client, await send(client, model, number + (30 if client is bob else 0)))
                for number in range(1, 9)
                for client, model in models
            ]
            made.engine._alive.set()
            for client, promise in promised:
                await told(client, "retrieve_future", promise)
            await ann.aclose()
            assert order[:16].count("bob") >= 6

    asyncio.run(scenario())


def test_request_for_a_model_that_is_unloaded_meanwhile_is_refused_alone(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model, other = await new_model(client), await new_model(client)
            check_active = made.sessions.check_active

            async def unload_meanwhile(session_id: str, owner: str) -> None:
                await check_active(session_id, owner)
                await made.models.close_session(session_id)

            made.sessions.check_active = unload_meanwhile
            step = {"seq_id": 1, "adam_params": {}}
            answer = await client.post("optim_step", json={"model_id": model, **step})
            made.sessions.check_active = check_active
            assert answer.status_code == 400
            assert "model_id" in answer.text
            assert "metrics" in await told(client, "optim_step", {"model_id": other, **step})

    asyncio.run(scenario())


def test_model_of_a_session_that_ends_while_it_is_loaded_does_not_stay_in_the_engine(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            opened = await told(client, "create_session", {"tags": [], "sdk_version": "0"})
            session_id = opened["session_id"]
            create, reached, ended = made.engine.create_model, asyncio.Event(), asyncio.Event()

            async def create_later(*args: Any) -> Any:
                reached.set()
                await ended.wait()
                return await create(*args)

            made.engine.create_model = create_later
            body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tinkex/tiny"}
            assert (await client.post("create_model", json=body)).status_code == 200
            await reached.wait()
            await made.models.close_session(session_id)
            ended.set()
            while made.models.running:  # noqa: ASYNC110 - nothing tells that a turn has ended
                await asyncio.sleep(0.01)
            assert made.engine.status()[0].models == 0

    asyncio.run(scenario())


def test_creating_a_model_from_a_checkpoint_finishes_after_a_restart(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            save = {"model_id": model, "seq_id": 1, "path": "a"}
            path = (await told(client, "save_weights", save))["path"]
            session = await told(client, "create_session", {"tags": [], "sdk_version": "0"})
            reached = asyncio.Event()

            async def stops(*_: Any, **__: Any) -> None:
                reached.set()
                await asyncio.Event().wait()

            made.engine.trainer.restore_model = stops
            body = {"session_id": session["session_id"], "model_seq_id": 0, "path": path}
            answer = (await client.post("load_weights", json=body)).json()
            await reached.wait()
        async with housed(tmp_path) as (_, client):
            promise = {"request_id": answer["request_id"]}
            loaded = await told(client, "retrieve_future", promise)
            assert loaded["model_id"] == f"{session['session_id']}:train:0"
            step = {"model_id": loaded["model_id"], "seq_id": 1, "adam_params": {}}
            assert "metrics" in await told(client, "optim_step", step)

    asyncio.run(scenario())


INPUTS = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
            "loss_fn_inputs": {"target_tokens": {"data": [6, 7], "dtype": "int64", "shape": [2]}},
        }
    ],
    "loss_fn": "cross_entropy",
}


async def passed(
    made: Service, client: httpx.AsyncClient, model: str, number: int, part: str = ""
) -> None:
    """Run a pass, or one request of a pass, and the snapshot that may follow."""
    body = {"model_id": model, "seq_id": number, "forward_backward_input": INPUTS}
    headers = {"x-tinkex-pass": part} if part else {}
    answer = (await client.post("forward_backward", json=body, headers=headers)).json()
    assert "metrics" in await told(client, "retrieve_future", {"request_id": answer["request_id"]})
    await asyncio.gather(*made.models._tasks)


async def outcome(client: httpx.AsyncClient, model: str, number: int) -> object:
    """The result of a step, and the model's output after it."""
    step = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 0.01}}
    stepped = await told(client, "optim_step", step)
    asked = {"model_id": model, "seq_id": number + 1, "forward_input": INPUTS}
    return stepped, await told(client, "forward", asked)


def test_the_journal_of_a_run_that_never_steps_is_bounded(tmp_path):
    """Snapshots contain its gradients, and after a restart training gives the same losses."""

    async def scenario(data_dir: Path, snapshot_every: float) -> tuple[object, int]:
        async with housed(data_dir, snapshot_every=snapshot_every) as (made, client):
            model_id = await new_model(client)
            for number in range(1, 7):
                await passed(made, client, model_id, number)
            [model] = made.models
            kept = len(model.past.history)
        async with housed(data_dir, snapshot_every=1e9) as (_, client):
            return await outcome(client, model_id, 7), kept

    expected, needed = asyncio.run(scenario(tmp_path / "never", 1e9))
    assert needed == 7
    assert asyncio.run(scenario(tmp_path / "always", 0.0)) == (expected, 0)


def test_a_snapshot_waits_for_the_last_request_of_a_pass(tmp_path):
    """A snapshot does not contain an incomplete pass; its requests are in the journal."""

    async def scenario(data_dir: Path, snapshot_every: float) -> tuple[object, list[int]]:
        kept = []
        async with housed(data_dir, snapshot_every=snapshot_every) as (made, client):
            model_id = await new_model(client)
            for number, part in enumerate(("a 1/2", "a 2/2", "b 1/2"), 1):
                await passed(made, client, model_id, number, part)
                [model] = made.models
                kept.append(len(model.past.history))
        async with housed(data_dir, snapshot_every=1e9) as (made, client):
            await passed(made, client, model_id, 4, "b 2/2")
            return await outcome(client, model_id, 5), kept

    expected, _ = asyncio.run(scenario(tmp_path / "never", 1e9))
    told, kept = asyncio.run(scenario(tmp_path / "always", 0.0))
    assert told == expected
    assert kept[1:] == [0, 1]


def test_a_corrupted_run_without_its_journal_counts_towards_the_limit_of_models(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model_id = await new_model(client)
            await made.database(made.database.store.update_run, model_id, corrupted=True)
            [model] = made.models
        shutil.rmtree(tmp_path / "journal")
        async with housed(tmp_path) as (made, client):
            [model] = made.models
            assert model.corrupted
            assert made.models._quota.used(model.owner) == 1
            session = model_id.partition(":")[0]
            await told(client, f"sessions/{session}/finish", {"reason": {"type": "success"}})
            assert made.models._quota.used(model.owner) == 0

    asyncio.run(scenario())
