"""`TrainingClient.log`: reports reach the dashboard in batches, and never disturb training."""

from __future__ import annotations

import asyncio
import logging
import math
import threading

import httpx
import pytest

from tinkex.errors import InvalidInputError
from tinkex.testing import service as running_service
from tinkex.types import LoggedSample, LogResponse

from ..scripted import Answer
from .helpers import new_trainer

LOG = "POST /api/v1/training_runs/s-1:train:0/log"


def test_reports_are_on_the_dashboard_of_a_real_service():
    with running_service("fake") as running:
        training = running.client().create_lora_training_client("tinkex/tiny", rank=4)
        sample = LoggedSample(prompt="2+2", text="4", reward=1.0)
        training.log(1, {"reward": 0.5, "odd": math.nan}, [sample, {"text": "5"}])
        taken = training.log(2, {"reward": 1}).result()
        assert (taken.metrics, taken.samples) == (1, 0)
        run = f"{running.url}/local/runs/{training.model_id}"
        found = httpx.get(f"{run}/metrics", trust_env=False).json()["metrics"]
        assert (found["reward"]["x"], found["reward"]["y"]) == ([1, 2], [0.5, 1.0])
        assert found["odd"]["odd"] == [[1, "NaN", 1]]
        samples = httpx.get(f"{run}/samples", trust_env=False).json()["samples"]
        assert [each["text"] for each in samples] == ["4", "5"]

        async def awaited() -> LogResponse:
            return await training.log(3, {"reward": 2})

        assert asyncio.run(awaited()).metrics == 1


def test_reports_that_wait_for_one_are_sent_together(server, service):
    arrived = threading.Event()
    server.on(LOG, Answer({}, wait_for=arrived), Answer({}))
    training = new_trainer(service())
    futures = [training.log(step, {"a": step}) for step in range(50)]
    server.wait_for(LOG)
    arrived.set()
    assert [future.result().metrics for future in futures] == [1] * 50
    sent = [entry["step"] for request in server.asked(LOG) for entry in request.json["entries"]]
    assert sent == list(range(50))
    assert len(server.asked(LOG)) <= 3


def test_closing_the_client_sends_what_was_logged_before(server, service):
    arrived = threading.Event()
    server.on(LOG, Answer({}, wait_for=arrived), Answer({}))
    client = service()
    training = new_trainer(client)
    futures = [training.log(step, {"a": step}) for step in range(50)]
    server.wait_for(LOG)
    closing = threading.Thread(target=client.close)
    closing.start()
    arrived.set()
    closing.join(20)
    assert [future.result().metrics for future in futures] == [1] * 50
    sent = [entry["step"] for request in server.asked(LOG) for entry in request.json["entries"]]
    assert sent == list(range(50))


@pytest.mark.parametrize("status", [404, 405])
def test_a_service_without_the_call_gets_one_report_and_one_debug_line(
    server, service, caplog, status
):
    server.on(LOG, Answer({"detail": "no"}, status))
    training = new_trainer(service())
    with caplog.at_level(logging.DEBUG, "tinkex"):
        for step in range(5):
            assert training.log(step, {"a": 1}).result() == LogResponse()
    assert len(server.asked(LOG)) == 1
    said = [record for record in caplog.records if "metrics of runs" in record.message]
    assert [record.levelno for record in said] == [logging.DEBUG]


def test_a_refused_report_is_warned_of_once_and_later_ones_are_sent(server, service, caplog):
    server.on(LOG, *[Answer({"detail": "full"}, 422)] * 2, Answer({}))
    training = new_trainer(service())
    assert training.log(1, {"a": 1}).result() == LogResponse()
    assert training.log(2, {"a": 1}).result() == LogResponse()
    assert training.log(3, {"a": 1}).result().metrics == 1
    assert (
        len([record for record in caplog.records if "could not be logged" in record.message]) == 1
    )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((-1,), "step"), ((1, {"a": "x"}), "metrics.a"), ((1, {}, [{"txt": "a"}]), "txt")],
)
def test_bad_values_are_refused_before_anything_is_sent(server, service, arguments, field):
    training = new_trainer(service())
    with pytest.raises(InvalidInputError, match=field):
        training.log(*arguments)
    assert server.asked(LOG) == []
