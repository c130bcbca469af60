"""Large answers: limits over all prompts of a request, requests without a result, and where the answers are written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tinkex.server.quotas import KeyLimits
from tinkex.server.service import Service

from ..server.test_serve import PATIENCE
from ..server.test_storage import housed
from .test_openai import CHAT, HI, TEXT, TINY

LONG = {"prompt": ["x"] * 64, "max_tokens": 2000, "logprobs": 100}
ECHOED = {"prompt": ["x" * 2000] * 64, "max_tokens": 0, "logprobs": 100, "echo": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [LONG, ECHOED], ids=["sampled", "echoed"])
def test_alternatives_of_all_prompts_together_are_limited(http, asked, stream):
    error = http.refused(TEXT, 400, model=TINY, stream=stream, **asked)
    assert error["param"] == "logprobs"
    assert "all prompts" in error["message"]
    assert "max_alternatives" in error["message"]


class Counting(ThreadPoolExecutor):
    """Counts what it runs."""

    count = 0

    def submit(self, *args, **options):
        self.count += 1
        return super().submit(*args, **options)


@pytest.mark.parametrize(
    ("asked", "in_thread"),
    [
        ({"max_tokens": 20}, False),
        ({"max_tokens": 50, "logprobs": 50, "prompt": ["x"] * 10}, True),
        ({"max_tokens": 50, "prompt": ["x"] * 50}, True),
        ({"max_tokens": 1, "prompt": "x" * 1000, "logprobs": 5, "echo": True}, True),
        (
            {"max_tokens": 1, "prompt": "x" * 1000, "logprobs": 5, "echo": True, "stream": True},
            True,
        ),
    ],
)
def test_large_answers_are_written_in_a_thread(tmp_path, asked, in_thread):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            made.bodies.in_thread.close()
            made.bodies.in_thread._threads = threads = Counting(1)
            body = {"model": TINY, "prompt": "x", "seed": 1, **asked}
            answer = await client.post(f"http://localhost{TEXT}", json=body)
            assert answer.status_code == 200, answer.text
            assert (threads.count > 0) == in_thread

    asyncio.run(scenario())


# -- requests without a result ------------------------------------------------------------------

PATHS: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": ["x", "y"], "n": 2},
    CHAT: {"messages": HI},
    "/v1/messages": {"messages": HI},
}
OWNER = "local"


def posted(client: httpx.AsyncClient, path: str, **body: object) -> asyncio.Task[httpx.Response]:
    body = {"model": TINY, "max_tokens": 2, **body}
    return asyncio.ensure_future(client.post(f"http://localhost{path}", json=body))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - a count is no event
            await asyncio.sleep(0)


def with_pending(tmp_path, pending: int, check: Callable[..., Awaitable[None]]) -> None:
    """Run `check` with a service whose engine is down: nothing that is drawn ends."""

    async def scenario() -> None:
        async with housed(tmp_path, limits=KeyLimits(pending=pending)) as (made, client):
            made.engine._alive.clear()
            await check(made, client)

    asyncio.run(scenario())


def used(made: Service) -> int:
    return made.promises.pending(OWNER)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_draws_count_as_requests_without_a_result_until_they_are_done(tmp_path, path, stream):
    async def check(made: Any, client: httpx.AsyncClient) -> None:
        body = PATHS[path]
        draws = len(body.get("prompt", ("one",)))
        waiting = posted(client, path, stream=stream, **body)
        await until(lambda: used(made) == draws)
        refused = await posted(client, path, stream=stream, **body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after-ms"]) > 0
        assert "--limit pending=" in refused.text
        assert used(made) == draws  # refused as a whole
        made.engine._alive.set()
        assert (await waiting).status_code == 200
        assert used(made) == 0
        assert (await posted(client, path, stream=stream, **body)).status_code == 200

    with_pending(tmp_path, 3 if path == TEXT else 1, check)


SAMPLE = {
    "base_model": TINY,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
    "sampling_params": {"max_tokens": 2},
}
PLAY = {"model": TINY, "prompt": "x", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"), [("/api/v1/stream_sample", SAMPLE), ("/local/playground", PLAY)]
)
def test_streams_count_as_requests_without_a_result(tmp_path, path, body):
    async def check(made: Any, client: httpx.AsyncClient) -> None:
        url = f"http://localhost{path}"
        waiting = asyncio.ensure_future(client.post(url, json=body))
        await until(lambda: used(made) == 1)
        assert (await client.post(url, json=body)).status_code == 429
        waiting.cancel()
        await until(lambda: used(made) == 0)

    with_pending(tmp_path, 1, check)


def test_cancelled_draws_are_no_longer_counted(tmp_path):
    async def check(made: Any, client: httpx.AsyncClient) -> None:
        waiting = posted(client, TEXT, **PATHS[TEXT])
        await until(lambda: used(made) == 2)
        waiting.cancel()
        await until(lambda: used(made) == 0)

    with_pending(tmp_path, 2, check)


def test_failed_draws_are_no_longer_counted(tmp_path):
    async def check(made: Any, client: httpx.AsyncClient) -> None:
        made.engine._alive.set()
        failed = await posted(client, TEXT, prompt=["x", "y"], min_p=0.5)  # not in the fake engine
        assert failed.status_code == 400
        assert used(made) == 0

    with_pending(tmp_path, 2, check)


def test_more_prompts_than_a_key_may_have_in_all_are_not_retried(tmp_path):
    async def check(made: Any, client: httpx.AsyncClient) -> None:
        refused = await posted(client, TEXT, prompt=["x"] * 3)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
        assert "--limit pending=" in refused.text
        assert used(made) == 0

    with_pending(tmp_path, 2, check)
