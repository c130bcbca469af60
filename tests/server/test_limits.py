"""Limits of requests, and the errors beyond them.

`test_api_errors` covers bodies, sequences and samples that are too large; these tests need two keys or internals.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import httpx
import pytest

from tinkex._wire.operations import OPERATIONS
from tinkex.server.auth import Keys
from tinkex.server.quotas import KeyLimits
from tinkex.server.scheduling import GAP_LIMIT
from tinkex.testing import service

from .api import PROTO, TINY, Api, datum, training_request
from .test_storage import housed, inputs, new_model

CONTEXT = 2048  # of the tiny model


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    with service(
        "fake", keys=Keys.from_file(file), limits=KeyLimits(pending=3), max_samples=4
    ) as started:
        yield started


@pytest.mark.heavy
def test_many_waiting_samples_of_a_key_do_not_delay_other_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    with (
        service("torch", keys=Keys.from_file(file)) as started,
        Api(started.url, "tml-key-of-ann") as ann,
        Api(started.url, "tml-key-of-bob") as bob,
    ):
        many, one = ann.sampler(), bob.sampler()
        for _ in range(4):
            many.send(num_samples=100, max_tokens=200)  # more than the engine runs at a time
        one.sample(max_tokens=1)
        page = bob.http.get("/metrics").text
        (waiting,) = re.findall(r"^tinkex_samples (\S+)$", page, re.MULTILINE)
        assert float(waiting) >= 3


def test_the_pending_limit_applies_per_key(running):
    with Api(running.url, "tml-key-of-ann") as ann, Api(running.url, "tml-key-of-bob") as bob:
        model, sampler = ann.model(), ann.sampler()
        session = model.session_id
        for number in (7, 8, 9):  # they wait for earlier numbers
            model.forward_backward(seq_id=number)
        bodies = {
            "forward": {"model_id": model.model_id, "seq_id": 6, "forward_input": inputs()},
            "forward_backward": {
                "model_id": model.model_id,
                "seq_id": 6,
                "forward_backward_input": inputs(),
            },
            "optim_step": {"model_id": model.model_id, "seq_id": 6, "adam_params": {}},
            "save_weights": {"model_id": model.model_id, "seq_id": 6, "path": "a"},
            "save_weights_for_sampler": {"model_id": model.model_id, "seq_id": 6, "path": "a"},
            "save_weights_external": {"model_id": model.model_id, "seq_id": 6, "path": "a"},
            "load_weights": {
                "model_id": model.model_id,
                "seq_id": 6,
                "path": f"tinker://{model.model_id}/weights/a",
            },
            "unload_model": {"model_id": model.model_id},
            "create_model": {"session_id": session, "model_seq_id": 1, "base_model": TINY},
            "create_custom_loss": {
                "session_id": session,
                "custom_loss_seq_id": 0,
                "name": "loss",
                "inputs": [{"name": "logprobs", "rank": 1}],
                "graph": {
                    "nodes": [
                        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
                        {"op": "output", "name": "o", "target": "o", "args": [{"ref": "logprobs"}]},
                    ]
                },
            },
            "asample": sampler.request(),
            "stream_sample": sampler.request(),
        }
        queued = {row.name for row in OPERATIONS.values() if row.queued}
        assert bodies.keys() == queued | {"stream_sample"}
        for name, body in bodies.items():
            refused = ann.post(name, body)
            assert refused.status_code == 429, (name, refused.text)
            assert "--limit pending=" in refused.json()["detail"]
            assert int(refused.headers["retry-after-ms"]) > 0
        again = ann.post("forward_backward", {**bodies["forward_backward"], "seq_id": 7})
        assert again.status_code == 200  # it is already accepted
        assert bob.model().step() > 0
        assert bob.sampler().tokens()


@pytest.mark.parametrize("length", [CONTEXT + 1, 100_000])
def test_sequences_beyond_the_context_are_refused(running, length):
    with Api(running.url, "tml-key-of-bob") as bob:
        model, sampler = bob.model(), bob.sampler()
        tokens = [5] * length
        failed = bob.retrieve(model.forward_backward([datum(tokens, tokens)]))
        assert failed["category"] == "user"
        assert str(CONTEXT) in failed["error"]
        failed = sampler.sample(prompt=tokens)
        assert failed["category"] == "user"
        assert str(CONTEXT) in failed["error"]


def test_too_many_samples_in_one_request_are_refused(running):
    with Api(running.url, "tml-key-of-bob") as bob:
        sampler = bob.sampler()
        for operation in ("asample", "stream_sample"):
            refused = bob.post(operation, sampler.request(num_samples=5))
            assert refused.status_code == 400
            assert "at most 4" in refused.json()["detail"]
        assert len(sampler.tokens(num_samples=4)) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_numeric_loss_setting_in_protobuf_is_refused(running, value):
    with Api(running.url, "tml-key-of-bob") as bob:
        model = bob.model()
        body = training_request(model.model_id, model.seq(), loss_fn="ppo", config={"beta": value})
        refused = bob.post("forward_backward", body, headers={"content-type": PROTO})
        assert refused.status_code == 422
        assert "loss_fn_config.beta" in refused.json()["detail"]
        assert model.step() > 0  # its number is skipped


async def _line_after(client: httpx.AsyncClient, service, body: bytes, operation: str) -> Any:
    """The queue of a model that waits for a missing number after a body was refused."""
    model_id = await new_model(client)
    refused = await client.post(
        operation, content=body, headers={"content-type": "application/json"}
    )
    assert refused.status_code == 413
    waiting = {"model_id": model_id, "seq_id": 2, "forward_backward_input": inputs()}
    assert (await client.post("forward_backward", json=waiting)).status_code == 200
    (line,) = (model.line for model in service.models if model.model_id == model_id)
    return line


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step", "asample"])
def test_a_body_too_large_to_read_skips_no_number(tmp_path, operation):
    """It may belong to another model, whose slow chunk must not be skipped."""

    async def scenario() -> None:
        async with housed(tmp_path, max_body_bytes=10_000) as (made, client):
            line = await _line_after(client, made, b" " * 10_001, operation)
            assert line.wakes_at(0.0) == line._gap_since + GAP_LIMIT

    asyncio.run(scenario())
