"""Large bodies, and small ones that would expand: refused by the operation's limits, or decoded in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import zstandard

from tinkex._wire.operations import OPERATIONS, Body
from tinkex.server.auth import Keys
from tinkex.server.bodies import OFF_LOOP_BYTES
from tinkex.server.quotas import KeyLimits
from tinkex.testing import service

from .api import JSON, PROTO, Api, datum
from .test_storage import housed

WITH_BODY = [row for row in OPERATIONS.values() if row.body in {Body.JSON, Body.JSON_OR_PROTO}]
ZSTD = {"content-type": JSON, "content-encoding": "zstd"}


@pytest.fixture(scope="module")
def api():
    with service("fake") as running, Api(running.url) as user:
        yield user


def packed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def path_of(row):
    return row.path.removeprefix("/api/v1/").format(
        session_id="s", training_run_id="r", checkpoint_id="weights/c"
    )


@pytest.mark.parametrize("row", WITH_BODY, ids=lambda row: row.name)
def test_every_operation_bounds_its_body_before_and_after_decompression(api, row):
    large = b" " * (row.limits.json + 1)
    body, headers = packed(large), ZSTD
    assert len(body) < 10_000
    for sent, more in ((large, {}), (body, headers)):
        refused = api.ask(row.method, path_of(row), sent, headers=more)
        if row.name == "telemetry":  # clients retry a refused batch for ever
            assert refused.json() == {"status": "accepted"}
            continue
        assert refused.status_code == 413
        for named in (row.name, str(row.limits.json), f"--body-limit {row.name}="):
            assert named in refused.json()["detail"]


def test_only_operations_with_tensors_or_samples_accept_more_than_a_megabyte():
    large = {row.name for row in WITH_BODY if row.limits.json > 1 << 20}
    assert large == {
        "forward",
        "forward_backward",
        "asample",
        "stream_sample",
        "log_run",
    }


def test_a_session_that_decompresses_over_the_limit_is_refused(api):
    metadata = {"user_metadata": {"a": "x" * (64 << 20)}, "tags": [], "sdk_version": "1"}
    body = packed(json.dumps(metadata).encode())
    assert len(body) < 10_000
    assert api.post("create_session", body, headers=ZSTD).status_code == 413


def test_a_telemetry_report_of_too_many_events_is_dropped(api):
    event = {"event": "SESSION_START", "event_id": "e", "event_session_index": 0}
    batch = {"events": [event] * 400_000, "session_id": "s", "platform": "p", "sdk_version": "1"}
    body = packed(json.dumps(batch).encode())
    assert len(body) < 10_000
    assert api.told("telemetry", body, headers=ZSTD) == {"status": "accepted"}
    assert api.http.get("/local/telemetry").json()["events"] == []


def test_a_prompt_of_a_million_chunks_is_refused(api):
    sampler = api.sampler()
    chunks = [{"tokens": [5]}] * 1_000_000
    body = packed(json.dumps(sampler.request(fields={"prompt": {"chunks": chunks}})).encode())
    refused = api.post("asample", body, headers=ZSTD)
    assert refused.status_code == 413
    few = json.dumps(sampler.request(fields={"prompt": {"chunks": chunks[:10_000]}})).encode()
    refused = api.post("asample", few)
    assert refused.status_code == 413
    assert "asample holds more than 10000 objects and lists" in refused.json()["detail"]
    assert sampler.tokens()


def test_a_pass_of_many_tiny_fields_is_refused(api):
    model = api.model()
    for body in (b"\x1a\x00" * 110_000, b"\x1a\x80\x89\x7a" + b"\x0a\x00" * 1_000_000):
        refused = api.post("forward_backward", body, headers={"content-type": PROTO})
        assert refused.status_code == 413
        assert "forward_backward holds more than 100000 fields" in refused.json()["detail"]
    assert model.step() > 0


def test_a_pass_with_too_many_examples_is_refused_and_its_number_skipped(api):
    model = api.model()
    for operation, name in (
        ("forward_backward", "forward_backward_input"),
        ("forward", "forward_input"),
    ):
        inputs = {"data": [datum((5,), (6,))] * 2049, "loss_fn": "cross_entropy"}
        refused = model.ask(operation, **{name: inputs})
        assert refused.status_code == 400
        assert refused.json()["field"] == f"{name}.data"
        assert "setting max_examples" in refused.json()["detail"]
    assert model.step() > 0


@pytest.mark.parametrize("depth", [65, 900, 5000])
def test_deep_nesting_is_refused(api, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"tags": [], "sdk_version": "1", "user_metadata": {nested}}}'.encode()
    refused = api.post("create_session", body)
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("body: ")


def test_nested_metadata_of_usual_depth_is_stored(api):
    nested = json.loads('{"a":' * 30 + "1" + "}" * 30)
    assert api.session(user_metadata={"b": [nested] * 3})


def test_a_large_pass_is_decoded_and_run(api):
    model = api.model()
    data = [datum([5] * 1000, [6] * 1000)] * 40
    assert len(json.dumps(data)) > 2 * OFF_LOOP_BYTES
    assert model.step(data) > 0
    refused = model.ask("forward_backward", forward_backward_input={"data": [*data, 5]})
    assert refused.status_code == 422
    assert model.step() > 0  # its number was read in a thread and is skipped


def test_large_bodies_are_handled_in_a_thread(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, _):
            here = threading.get_ident()
            off_loop = made.bodies.off_loop
            assert await off_loop("ann", OFF_LOOP_BYTES - 1, threading.get_ident) == here
            assert await off_loop("ann", OFF_LOOP_BYTES, threading.get_ident) != here

    asyncio.run(scenario())


def test_a_key_with_many_large_bodies_leaves_a_thread_for_others(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, _):
            off_loop, release = made.bodies.off_loop, threading.Event()
            slow = [
                asyncio.create_task(off_loop("ann", OFF_LOOP_BYTES, release.wait)) for _ in range(5)
            ]
            assert await off_loop("bob", OFF_LOOP_BYTES, lambda: "done") == "done"
            assert not any(task.done() for task in slow)
            release.set()
            assert all(await asyncio.gather(*slow))
            del slow
            assert not made.bodies.in_thread._turns

    asyncio.run(scenario())


def test_requests_being_answered_are_bounded_per_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")

    async def scenario() -> None:
        limits = KeyLimits.of_options(["requests=1"])
        options = {"keys": Keys.from_file(file), "limits": limits}
        async with housed(tmp_path / "data", **options) as (made, client):
            body = json.dumps({"tags": [], "sdk_version": "1"}).encode()
            slow = Trickle(b" ", body)

            def post(key: str, content: bytes | AsyncIterator[bytes]) -> Any:
                headers = {"content-type": JSON, "x-api-key": f"tml-key-of-{key}"}
                return client.post("create_session", content=content, headers=headers)

            first = asyncio.create_task(post("ann", slow.parts()))
            await slow.begun.wait()
            refused = await post("ann", body)
            assert refused.status_code == 429
            assert "--limit requests=" in refused.json()["detail"]
            assert (await post("bob", body)).status_code == 200
            slow.go_on.set()
            assert (await first).status_code == 200
            assert (await post("ann", body)).status_code == 200
            assert made.quotas.requests.total == 0

    asyncio.run(scenario())


def test_an_operator_can_raise_and_lower_the_limit_of_an_operation():
    limits = {"create_session": 1000, "optim_step": 4 << 20}
    with service("fake", body_limits=limits) as running, Api(running.url) as user:
        assert user.post("create_session", b" " * 1001).status_code == 413
        assert user.post("optim_step", b" " * (2 << 20)).status_code == 422


# -- bytes in flight -----------------------------------------------------------------------------


class Trickle:
    """A body that sends its first part, and the rest when the test releases it."""

    def __init__(self, first: bytes, rest: bytes) -> None:
        self.first, self.rest = first, rest
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def parts(self) -> AsyncIterator[bytes]:
        yield self.first
        self.begun.set()
        await self.go_on.wait()
        yield self.rest


def test_bytes_in_flight_are_bounded_per_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")

    async def scenario() -> None:
        options = {"keys": Keys.from_file(file), "max_inflight_bytes_per_key": 50_000}
        async with housed(tmp_path / "data", **options) as (made, client):

            async def post(key: str, content: bytes | AsyncIterator[bytes]) -> httpx.Response:
                headers = {"content-type": JSON, "x-api-key": f"tml-key-of-{key}"}
                answer: httpx.Response = await client.post(
                    "create_session", content=content, headers=headers
                )
                return answer

            body = json.dumps({"tags": [], "sdk_version": "1"}).encode()
            slow = Trickle(b" " * 45_000, body)
            first = asyncio.create_task(post("ann", slow.parts()))
            await slow.begun.wait()
            assert (await post("ann", body)).status_code == 200
            refused = await post("ann", b" " * 10_000 + body)
            assert refused.status_code == 429
            assert "--set max_inflight_bytes_per_key" in refused.json()["detail"]
            assert int(refused.headers["retry-after-ms"]) > 0
            assert (await post("bob", b" " * 10_000 + body)).status_code == 200
            slow.go_on.set()
            assert (await first).status_code == 200
            assert made.bodies.budget.held == 0
            assert (await post("ann", b" " * 10_000 + body)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b" " * 300_000])
def test_a_refused_body_gives_its_bytes_back(tmp_path, body):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            for encoding in ("", "zstd", "gzip"):
                headers = {"content-type": JSON, "content-encoding": encoding}
                refused = await client.post("create_session", content=body, headers=headers)
                assert refused.status_code in {413, 422}
                assert made.bodies.budget.held == 0

    asyncio.run(scenario())
