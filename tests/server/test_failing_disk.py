"""The disk is full or read-only at any write: errors are clear, nothing acknowledged is lost, the service recovers."""

from __future__ import annotations

import asyncio
import errno
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tinkex.errors import NotFoundError
from tinkex.server.tables import CheckpointRow

from .failing_disk import FailingDisk
from .test_storage import housed

EVER, NEVER = (datetime(year, 1, 1, tzinfo=UTC) for year in (1990, 2990))
LENGTH = 4  # consecutive writes that fail
TRIES = 12
TARGETS = {"data": [6, 7], "dtype": "int64", "shape": [2]}
INPUTS = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
            "loss_fn_inputs": {"target_tokens": TARGETS},
        }
    ],
    "loss_fn": "cross_entropy",
}
SAMPLE = {
    "prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
    "num_samples": 1,
    "sampling_params": {"max_tokens": 5, "seed": 1},
}


class User:
    """A client that retries requests that failed because of the disk."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.refused = 0
        self.number = 0  # of the last request of the model

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The response to a request, which may be refused only because of the disk."""
        for _ in range(TRIES):
            answer = await self.client.post(path, json=body)
            if answer.status_code != 507:
                assert answer.status_code == 200, answer.text
                content: dict[str, Any] = answer.json()
                if set(content) >= {"request_id"}:
                    return await self.ask("retrieve_future", {"request_id": content["request_id"]})
                return content
            assert "cannot write to its disk" in answer.json()["detail"]
            self.refused += 1
        raise AssertionError(f"{path} never recovers")

    async def do(self, path: str, /, **body: Any) -> dict[str, Any]:
        """The result of a request; if it fails because of the disk, it is sent again with a new number."""
        for _ in range(TRIES):
            if "model_id" in body:
                self.number += 1
                body["seq_id"] = self.number
            told = await self.ask(path, body)
            if "error" not in told:
                return told
            assert "cannot write to its disk" in told["error"], told
            self.refused += 1
            for name in ("model_seq_id", "sampling_session_seq_id"):
                if name in body:
                    body[name] += 1
        raise AssertionError(f"{path} never recovers")


async def live(user: User) -> dict[str, Any]:
    """Run every operation that writes to the disk; return what was acknowledged."""
    session = (await user.do("create_session", tags=[], sdk_version="0"))["session_id"]
    made = await user.do(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="tinkex/tiny",
        lora_config={"rank": 4, "seed": 1},
    )
    model = made["model_id"]
    for _ in range(2):
        # Once accepted, a pass and a step run whatever the disk does.
        for operation, fields in (
            ("forward_backward", {"forward_backward_input": INPUTS}),
            ("optim_step", {"adam_params": {"learning_rate": 0.01}}),
        ):
            before = user.number
            assert "metrics" in await user.do(operation, model_id=model, **fields)
            assert user.number == before + 1
    kept: dict[str, Any] = {"model": model, "session": session, "paths": []}
    for options in ({}, {"overwrite": True}):
        saved = await user.do("save_weights", model_id=model, path="a", **options)
        kept["paths"].append(saved["path"])
    saved = await user.do("save_weights_for_sampler", model_id=model, path="b")
    kept["paths"].append(saved["path"])
    unnamed = await user.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=50)
    named = await user.do(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=90,
        model_path=saved["path"],
    )
    kept["samplers"] = [each["sampling_session_id"] for each in (unnamed, named)]
    return kept


async def look(user: User, kept: dict[str, Any], number: int) -> list[Any]:
    """The outputs of the model and of its samplers and checkpoints."""
    said = [
        (await user.do("forward", model_id=kept["model"], forward_input=INPUTS))["loss_fn_outputs"]
    ]
    for sampler in kept["samplers"]:
        drawn = await user.do("asample", **SAMPLE, sampling_session_id=sampler, seq_id=number)
        said.append(drawn["sequences"])
    for path in kept["paths"]:
        drawn = await user.do("asample", **SAMPLE, model_path=path)
        said.append(drawn["sequences"])
    return said


async def scenario(data_dir: Path, disk: FailingDisk) -> tuple[list[Any], list[Any], int]:
    """Run on a failing disk; return the outputs at the end and after a restart, and the number of failed writes."""
    disk.count = 0
    async with housed(data_dir, snapshot_every=0.0) as (made, client):
        disk.watch(made.database.store._engine)
        user = User(client)
        kept = await live(user)
        await made.keep_house()
        seen = await look(user, kept, 1000)
        assert (await client.get("healthz")).status_code == 200
        disk.broken = lambda _: False
    async with housed(data_dir) as (made, client):
        later = User(client)
        later.number = user.number
        again = await look(later, kept, 2000)
        assert not any(model.corrupted for model in made.models)
    return seen, again, user.refused


