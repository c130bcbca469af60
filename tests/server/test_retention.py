"""How long results are kept, and which of them go first when there are many."""

from __future__ import annotations

import asyncio
from pathlib import Path

from .test_storage import housed, new_model, told

STEP = {"adam_params": {"learning_rate": 0.1}}


def test_of_many_results_those_go_that_were_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with housed(tmp_path, kept_results=5, told_retention=-1.0) as (made, client):
            session = await told(client, "create_session", {"tags": [], "sdk_version": "0"})
            body = {
                "session_id": session["session_id"],
                "sampling_session_seq_id": 0,
                "base_model": "tinkex/tiny",
            }
            sampler = await told(client, "create_sampling_session", body)
            promises = []
            for number in range(12):
                request = {
                    "sampling_session_id": sampler["sampling_session_id"],
                    "seq_id": number,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                    "sampling_params": {"max_tokens": 1},
                }
                answer = await client.post("asample", json=request)
                promises.append({"request_id": answer.json()["request_id"]})
            for promise in promises[2:]:
                await told(client, "retrieve_future", promise)
            await made.keep_house()
            assert len(made.promises) == 5
            answers = [await client.post("retrieve_future", json=each) for each in promises]
            # Of those that nobody has asked for none goes; of the others the newest stay.
            assert [each.status_code for each in answers] == [200] * 2 + [410] * 7 + [200] * 3

    asyncio.run(scenario())


def test_what_a_model_needs_stays_however_much_there_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with housed(tmp_path, kept_results=0, told_retention=-1.0) as (made, client):
            model = await new_model(client)
            for number in range(1, 6):
                await told(client, "optim_step", {"model_id": model, "seq_id": number, **STEP})
            await made.keep_house()
            assert len(made.promises) == 6

    asyncio.run(scenario())
