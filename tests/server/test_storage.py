"""Files on disk: complete, verified, deleted in time; and behaviour on a full disk.

A limit on the size of files (RLIMIT_FSIZE) simulates a full disk. It needs no privileges and works in any container:
writes fail in the middle, as they do on a disk that fills up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.served import Served
from tinkex.server.app import build_app
from tinkex.server.service import Service, Settings
from tinkex.server.snapshots import Snapshot, Snapshots
from tinkex.testing import service

from .api import Api, Model, datum

WEIGHTS = "adapter_model.safetensors"


# -- full disk -------------------------------------------------------------------------------------


@contextlib.contextmanager
def full(*pids: int, size: int = 512) -> Iterator[None]:
    """No file of these processes can grow beyond this many bytes."""
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        for pid, limits in zip(pids, before, strict=True):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def served(tmp_path, request) -> Iterator[Served]:
    """A service and its engine in separate processes."""
    running = Served(tmp_path, f"--engine={getattr(request, 'param', 'fake')}")
    running.start()
    yield running
    running.stop()


def engine_of(served: Served) -> int:
    pid = served.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("served", ["fake", "torch"], indirect=True)
def test_a_full_disk_fails_the_save_and_the_run_continues(served, tmp_path):
    with Api(served.url) as api:
        model, undisturbed = api.model(), api.model()
        for each in (model, undisturbed):
            each.step()
        kept = model.save("kept")
        with full(engine_of(served)):
            for operation, name in (
                ("save_weights", "lost"),
                ("save_weights", "kept"),
                ("save_weights_for_sampler", "lost"),
                ("save_weights_external", "lost"),
            ):
                options = {"overwrite": True} if operation == "save_weights" else {}
                failed = model.do(operation, path=name, **options)
                assert failed["category"] == "server"
                assert "cannot write to its disk (File too large)" in failed["error"], failed
            assert model.step() == undisturbed.step()
        assert model.step() == undisturbed.step()
        paths = [model.save("lost"), model.save("lost", "save_weights_for_sampler")]
        listed = api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
        assert {entry["tinker_path"] for entry in listed} == {kept, *paths}
        # Earlier files are unchanged, and the failed save left nothing.
        assert api.loaded(kept).logprobs() != model.logprobs()
        assert api.loaded(paths[0]).logprobs() == undisturbed.logprobs()
        assert not list((tmp_path / "checkpoints").glob("*/*/.*"))


def test_a_service_on_a_full_disk_refuses_and_continues_once_there_is_space(served):
    """Nothing can be written: no requests, no results, no rows."""
    with Api(served.url) as api:
        model, undisturbed = api.model(), api.model()
        for each in (model, undisturbed):
            each.step()
        done = model.forward_backward()
        api.retrieve(done)
        number = model.seq()
        with full(served.process.pid, engine_of(served)):
            for path, body in (
                ("forward_backward", training(model, number)),
                ("create_session", {"tags": [], "sdk_version": "0.36.0"}),
                (
                    "create_model",
                    {
                        "session_id": model.session_id,
                        "model_seq_id": 9,
                        "base_model": "tinkex/tiny",
                    },
                ),
            ):
                refused = api.post(path, body)
                assert refused.status_code == 507, (path, refused.text)
                assert "Free some space" in refused.json()["detail"]
            # Operations that write nothing still work.
            assert "metrics" in api.retrieve(done)
            assert api.got("healthz")["status"] == "ok"
            heard = api.post("session_heartbeat", {"session_id": model.session_id})
            assert heard.status_code == 200
        # The client retries with the same number; its losses are those of a run without the fault.
        api.retrieve(api.told("forward_backward", training(model, number)))
        undisturbed.forward_backward()
        undisturbed.forward_backward()
        for each in (model, undisturbed):
            api.retrieve(each.optim_step())
        assert model.logprobs() == undisturbed.logprobs()


def training(model: Model, number: int) -> dict[str, object]:
    inputs = {"data": [datum()], "loss_fn": "cross_entropy"}
    return {"model_id": model.model_id, "seq_id": number, "forward_backward_input": inputs}


@pytest.mark.heavy
def test_results_that_a_full_disk_could_not_take_are_recomputed_after_a_crash(served, tmp_path):
    """A step runs, its result cannot be written, and the service crashes: the step is replayed once."""
    with Api(served.url) as api:
        model, undisturbed = api.model(), api.model()
        for each in (model, undisturbed):
            each.step()
        # Two wait for a missing number, so that they are accepted while there is space.
        first, second, third = model.seq(), model.seq(), model.seq()
        promises = [model.send("optim_step", seq_id=third, adam_params={"learning_rate": 0.01})]
        before = on_disk(tmp_path / "journal")
        promises.append(api.told("forward_backward", training(model, second)))
        after = on_disk(tmp_path / "journal")
        # There is space for one more such request, but for no result.
        with full(served.process.pid, size=after + (after - before) + 30):
            promises.append(api.told("forward_backward", training(model, first)))
            for promise in promises:
                assert "metrics" in api.retrieve(promise)
            served.process.kill()
            served.process.wait()
        assert served.process.stdout is not None
        served.process.stdout.close()
        served.start()
        for promise in promises:
            assert "metrics" in api.retrieve(promise)
        undisturbed.forward_backward()
        undisturbed.forward_backward()
        api.retrieve(undisturbed.optim_step())
        assert model.logprobs() == undisturbed.logprobs()


def test_usage_is_stored_once_the_disk_has_space_again(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            body = {"model_id": model, "seq_id": 1, "forward_input": inputs()}
            with full(os.getpid()):
                made.usage.add("local", model.partition(":")[0], "tinkex/tiny", "training", 3)
                with pytest.raises(OSError, match="No space left"):
                    await made.usage.write()
            await told(client, "forward", body)
            now = datetime.now(UTC)
            day = timedelta(days=1)
            span = {"starting_on": str(now - day), "ending_before": str(now + day)}
            used = (await client.get("billing/usage/events", params=span)).json()["data"]
            assert [event["event_info"]["token_count"] for event in used] == [6]

    asyncio.run(scenario())


def test_housekeeping_frees_space_before_it_writes(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path, result_retention=-1.0) as (made, client):
            model = await new_model(client)
            body = {"model_id": model, "seq_id": 1, "forward_input": inputs()}
            await told(client, "forward", body)
            assert len(made.promises) == 2
            with full(os.getpid()):
                await made.keep_house()
                assert len(made.promises) == 1

    asyncio.run(scenario())


def test_runs_can_be_listed_on_a_full_disk(tmp_path):
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        async with housed(tmp_path, now=lambda: moment[0]) as (made, client):
            model = await new_model(client)
            with full(os.getpid()):
                for path in ("training_runs", f"training_runs/{model}"):
                    assert (await client.get(path)).status_code == 200
            asked = made.models._asked_at[model]
            run = (await client.get(f"training_runs/{model}")).json()
            assert datetime.fromisoformat(run["last_request_time"]) == asked
            assert not made.models._asked_at

    asyncio.run(scenario())


def test_a_session_can_be_finished_once_the_disk_has_space(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            session = (await new_model(client)).partition(":")[0]
            finish = f"sessions/{session}/finish", {"reason": {"type": "success"}}
            with full(os.getpid()):
                assert (await client.post(finish[0], json=finish[1])).status_code == 507
            assert made.models.count == 1
            await told(client, *finish)
            assert made.models.count == 0

    asyncio.run(scenario())


def test_telemetry_is_accepted_on_a_full_disk(tmp_path, caplog):
    event = {"event": "SESSION_START", "event_id": "e", "event_session_index": 0}
    event |= {"severity": "INFO", "timestamp": "2026-01-02T03:04:05Z"}
    body = {"events": [event], "platform": "Linux", "sdk_version": "0", "session_id": "s"}

    async def scenario() -> None:
        async with housed(tmp_path) as (_, client):
            with full(os.getpid()):
                assert await told(client, "telemetry", body) == {"status": "accepted"}

    asyncio.run(scenario())
    assert "Dropped 1 telemetry events of local" in caplog.text


def test_a_service_with_a_lost_database_can_still_stop(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, _):
            made.usage.add("local", "s", "tinkex/tiny", "training", 3)
            with sqlite3.connect(tmp_path / "tinkex.db") as other:
                other.execute("DROP TABLE usage")
            other.close()
        assert made.database.store.is_open is False
        made._lock.take()
        made._lock.release()

    asyncio.run(scenario())


@pytest.mark.heavy
def test_a_service_on_a_full_disk_can_be_restarted(served, tmp_path):
    with Api(served.url) as api:
        model = api.model()
        model.step()
        with full(served.process.pid):
            served.stop()
        assert served.process.returncode == 0
        served.start()
        assert Model(api, model.model_id, model.next_seq).step() > 0


# -- damage ------------------------------------------------------------------------------------------


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "torn":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()


class Restarting:
    """A service on a data directory that a test damages while it is down."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir, self.settings = data_dir, settings
        self.running = contextlib.ExitStack()

    def start(self) -> Api:
        started = service("fake", data_dir=self.data_dir, **self.settings)
        return self.running.enter_context(Api(self.running.enter_context(started).url))

    def stop(self) -> None:
        self.running.close()


