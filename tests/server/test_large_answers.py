"""Large answers: sent in pieces, counted until they are sent, refused while others take all room."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tinkex.errors import RateLimitError
from tinkex.server.app import build_app
from tinkex.server.large_answers import LARGE, PIECE, LargeAnswers
from tinkex.server.service import Service

from .api import PROTO
from .test_samplers import body_of, of_base_model
from .test_storage import housed, told

OWNER = "local"


class Reader:
    """Calls an application; reads one message whenever `read` is set, like a peer with small buffers."""

    def __init__(self, app: Any, path: str, body: object, accept: str = "application/json") -> None:
        self.status, self.content, self.largest = 0, b"", 0
        self.started, self.read = asyncio.Event(), asyncio.Event()
        self._sent = json.dumps(body).encode()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"accept", accept.encode()),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._sent)).encode()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.call = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            body, self._sent = self._sent, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.started.set()
        await self.read.wait()
        part = message.get("body", b"")
        self.largest = max(self.largest, len(part))
        self.content += part

    def hang_up(self) -> None:
        self._gone.set()


async def large_sample(made: Service, client: httpx.AsyncClient) -> dict[str, str]:
    """A finished sample of a megabyte and more as JSON."""
    body = body_of(await of_base_model(client)) | {"num_samples": 50, "topk_sample_logprobs": 100}
    body["sampling_params"] = {"max_tokens": 50, "seed": 1, "stop": [263]}
    promise = (await client.post("asample", json=body)).json()
    asked = {"request_id": promise["request_id"]}
    await made.promises.get(asked["request_id"], OWNER).finished.wait()
    return asked


@pytest.mark.parametrize("accept", ["application/json", PROTO])
def test_a_large_result_is_sent_in_pieces_and_counted_until_it_is_sent(tmp_path, accept):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            asked = await large_sample(made, client)
            budget = made.large_answers.budget
            assert budget.held == 0
            reader = Reader(build_app(made), "/api/v1/retrieve_future", asked, accept)
            await reader.started.wait()
            assert budget.held > LARGE
            held, requests = budget.held, made.quotas.requests.used(OWNER)
            assert requests == 1
            reader.read.set()
            await reader.call
            assert reader.status == 200
            assert len(reader.content) == held
            assert 0 < reader.largest <= PIECE
            assert (budget.held, made.quotas.requests.used(OWNER)) == (0, 0)

    asyncio.run(scenario())


def test_a_result_waits_while_a_slow_reader_takes_all_room_and_stays_retrievable(tmp_path):
    async def scenario() -> None:
        limits = {"max_inflight_bytes_per_key": LARGE, "hold": 0.0}
        async with housed(tmp_path, **limits) as (made, client):
            asked = await large_sample(made, client)
            app = build_app(made)
            slow = Reader(app, "/api/v1/retrieve_future", asked)
            await slow.started.wait()
            held = made.large_answers.budget.held
            refused = await client.post("retrieve_future", json=asked)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after-ms"]) > 0
            assert "max_inflight_bytes_per_key" in refused.text
            assert made.large_answers.budget.held == held
            chat = {"model": "tinkex/tiny", "prompt": "x"}
            refused = await client.post("http://localhost/v1/completions", json=chat)
            assert refused.status_code == 429
            slow.hang_up()
            await slow.call
            assert made.large_answers.budget.held == 0
            assert "sequences" in await told(client, "retrieve_future", asked)

    asyncio.run(scenario())


def test_a_poll_goes_on_when_there_is_room():
    async def scenario() -> None:
        answers = LargeAnswers(per_key=100, total=1000)
        first = await answers.room("ann", 90, 0.0)
        waiting = [asyncio.ensure_future(answers.room("ann", 60, 1e6)) for _ in range(2)]
        other = await answers.room("bob", 100, 0.0)
        answers.release(other)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        answers.release(first)
        second = await waiting[0]
        assert not waiting[1].done()
        answers.release(second)
        answers.release(await waiting[1])
        assert answers.budget.held == 0
        alone = await answers.room("ann", 10_000, 0.0)  # a lone answer of any size is sent
        with pytest.raises(RateLimitError, match="Answers to this key that are being sent"):
            await answers.room("ann", 1, 0.0)
        answers.release(alone)

    asyncio.run(scenario())


def test_a_small_answer_is_not_counted():
    answers = LargeAnswers(per_key=100, total=1000)
    answers.answer("ann", b"x" * (LARGE - 1), "text/plain")
    assert answers.budget.held == 0
    answers.answer("ann", b"x" * LARGE, "text/plain")
    assert answers.budget.held == LARGE
