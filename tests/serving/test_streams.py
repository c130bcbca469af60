"""Streams that end early: a client that hangs up, an engine that dies, a request that is refused."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tinkex.testing import service

from ..processes import children
from .conftest import Http
from .test_openai import CHAT, HI, TEXT

MESSAGES = "/v1/messages"
#: Options of a request that `endless` answers for minutes.
FOR_MINUTES = {"model": "endless", "max_tokens": 100_000, "temperature": 0}


def in_flight(http) -> int:
    """The number of samples in flight, from the metrics of the service."""
    text = http.client.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("tinkex_samples ")]
    return int(float(line.split()[1]))


@pytest.fixture
def own(endless):
    """A service of one test with a model that does not end by itself, a client, and the process id of its engine."""
    before = children()
    with (
        service("torch", (f"endless={endless}",), engine_in_process=False) as running,
        Http(running.url) as http,
    ):
        (engine,) = children() - before
        yield running, http, engine


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_stream_of_a_dead_engine_ends_with_an_error_event(own, path):
    _, http, engine = own
    with http.client.stream(
        "POST", path, json={**FOR_MINUTES, "messages": HI, "stream": True}
    ) as response:
        lines = response.iter_lines()
        data = [next(lines)]
        os.kill(engine, signal.SIGKILL)
        data = [line for line in [*data, *lines] if line.startswith("data: ")]
    assert "error" in data[-1]
    assert "died" in data[-1] or "engine" in data[-1]
    assert "[DONE]" not in data[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_sample_is_cancelled_when_the_client_hangs_up(own, stream):
    running, http, _ = own
    body = {**FOR_MINUTES, "prompt": "x", "stream": stream}
    if stream:
        with http.client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()  # kept: without its iterator the response is closed
            next(lines)
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
    for _ in range(3_000):  # a minute and more
        if in_flight(http) == 0:
            break
        threading.Event().wait(0.02)
    assert in_flight(http) == 0