@pytest.fixture
def place(tmp_path):
    place = Restarting(tmp_path, snapshot_every=0.0)
    yield place
    place.stop()


@pytest.mark.parametrize("how", ["flipped", "torn", "gone"])
@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_reported_and_never_loaded(tmp_path, how, name):
    with service("fake", data_dir=tmp_path) as running, Api(running.url) as api:
        model = api.model()
        model.step()
        path = model.save("one")
        (directory,) = (tmp_path / "checkpoints").glob("*/training/one")
        damage(directory / name, how)
        body = {"session_id": api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        failed = api.retrieve(api.told("load_weights", body))
        assert f"the file {name} is damaged" in failed["error"]
        copied = api.told("copy_weights", {"source_path": path})["tinker_path"]
        again = api.retrieve(api.told("load_weights", {**body, "model_seq_id": 1, "path": copied}))
        assert f"the file {name} is damaged" in again["error"]
        if name == WEIGHTS:
            sampled = api.sampler(model_path=path).sample()
            assert f"the file {name} is damaged" in sampled["error"]
        # The model that saved it does not need it.
        assert model.step() > 0


def snapshots(place: Restarting, model: Model) -> Path:
    return place.data_dir / "snapshots" / model.model_id


def wait_for_snapshot(place: Restarting, api: Api, model: Model) -> Path:
    """Wait for a snapshot, which is written in the background; return the newest directory."""
    while True:
        model.step()
        with contextlib.suppress(FileNotFoundError):
            current = json.loads((snapshots(place, model) / "current.json").read_text())
            return snapshots(place, model) / str(current["changes"])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (WEIGHTS, "flipped"),
        (WEIGHTS, "torn"),
        ("optimizer.safetensors", "flipped"),
        ("optimizer.safetensors", "gone"),
        ("tinkex.json", "torn"),
        ("../current.json", "torn"),
    ],
)
def test_a_damaged_snapshot_is_reported_and_never_loaded(place, caplog, name, how):
    api = place.start()
    model, other = api.model(), api.model()
    wait_for_snapshot(place, api, model)
    path = model.save("last")
    expected = other.logprobs()
    place.stop()
    newest = json.loads((snapshots(place, model) / "current.json").read_text())["changes"]
    damage(snapshots(place, model) / str(newest) / name, how)
    api = place.start()
    broken = Model(api, model.model_id, model.next_seq)
    failed = broken.do("optim_step", adam_params={})
    assert failed["category"] == "server"
    assert Path(name).name in failed["error"]
    assert "corrupted" in failed["error"]
    assert api.got(f"training_runs/{model.model_id}")["corrupted"] is True
    # The log names it, and training can continue from a checkpoint; other runs are not affected.
    assert f"{model.model_id} is corrupted" in caplog.text
    assert api.loaded(path).step() > 0
    assert Model(api, other.model_id, other.next_seq).logprobs() == expected