@pytest.mark.heavy
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_a_failed_write_loses_nothing_that_was_acknowledged(tmp_path, monkeypatch, number):
    disk = FailingDisk(monkeypatch, number)
    seen, again, refused = asyncio.run(scenario(tmp_path / "whole", disk))
    assert (seen, refused) == (again, 0)
    begun = started(tmp_path / "started", disk)
    total = disk.count
    assert total > 100
    in_the_way = 0
    # Each error is tested with a different subset of the writes, to save time.
    for first in range(begun + 1 + (number == errno.EROFS) * 4, begun + 120, 9):
        broken = range(first, first + LENGTH)
        disk.broken = broken.__contains__
        result = asyncio.run(scenario(tmp_path / str(first), disk))
        assert result[:2] == (seen, seen), first
        in_the_way += result[2]
    assert in_the_way > 10


def started(data_dir: Path, disk: FailingDisk) -> int:
    """The number of writes of a start; also records the number of a whole run."""
    begun = 0

    async def start() -> None:
        nonlocal begun
        disk.count = 0
        async with housed(data_dir, snapshot_every=0.0):
            begun = disk.count

    asyncio.run(start())
    disk.broken = lambda _: False
    asyncio.run(scenario(data_dir.with_name("counted"), disk))
    return begun


def test_the_old_checkpoint_stays_if_its_replacement_cannot_be_committed(tmp_path, monkeypatch):
    disk = FailingDisk(monkeypatch)

    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            user = User(client)
            kept = await live(user)
            before = {path: content(tmp_path, "training") for path in ("a",)}
            listed = (await client.get(f"training_runs/{kept['model']}/checkpoints")).json()
            disk.watch(made.database.store._engine)
            await user.do("optim_step", model_id=kept["model"], adam_params={"learning_rate": 0.1})
            put = made.checkpoints._store.put_checkpoint

            def fails(row: CheckpointRow) -> None:
                put(row)
                disk.broken = lambda _: True  # at the commit

            monkeypatch.setattr(made.checkpoints._store, "put_checkpoint", fails)
            user.number += 1
            body = {
                "model_id": kept["model"],
                "seq_id": user.number,
                "path": "a",
                "overwrite": True,
            }
            failed = await user.ask("save_weights", body)
            disk.broken = lambda _: False
            assert "cannot write to its disk" in failed["error"]
            assert {path: content(tmp_path, "training") for path in ("a",)} == before
            assert listed == (await client.get(f"training_runs/{kept['model']}/checkpoints")).json()
            assert not list((tmp_path / "checkpoints").glob("*/*/.*"))

    asyncio.run(scenario())


def content(data_dir: Path, kind: str) -> dict[str, bytes]:
    """The files of all checkpoints of a kind."""
    files = (data_dir / "checkpoints").glob(f"*/{kind}/*/*")
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


# -- races -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["publish", "ttl"])
def test_a_change_never_applies_to_a_replacement_of_the_checkpoint(tmp_path, change):
    """While publishing waits, the owner replaces the checkpoint with a private one."""

    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            user = User(client)
            kept = await live(user)
            row = await made.checkpoints.owned("local", kept["model"], "weights/a")
            await user.do("save_weights", model_id=kept["model"], path="a", overwrite=True)
            changing = (
                made.checkpoints.publish(row, public=True)
                if change == "publish"
                else made.checkpoints.set_ttl(row, 3600)
            )
            with pytest.raises(NotFoundError, match="deleted or replaced meanwhile"):
                await changing
            now = await made.checkpoints.owned("local", kept["model"], "weights/a")
            assert (now.public, now.expires_at) == (False, None)

    asyncio.run(scenario())


def test_concurrent_publish_and_unpublish_end_as_the_last_acknowledged(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            kept = await live(User(client))
            row = await made.checkpoints.owned("local", kept["model"], "weights/a")
            order: list[bool] = []

            async def publish(public: bool) -> None:
                await made.checkpoints.publish(row, public=public)
                order.append(public)

            await asyncio.gather(*(publish(bool(number % 3)) for number in range(30)))
            now = await made.checkpoints.owned("local", kept["model"], "weights/a")
            assert now.public == order[-1]
            events = await made.database(
                made.database.store.audit, "local", topic="checkpoints", start=EVER, end=NEVER
            )
            told = [e.event for e in events if "publish" in e.event]
            assert told == [f"checkpoint_{'' if each else 'un'}published" for each in order]

    asyncio.run(scenario())


def test_copying_a_checkpoint_that_is_deleted_meanwhile_is_not_found(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            kept = await live(User(client))
            row = await made.checkpoints.owned("local", kept["model"], "weights/a")
            await made.checkpoints.delete(row)
            with pytest.raises(NotFoundError, match="deleted or replaced meanwhile"):
                await made.checkpoints.copy(row, kept["model"], "local", None)

    asyncio.run(scenario())
