"""Limits per key: usage of one key never affects another, and every refusal says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tinkex._client.retry import HTTPRetryPolicy
from tinkex._retry import Tried
from tinkex._wire.failures import error_from_response, response_from_error
from tinkex.errors import ConfigError, HTTPRequest, RateLimitError
from tinkex.server.app import build_app
from tinkex.server.auth import Keys
from tinkex.server.quotas import KeyLimits, Quota, Quotas, limit_infos
from tinkex.server.service import Service, Settings

from .api import TINY
from .test_retention import asked, drawn
from .test_storage import inputs, new_model, told

Two = tuple[Service, httpx.AsyncClient, httpx.AsyncClient]


@contextlib.asynccontextmanager
async def housed_for_two(place: Path, *limits: str, **settings: Any) -> AsyncIterator[Two]:
    """A service in this event loop, and its users Ann and Bob."""
    if "now" in settings:
        now = settings["now"]
        settings["monotonic"] = lambda: now().timestamp()
    (place / "keys").write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    service = Service(
        Settings(
            place / "data",
            (TINY,),
            engine="fake",
            engine_in_process=True,
            keys=Keys.from_file(place / "keys"),
            limits=KeyLimits.of_options(limits),
            **settings,
        )
    )
    await service.start()
    transport = httpx.ASGITransport(build_app(service))
    url = "http://127.0.0.1/api/v1/"

    def client(name: str) -> httpx.AsyncClient:
        headers = {"x-api-key": f"tml-key-of-{name}"}
        return httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=30)

    try:
        async with client("ann") as ann, client("bob") as bob:
            yield service, ann, bob
    finally:
        await service.stop()


async def settled(service: Service) -> None:
    for promise in service.promises:
        await promise.finished.wait()


def says_what_to_do(answer: httpx.Response, name: str) -> bool:
    assert answer.status_code == 429, answer.text
    detail = answer.json()["detail"]
    assert f"--limit {name}=" in detail
    return "retry-after-ms" in answer.headers


SESSION = {"tags": [], "sdk_version": "0"}


# -- results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [{}, {"kept_results": 0, "told_retention": -1.0}])
def test_results_of_one_key_never_evict_those_of_another(tmp_path, kept):
    async def scenario() -> None:
        async with housed_for_two(tmp_path, "results=10", **kept) as (service, ann, bob):
            of_bob = await drawn(bob, 5)
            for _ in range(5):  # far more than the limit, fetched at once
                promises = await drawn(ann, 8)
                await settled(service)
                await service.keep_house()
                assert await asked(ann, promises) == [200] * 8
            await service.keep_house()
            assert await asked(bob, of_bob) == [200] * 5

    asyncio.run(scenario())


def test_too_many_unfetched_results_are_a_429_that_says_to_fetch_them(tmp_path):
    async def scenario() -> None:
        async with housed_for_two(tmp_path, "results=6") as (service, ann, bob):
            promises = await drawn(ann, 6)
            await settled(service)
            await service.keep_house()
            session = (await told(ann, "create_session", SESSION))["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": TINY}
            refused = await ann.post("create_model", json=body)
            assert says_what_to_do(refused, "results")
            assert await asked(bob, await drawn(bob, 1)) == [200]
            # No result was evicted. Fetching one makes room for one.
            assert await asked(ann, promises[:1]) == [200]
            assert (await ann.post("create_model", json=body)).status_code == 200
            assert await asked(ann, promises) == [410] + [200] * 5

    asyncio.run(scenario())


def test_abandoned_results_are_evicted_for_new_requests_of_their_key(tmp_path):
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        limits = ("results=4",)
        async with housed_for_two(tmp_path, *limits, now=lambda: moment[0]) as (service, ann, bob):
            left, of_bob = await drawn(ann, 4), await drawn(bob, 4)
            await settled(service)
            moment[0] += timedelta(minutes=11)
            await drawn(ann, 2)
            assert await asked(ann, left) == [410] * 2 + [200] * 2
            assert await asked(bob, of_bob) == [200] * 4

    asyncio.run(scenario())


def test_journal_bytes_are_bounded_per_key(tmp_path):
    large = inputs()
    large["data"] = large["data"] * 200

    async def scenario() -> None:
        limits = ("journal_bytes=200KiB",)
        async with housed_for_two(tmp_path, *limits) as (service, ann, bob):
            of_bob = await drawn(bob, 3)
            model = await new_model(ann)
            body = {"model_id": model, "forward_backward_input": large}
            number = 1
            while True:
                answer = await ann.post("forward_backward", json=body | {"seq_id": number})
                if answer.status_code != 200:
                    break
                await asked(ann, [answer.json()])
                number += 1
            assert 1 < number < 20
            assert says_what_to_do(answer, "journal_bytes")
            assert service.quotas.journal_bytes.used("ann") <= 200 << 10
            # A step is still accepted: after it, a snapshot can replace these passes.
            step = {"model_id": model, "seq_id": number, "adam_params": {}}
            assert "metrics" in await told(ann, "optim_step", step)
            assert await asked(bob, of_bob) == [200] * 3

    asyncio.run(scenario())


def test_fetched_results_make_room_when_the_journal_of_a_key_is_full(tmp_path):
    """No replay needs samples, so a key can send them without end."""

    async def scenario() -> None:
        async with housed_for_two(tmp_path, "journal_bytes=20KiB") as (service, ann, _):
            for _ in range(30):
                assert await asked(ann, await drawn(ann, 3)) == [200] * 3
            assert service.quotas.journal_bytes.used("ann") <= 20 << 10

    asyncio.run(scenario())


def test_quota_counts_are_the_same_after_a_restart(tmp_path):
    def counts(service: Service) -> dict[str, int]:
        names = [each.name for each in fields(Quotas)]
        return {name: getattr(service.quotas, name).used("ann") for name in names}

    async def scenario() -> None:
        async with housed_for_two(tmp_path) as (service, ann, _):
            await drawn(ann, 3)
            model = await new_model(ann)
            for number, operation, body in (
                (1, "optim_step", {"adam_params": {}}),
                (2, "save_weights", {"path": "kept"}),
                (3, "save_weights", {"path": "kept", "overwrite": True}),
                (4, "save_weights_for_sampler", {"path": "kept"}),
                (5, "save_weights_for_sampler", {"sampling_session_seq_id": 7}),
            ):
                answer = await told(ann, operation, {"model_id": model, "seq_id": number, **body})
                assert "error" not in answer, answer
            await told(ann, "telemetry", report())
            await settled(service)
            before = counts(service)
            assert before["sessions"] == 2
            assert before["models"] == 1
            assert before["samplers"] == 2
            assert all(
                before[name] for name in before if name not in {"requests", "pending", "losses"}
            )
        async with housed_for_two(tmp_path) as (service, ann, _):
            assert counts(service) == before
            await told(ann, "unload_model", {"model_id": model, "seq_id": 6})
            listed = (await ann.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
            for each in listed:
                gone = await ann.delete(
                    f"training_runs/{model}/checkpoints/{each['checkpoint_id']}"
                )
                assert gone.status_code == 200
            for session in (await ann.get("sessions")).json()["sessions"]:
                await ann.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
            after = counts(service)
            for name in ("sessions", "models", "samplers", "checkpoint_bytes", "pending"):
                assert after[name] == 0, name

    asyncio.run(scenario())


# -- sessions, models, samplers, checkpoints, losses ---------------------------------------------------


def test_sessions_of_a_key_are_limited_and_finishing_one_makes_room(tmp_path):
    async def scenario() -> None:
        async with housed_for_two(tmp_path, "sessions=2") as (_, ann, bob):
            first = await told(ann, "create_session", SESSION)
            again = {"x-idempotency-key": "same"}
            second = await ann.post("create_session", json=SESSION, headers=again)
            refused = await ann.post("create_session", json=SESSION)
            assert not says_what_to_do(refused, "sessions")
            assert refused.headers["x-should-retry"] == "false"
            # A retry is no new session.
            repeated = await ann.post("create_session", json=SESSION, headers=again)
            assert repeated.json() == second.json()
            await told(bob, "create_session", SESSION)
            ended = f"sessions/{first['session_id']}/finish"
            await ann.post(ended, json={"reason": {"type": "success"}})
            await told(ann, "create_session", SESSION)
            assert (await ann.post("create_session", json=SESSION)).status_code == 429

    asyncio.run(scenario())


def test_models_of_a_key_are_limited_and_unloading_one_makes_room(tmp_path):
    async def scenario() -> None:
        async with housed_for_two(tmp_path, "models=1") as (_, ann, bob):
            model = await new_model(ann)
            session = (await told(ann, "create_session", SESSION))["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": TINY}
            refused = await ann.post("create_model", json=body)
            assert not says_what_to_do(refused, "models")
            await new_model(bob)
            await told(ann, "unload_model", {"model_id": model})
            await told(ann, "create_model", body)
            await told(ann, "create_model", body)  # a retry

    asyncio.run(scenario())


def test_samplers_of_a_key_are_limited_named_and_unnamed(tmp_path):
    async def scenario() -> None:
        async with housed_for_two(tmp_path, "samplers=1") as (_, ann, bob):
            model = await new_model(ann)
            session = model.partition(":")[0]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": TINY}
            assert (await ann.post("create_sampling_session", json=body)).status_code == 200
            assert (await ann.post("create_sampling_session", json=body)).status_code == 200
            refused = await ann.post(
                "create_sampling_session", json=body | {"sampling_session_seq_id": 1}
            )
            assert not says_what_to_do(refused, "samplers")
            unnamed = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 2}
            failed = await told(ann, "save_weights_for_sampler", unnamed)
            assert failed["category"] == "user"
            assert "--limit samplers=" in failed["error"]
            await drawn(bob, 1)

    asyncio.run(scenario())


def test_checkpoints_of_a_key_are_limited_and_deleting_one_makes_room(tmp_path):
    async def scenario() -> None:
        async with housed_for_two(tmp_path, "checkpoint_bytes=1") as (service, ann, bob):
            model = await new_model(ann)
            numbers = iter(range(1, 99))

            async def save(operation: str, **fields: Any) -> dict[str, Any]:
                body = {"model_id": model, "seq_id": next(numbers), **fields}
                answer: dict[str, Any] = await told(ann, operation, body)
                return answer

            path = (await save("save_weights", path="a"))["path"]
            for operation in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
                failed = await save(operation, path="b")
                assert failed["category"] == "user"
                assert "--limit checkpoint_bytes=" in failed["error"]
            refused = await ann.post("copy_weights", json={"source_path": path})
            assert not says_what_to_do(refused, "checkpoint_bytes")
            assert (await service.database(service.database.store.counts))[2] == 1
            assert "path" in await save("save_weights", path="a", overwrite=True)
            of_bob = {"model_id": await new_model(bob), "seq_id": 1, "path": "b"}
            assert "path" in await told(bob, "save_weights", of_bob)
            gone = await ann.delete(f"training_runs/{model}/checkpoints/weights/a")
            assert gone.status_code == 200
            assert "path" in await save("save_weights", path="b")

    asyncio.run(scenario())


def test_losses_of_a_key_are_limited_also_after_a_restart(tmp_path):
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "output", "name": "o", "target": "o", "args": [{"ref": "logprobs"}]},
    ]

    def traced(session: str, number: int) -> dict[str, Any]:
        return {
            "session_id": session,
            "custom_loss_seq_id": number,
            "name": "l",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"nodes": nodes},
        }

    async def scenario() -> None:
        async with housed_for_two(tmp_path, "losses=1") as (service, ann, _):
            session = (await told(ann, "create_session", SESSION))["session_id"]
            # The fake engine refuses losses; a failed loss does not count.
            failed = await told(ann, "create_custom_loss", traced(session, 0))
            assert failed["category"] == "user"
            assert service.quotas.losses.used("ann") == 0
            losses = tmp_path / "data" / "losses"
            losses.mkdir(exist_ok=True)
            (losses / f"{session}:loss:1.json").write_text("{}")
        async with housed_for_two(tmp_path, "losses=1") as (service, ann, bob):
            assert service.quotas.losses.used("ann") == 1
            refused = await ann.post("create_custom_loss", json=traced(session, 2))
            assert not says_what_to_do(refused, "losses")
            other = (await told(bob, "create_session", SESSION))["session_id"]
            accepted = await bob.post("create_custom_loss", json=traced(other, 0))
            assert accepted.status_code == 200
            await ann.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
            assert service.quotas.losses.used("ann") == 0

    asyncio.run(scenario())


def test_telemetry_of_a_key_keeps_its_newest_events(tmp_path):
    """It is never refused, because clients would retry for ever."""

    async def scenario() -> None:
        async with housed_for_two(tmp_path, "telemetry_bytes=8KiB") as (service, ann, bob):
            assert (await bob.post("telemetry", json=report())).status_code == 200
            for number in range(100):
                answer = await ann.post("telemetry", json=report(str(number)))
                assert answer.json() == {"status": "accepted"}
            store = service.database.store
            rows, total = await service.database(store.telemetry, "ann", None, limit=999, offset=0)
            assert 10 < total < 100
            assert rows[-1].event_id == "e99"
            assert service.quotas.telemetry_bytes.used("ann") <= 8 << 10
            assert (await service.database(store.telemetry, "bob", None, limit=9, offset=0))[1] == 1

    asyncio.run(scenario())


def test_feeds_of_one_key_never_evict_those_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr("tinkex.server.samplers.FEED_LIMIT", 3)

    async def scenario() -> None:
        async with housed_for_two(tmp_path) as (service, ann, bob):
            (of_bob,) = await drawn(bob, 1)
            scope = service.promises.get(of_bob["request_id"], "bob").scope
            feed = await service.samplers.feed(scope, 0, "bob")
            (of_ann,) = await drawn(ann, 1)
            scope_of_ann = service.promises.get(of_ann["request_id"], "ann").scope
            for clone in range(20):
                await service.samplers.feed(scope_of_ann, clone, "ann")
            assert await service.samplers.feed(scope, 0, "bob") is feed

    asyncio.run(scenario())


def report(number: str = "0") -> dict[str, Any]:
    event = {
        "event": "SESSION_START",
        "event_id": f"e{number}",
        "event_session_index": 0,
        "severity": "INFO",
        "timestamp": "2026-05-01T00:00:00Z",
        "type": "SESSION_START",
    }
    return {"events": [event], "platform": "x", "sdk_version": "0.36.0", "session_id": "s"}


# -- limits and errors -----------------------------------------------------------------------------------


def test_limits_are_read_from_options():
    chosen = KeyLimits.of_options(["models=7", "checkpoint_bytes=2GiB", " sessions = 1_000 "])
    assert (chosen.models, chosen.checkpoint_bytes, chosen.sessions) == (7, 2 << 30, 1000)
    assert chosen.pending == KeyLimits().pending


@pytest.mark.parametrize("option", ["", "models", "models=", "models=-1", "models=x", "other=1"])
def test_wrong_limit_options_are_refused(option):
    with pytest.raises(ConfigError, match="limit: "):
        KeyLimits.of_options([option])


@pytest.mark.parametrize("info", limit_infos(), ids=lambda info: info.name)
def test_refusal_names_the_limit_and_is_retried_only_where_waiting_helps(info):
    quota = Quota(info, 5 << 30)
    quota.add("ann", 5 << 30)
    quota.check("bob", 1)
    with pytest.raises(RateLimitError, match=f"--limit {info.name}=") as refused:
        quota.take("ann")
    error = pickle.loads(pickle.dumps(refused.value))
    status, headers, body = response_from_error(error)
    assert status == 429
    assert body["detail"] == error.message
    request = HTTPRequest("POST", "http://x")
    received = error_from_response(status, headers, b"{}", request, now=0.0)
    wait = HTTPRetryPolicy(window=300).wait_before_retry(received, Tried(0))
    assert wait == info.retry_after
    quota.release("ann", 1)
    quota.take("ann")
    assert quota.total == 5 << 30
    with pytest.raises(RateLimitError, match="This key has 0 "):
        quota.check("bob", 6 << 30)


def test_every_limit_is_documented():
    from tinkex.cli.serve import command

    (option,) = (each for each in command.params if each.name == "limits")
    page = (Path(__file__).parents[2] / "docs/guides/limits.md").read_text()
    for info in limit_infos():
        assert info.name in str(getattr(option, "help", ""))
        assert f"| `{info.name}` | {info.shown(info.default)} | {info.what} |" in page