def test_incomplete_snapshots_are_removed_at_startup(place):
    api = place.start()
    model = api.model()
    directory = wait_for_snapshot(place, api, model)
    place.stop()
    shutil.copytree(snapshots(place, model), place.data_dir / "copy")
    (directory.parent / ".current.json").write_text("{")
    (directory.parent / ".half").mkdir()
    (directory.parent / ".half" / WEIGHTS).write_bytes(b"half")
    api = place.start()
    assert Model(api, model.model_id, model.next_seq).step() > 0
    assert not list(directory.parent.glob(".half"))


def request_of(segment: Path, model: Model, number: int) -> int:
    """The offset of a request's head in a journal."""
    seq, scope = f'"seq":"{number}"'.encode(), f'"scope":"{model.model_id}"'.encode()
    content = segment.read_bytes()
    at = content.index(scope + b"," + seq)
    return content.rindex(b'{"id":', 0, at)


@pytest.mark.parametrize("which", ["request", "newest request"])
def test_a_run_with_a_gap_in_its_journal_never_continues(tmp_path, caplog, which):
    """A model is restored from all of its changes, or not at all."""
    place = Restarting(tmp_path)
    api = place.start()
    model, other = api.model(), api.model()
    for each in (model, other):
        for _ in range(3):
            each.step()
    expected = other.logprobs()
    place.stop()
    (segment,) = (tmp_path / "journal").iterdir()
    content = bytearray(segment.read_bytes())
    begin = request_of(segment, model, 6 if which == "newest request" else 3)
    content[begin + 9] ^= 1
    segment.write_bytes(content)
    try:
        api = place.start()
        assert f"{segment} is damaged" in caplog.text
        failed = Model(api, model.model_id).do("forward", forward_input=inputs(), seq_id=None)
        assert "corrupted" in failed["error"]
        assert "cannot be read in the journal" in failed["error"]
        assert api.got(f"training_runs/{model.model_id}")["corrupted"] is True
        assert Model(api, other.model_id, other.next_seq).logprobs() == expected
    finally:
        place.stop()


