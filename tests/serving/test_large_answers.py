"""Large answers: limits over all prompts of a request, and where the answers are written."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..server.test_storage import housed
from .test_openai import TEXT, TINY

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
            made.bodies._threads.shutdown()
            made.bodies._threads = threads = Counting(1)
            body = {"model": TINY, "prompt": "x", "seed": 1, **asked}
            answer = await client.post(f"http://localhost{TEXT}", json=body)
            assert answer.status_code == 200, answer.text
            assert (threads.count > 0) == in_thread

    asyncio.run(scenario())
