"""Streams that end early: a client that hangs up, an engine that dies, a request that is refused."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tinkex.testing import service

from .conftest import Http
from .test_openai import CHAT, HI, TEXT, TINY

MESSAGES = "/v1/messages"


def in_flight(http) -> int:
    """The number of samples that the service is drawing, as its metrics tell."""
    text = http.client.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("tinkex_samples ")]
    return int(float(line.split()[1]))


@pytest.fixture
def own():
    """A service of one test, with a model that never ends by itself."""
    with service("torch", engine_in_process=False) as running, Http(running.url) as http:
        yield running, http


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_stream_of_a_dead_engine_ends_with_an_error_event(own, path):
    _, http = own
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    engine = max(int(pid) for file in children for pid in file.read_text().split())
    # Greedy: the model repeats itself and never draws its end token.
    body = {"model": TINY, "messages": HI, "max_tokens": 2000, "stream": True, "temperature": 0}
    lines = []
    with http.client.stream("POST", path, json=body) as response:
        for number, line in enumerate(response.iter_lines()):
            lines.append(line)
            if number == 6:
                os.kill(engine, signal.SIGKILL)
    data = [line for line in lines if line.startswith("data: ")]
    assert "error" in data[-1]
    assert "died" in data[-1] or "engine" in data[-1]
    assert "[DONE]" not in data[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_sample_is_cancelled_when_the_client_hangs_up(own, stream):
    running, http = own
    body = {
        "model": TINY,
        "prompt": "x",
        "max_tokens": 2000,
        "n": 64,
        "stream": stream,
        "logit_bias": {"257": -100, "260": -100},
    }
    if stream:
        with http.client.stream("POST", TEXT, json=body) as response:
            next(response.iter_lines())
            assert in_flight(http) == 1
    else:

        def ask():
            with Http(running.url) as other:
                other.client.timeout = 0.3
                with pytest.raises(Exception, match="timed out"):
                    other.post(TEXT, **body)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    for _ in range(200):
        if in_flight(http) == 0:
            break
        threading.Event().wait(0.02)
    assert in_flight(http) == 0