@pytest.mark.parametrize("lost", [(0,), (1,), (4,), (6,), (2, 3), (1, 4, 6)])
def test_a_lost_result_between_others_is_recomputed(tmp_path, lost):
    """A machine crash can lose a fetched result and keep later ones; its request is still in the journal."""
    place = Restarting(tmp_path)
    api = place.start()
    model = api.model()
    requests = [call for _ in range(3) for call in (model.forward_backward, model.optim_step)]
    promises = [request() for request in requests]
    promises.append(model.send("forward", forward_input=inputs()))
    told = [api.retrieve(promise) for promise in promises]
    place.stop()
    lose_results(tmp_path / "journal", model, lost)
    try:
        for _ in range(2):  # a replayed request has two results by then
            api = place.start()
            assert [api.retrieve(promise) for promise in promises] == told
            model = Model(api, model.model_id, model.next_seq)
            logprobs = model.logprobs()
            assert logprobs == [told[-1]["loss_fn_outputs"][0]["logprobs"]["data"]]
            assert api.got(f"training_runs/{model.model_id}")["corrupted"] is False
            place.stop()
    finally:
        place.stop()


def lose_results(journal: Path, model: Model, numbers: Sequence[int]) -> None:
    (segment,) = journal.iterdir()
    content = bytearray(segment.read_bytes())
    for number in numbers:
        begin = request_of(segment, model, number)
        request_id = content[begin + 7 : begin + 39]
        begin = content.index(b'{"id":"' + request_id, begin + 1)
        content[begin + 9] ^= 1
    segment.write_bytes(content)


def test_a_snapshot_never_claims_changes_that_it_does_not_contain(tmp_path, monkeypatch):
    """Otherwise the next crash would lose some of the replayed changes."""
    place = Restarting(tmp_path)
    model = place.start().model()
    for _ in range(3):
        model.step()
    place.stop()
    lose_results(tmp_path / "journal", model, (2, 4, 6))
    committed: list[tuple[int, int]] = []
    commit = Snapshots.commit

    def noted(self: Snapshots, model_id: str, snapshot: Snapshot) -> None:
        committed.append((snapshot.changes, snapshot.next_seq))
        commit(self, model_id, snapshot)

    monkeypatch.setattr(Snapshots, "commit", noted)

    async def scenario() -> None:
        async with housed(tmp_path, snapshot_every=0.0) as (made, client):
            body = {"model_id": model.model_id, "forward_input": inputs()}
            await told(client, "forward", body)
            await asyncio.gather(*made.models._tasks)
            # Lost changes are replayed first; after that each snapshot claims what it contains.
            assert committed
            assert all(changes == next_seq >= 6 for changes, next_seq in committed)

    asyncio.run(scenario())


def inputs() -> dict[str, Any]:
    return {"data": [datum()], "loss_fn": "cross_entropy"}


def test_only_unacknowledged_records_are_lost_with_a_torn_end(tmp_path):
    place = Restarting(tmp_path)
    api = place.start()
    model, undisturbed = api.model(), api.model()
    for each in (model, undisturbed):
        each.step()
    place.stop()
    (segment,) = (tmp_path / "journal").iterdir()
    with segment.open("ab") as file:
        file.write(
            b"\x01\x02\x03\x04\x01" + bytes(8) + b"\x90\x00\x00\x00\x00\x01\x00\x00half of it"
        )
    try:
        api = place.start()
        models = [Model(api, each.model_id, each.next_seq) for each in (model, undisturbed)]
        assert models[0].step() == models[1].step()
    finally:
        place.stop()


def test_no_change_is_kept_before_its_request_is_on_disk(tmp_path):
    """Otherwise a machine crash could keep a change without its request."""
    go, ran = threading.Event(), asyncio.Event()

    def sync(descriptor: int) -> None:
        assert go.wait(30)
        os.fsync(descriptor)

    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            step = made.engine.trainer.optim_step

            async def noted(*args: Any) -> Any:
                answer = await step(*args)
                ran.set()
                return answer

            made.engine.trainer.optim_step = noted
            made.journal._sync = sync
            body = {"model_id": model, "seq_id": 1, "adam_params": {}}
            asked = asyncio.ensure_future(told(client, "optim_step", body))
            await asyncio.wait_for(ran.wait(), 30)  # the engine need not wait for the disk
            for _ in range(100):
                await asyncio.sleep(0)
            promise = made.promises.duplicate(model, 1)
            assert promise is not None
            assert not promise.done
            go.set()
            assert "metrics" in await asked

    asyncio.run(scenario())


# -- freeing space -----------------------------------------------------------------------------------


def on_disk(directory: Path) -> int:
    """The disk space of files; hard links count once."""
    files = {file.stat().st_ino: file.stat() for file in directory.rglob("*") if file.is_file()}
    return sum(facts.st_size for facts in files.values())


@contextlib.asynccontextmanager
async def housed(data_dir: Path, **settings: Any):
    """A service whose internals a test can reach, and its client, without a network.

    With a fake clock (`now`), both clocks of the service use it.
    """
    if "now" in settings:
        now = settings["now"]
        settings.setdefault("monotonic", lambda: now().timestamp())
    made = Service(
        Settings(
            data_dir=data_dir,
            base_models=("tinkex/tiny",),
            engine="fake",
            engine_in_process=True,
            **settings,
        )
    )
    await made.start()
    transport = httpx.ASGITransport(build_app(made))
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost/api/v1/"
        ) as client:
            yield made, client
    finally:
        await made.stop()


async def told(client: httpx.AsyncClient, path: str, body: object) -> dict[str, str]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, str] = answer.json()
    if set(content) >= {"request_id"}:
        return await told(client, "retrieve_future", {"request_id": content["request_id"]})
    return content


async def new_model(client: httpx.AsyncClient) -> str:
    session = (await told(client, "create_session", {"tags": [], "sdk_version": "0"}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tinkex/tiny"}
    return (await told(client, "create_model", body))["model_id"]


def test_old_results_are_removed_from_the_disk(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path, result_retention=-1.0) as (made, client):
            model = await new_model(client)
            padding = " " * (9 << 20)
            for number in range(1, 10):
                body = {"model_id": model, "seq_id": number, "forward_input": inputs()}
                answer = await client.post(
                    "forward",
                    content=json.dumps(body) + padding,
                    headers={"content-type": "application/json"},
                )
                promise = {"request_id": answer.json()["request_id"]}
                assert "metrics" in await told(client, "retrieve_future", promise)
            assert on_disk(tmp_path / "journal") > 80 << 20
            await made.keep_house()
            await made.retention.compact()
            assert on_disk(tmp_path / "journal") < 40 << 20
            gone = await client.post("retrieve_future", json=promise)
            assert gone.status_code == 410
            # The requests that built the model are needed as long as it lives.
            body = {"model_id": model, "seq_id": 10, "forward_input": inputs()}
            assert "metrics" in await told(client, "forward", body)
        async with housed(tmp_path) as (_, client):
            body = {"model_id": model, "seq_id": 11, "forward_input": inputs()}
            assert "metrics" in await told(client, "forward", body)

    asyncio.run(scenario())


def test_an_ended_session_frees_its_disk_space(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path, snapshot_every=0.0) as (made, client):
            model = await new_model(client)
            session = model.partition(":")[0]
            for number in range(1, 40, 2):
                passed = {"model_id": model, "forward_backward_input": inputs()}
                await told(client, "forward_backward", passed | {"seq_id": number})
                step: dict[str, Any] = {"model_id": model, "adam_params": {}}
                await told(client, "optim_step", step | {"seq_id": number + 1})
            unnamed = {"model_id": model, "seq_id": 41, "sampling_session_seq_id": 0}
            await told(client, "save_weights_for_sampler", unnamed)
            named = {"model_id": model, "seq_id": 42, "path": "kept"}
            await told(client, "save_weights", named)
            assert on_disk(tmp_path / "samplers") > 0
            kept = on_disk(tmp_path / "checkpoints")
            assert kept > 0
            await told(client, f"sessions/{session}/finish", {"reason": {"type": "success"}})
            await made.models.stop()  # a snapshot in progress is deleted with its model
            assert on_disk(tmp_path / "samplers") == 0
            assert on_disk(tmp_path / "snapshots") == 0
            assert on_disk(tmp_path / "checkpoints") == kept

    asyncio.run(scenario())


def test_a_snapshot_written_after_its_session_ended_is_deleted(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path, snapshot_every=0.0) as (made, client):
            model = await new_model(client)
            session = model.partition(":")[0]
            snapshot = made.engine.trainer.snapshot

            async def ends_first(model_id: str, directory: Path) -> int:
                size: int = await snapshot(model_id, directory)
                # It is still being written when the session ends.
                shutil.copytree(directory, tmp_path / "late")
                await told(client, f"sessions/{session}/finish", {"reason": {"type": "success"}})
                shutil.copytree(tmp_path / "late", directory)
                return size

            made.engine.trainer.snapshot = ends_first
            await told(client, "optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
            await asyncio.gather(*made.models._tasks)
            assert (tmp_path / "late").is_dir()
            assert not list((tmp_path / "snapshots").iterdir())

    asyncio.run(scenario())


def test_snapshots_of_ended_models_are_deleted(place):
    place.start()
    place.stop()
    left = place.data_dir / "snapshots" / "session:train:0" / "7"
    left.mkdir(parents=True)
    place.start()
    assert not left.parent.exists()


def test_a_run_whose_session_ends_during_an_engine_restart_is_not_corrupted(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            session = model.partition(":")[0]
            made.engine._alive.clear()  # the engine died …
            body = {"model_id": model, "seq_id": 1, "adam_params": {}}
            answer = (await client.post("optim_step", json=body)).json()
            await told(client, f"sessions/{session}/finish", {"reason": {"type": "success"}})
            made.engine._worker.life += 1  # … and was restarted
            made.engine._alive.set()
            promise = {"request_id": answer["request_id"]}
            failed = await told_failure(client, promise)
            assert failed["category"] == "user"
            assert "unloaded when its session ended" in failed["error"]
            run = (await client.get(f"training_runs/{model}")).json()
            assert run["corrupted"] is False

    asyncio.run(scenario())


async def told_failure(client: httpx.AsyncClient, promise: dict[str, str]) -> dict[str, str]:
    answer = await client.post("retrieve_future", json=promise)
    content: dict[str, str] = answer.json()
    return content


def test_a_copy_of_a_corrupted_run_is_not_corrupted(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            saved = await told(
                client, "save_weights", {"model_id": model, "seq_id": 1, "path": "a"}
            )
            update = made.database.store.update_run
            await made.database(update, model, corrupted=True)
            copied = await told(client, "copy_weights", {"source_path": saved["path"]})
            copy = copied["tinker_path"].split("/")[2]
            assert (await client.get(f"training_runs/{copy}")).json()["corrupted"] is False

    asyncio.run(scenario())


def test_an_expired_checkpoint_is_removed_from_the_disk(tmp_path):
    moment = [datetime(2026, 5, 1, tzinfo=UTC)]

    async def scenario() -> None:
        async with housed(tmp_path, now=lambda: moment[0]) as (made, client):
            model = await new_model(client)
            body = {"model_id": model, "seq_id": 1, "path": "old", "ttl_seconds": 3600}
            await told(client, "save_weights", body)
            assert on_disk(tmp_path / "checkpoints") > 0
            moment[0] += timedelta(hours=1)
            await made.keep_house()
            assert on_disk(tmp_path / "checkpoints") == 0
            listed = (await client.get("checkpoints")).json()
            assert listed["checkpoints"] == []

    asyncio.run(scenario())


def test_an_interrupted_checkpoint_replacement_finishes_after_a_restart(tmp_path):
    async def scenario() -> None:
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            body = {"model_id": model, "path": "latest", "overwrite": True}
            await told(client, "save_weights", body | {"seq_id": 1})
            reached = asyncio.Event()

            async def stops(*_: Any, **__: Any) -> None:
                older = made.checkpoints.place(model, "training", "latest")
                older.rename(older.with_name(".older"))  # the new one is not in place yet
                reached.set()
                await asyncio.Event().wait()

            made.engine.trainer.save_state = stops
            answer = (await client.post("save_weights", json=body | {"seq_id": 2})).json()
            await reached.wait()
        async with housed(tmp_path) as (_, client):
            promise = {"request_id": answer["request_id"]}
            path = (await told(client, "retrieve_future", promise))["path"]
            session = model.partition(":")[0]
            loading = {"session_id": session, "model_seq_id": 1, "path": path}
            assert "model_id" in await told(client, "load_weights", loading)

    asyncio.run(scenario())


@pytest.mark.heavy
def test_a_checkpoint_can_be_deleted_from_a_full_disk(served, tmp_path):
    """The space is freed even if the database cannot be changed."""
    with Api(served.url) as api:
        model = api.model()
        model.save("one")
        place = f"training_runs/{model.model_id}/checkpoints/weights/one"
        with full(served.process.pid):
            assert api.ask("DELETE", place).status_code in {200, 507}
            assert on_disk(tmp_path / "checkpoints") == 0
        assert api.ask("DELETE", place).status_code in {200, 404}
        assert api.got("checkpoints")["checkpoints"] == []
        assert not list((tmp_path / "checkpoints" / model.model_id / "training").iterdir())
