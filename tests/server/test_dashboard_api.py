"""The read API of the dashboard: what was trained, logged and sampled, for the key that did it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.errors import NotFoundError
from tinkex.server.auth import Keys
from tinkex.server.dashboard import api as dashboard_api
from tinkex.server.dashboard import logged, static, store
from tinkex.server.dashboard.samples import (
    MAX_ALTERNATIVES,
    PAGE_ITEMS,
    SHOWN_ALTERNATIVES,
    SHOWN_CHARACTERS,
    SHOWN_TOKENS,
)
from tinkex.server.serving.vocabulary import Vocabulary
from tinkex.testing import service
from tinkex.types import LogRequest

from .api import TINY, Api, datum
from .test_storage import housed, new_model, told

SCRIPT = "<script>alert(1)</script>"


def local(api, path, **query):
    answer = api.http.get(f"/local/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def log(api, run, *entries):
    return api.post(f"training_runs/{run}/log", {"entries": list(entries)})


def curve(api, run, name, **query):
    return local(api, f"runs/{run}/metrics", **query)["metrics"][name]


@pytest.fixture
def model(api):
    return api.model()


# -- what the service knows itself ---------------------------------------------------------------------


def test_every_step_is_a_point_of_each_metric(api, model):
    losses = [model.step() for _ in range(5)]
    found = local(api, f"runs/{model.model_id}/metrics")
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= set(found["names"])
    loss = found["metrics"]["loss"]
    assert loss["x"] == [1, 2, 3, 4, 5]
    assert loss["y"] == pytest.approx([each / 3 for each in losses])  # three tokens of weight one
    assert found["metrics"]["learning_rate"]["y"] == pytest.approx([0.01] * 5)
    assert curve(api, model.model_id, "loss", axis="tokens")["x"] == [3, 6, 9, 12, 15]
    row = local(api, f"runs/{model.model_id}")
    assert (row["steps"], row["tokens"]) == (5, 15)
    assert row["loss"] == pytest.approx(losses[-1] / 3)
    assert row["spark"] == pytest.approx([each / 3 for each in losses])


def test_passes_before_a_step_are_one_point_weighted_as_the_loss_is(api, model):
    first = api.retrieve(model.forward_backward([datum(weights=[1, 0, 0])]))
    second = api.retrieve(model.forward_backward([datum(weights=[0, 1, 1])]))
    api.retrieve(model.optim_step())
    total = sum(each["metrics"]["loss:sum"] for each in (first, second))
    assert curve(api, model.model_id, "loss")["y"] == pytest.approx([total / 3])


def test_a_forward_pass_is_no_training(api, model):
    model.logprobs()
    row = local(api, f"runs/{model.model_id}")
    assert (row["steps"], row["tokens"], row["metrics"]) == (0, 0, [])


def test_the_list_has_state_size_and_tags_of_every_run(api):
    session = api.session(tags=["nightly", SCRIPT], user_metadata={"team": "blue"})
    model = api.model(session, user_metadata={"name": SCRIPT})
    model.step()
    model.save("kept")
    listed = local(api, "runs")
    row = next(run for run in listed["runs"] if run["id"] == model.model_id)
    assert row["name"] == SCRIPT
    assert row["tags"] == ["nightly", SCRIPT]
    assert (row["base_model"], row["rank"], row["owner"]) == (TINY, 8, "local")
    assert row["state"]["kind"] == "training"
    assert row["checkpoints"] == 1
    assert row["bytes"] > 1000
    assert listed["total"] >= 1
    config = local(api, f"runs/{model.model_id}")["config"]
    assert config["optimizer.learning_rate"] == 0.01
    assert config["lora.rank"] == 8
    assert config["loss"] == "cross_entropy"
    assert config["session.team"] == "blue"


def test_a_waiting_run_shows_what_it_waits_for(api, model):
    model.step()
    model.next_seq += 1  # a request that never comes
    model.send("optim_step", adam_params={})
    row = local(api, f"runs/{model.model_id}")
    assert row["state"]["kind"] == "waiting"
    assert "request 3 of its client" in row["state"]["about"]
    assert [each["number"] for each in row["queue"]["requests"]] == [4]


def test_checkpoints_are_listed_newest_first(api, model):
    paths = [model.save("first"), model.save("second", ttl_seconds=3600)]
    found = local(api, f"runs/{model.model_id}/checkpoints")["checkpoints"]
    assert [each["path"] for each in found] == paths[::-1]
    assert found[0]["expires_at"] > found[0]["created_at"]
    assert found[1]["expires_at"] is None


# -- what a client logs --------------------------------------------------------------------------------


def test_logged_metrics_are_curves_beside_those_of_the_service(api, model):
    model.step()
    answer = log(
        api,
        model.model_id,
        {"step": 1, "metrics": {"reward": 0.25, "kl": 1e-3}},
        {"step": 2, "metrics": {"reward": 0.5}},
    )
    assert answer.json() == {"metrics": 3, "samples": 0}
    found = local(api, f"runs/{model.model_id}/metrics", names="reward\nkl")["metrics"]
    assert found["reward"]["x"] == [1, 2]
    assert found["reward"]["y"] == [0.25, 0.5]
    assert list(found) == ["reward", "kl"]


def test_values_that_are_not_finite_are_marked_and_the_curve_continues(api, model):
    values = [1.0, "nan", "inf", "-inf", 2.0]
    entries = [{"step": step, "metrics": {"loss": value}} for step, value in enumerate(values)]
    assert log(api, model.model_id, *entries).status_code == 200
    found = curve(api, model.model_id, "loss")
    assert found["y"] == [1.0, None, None, None, 2.0]
    assert found["odd"] == [[1, "NaN", 1], [2, "∞", 1], [3, "−∞", 1]]
    assert math.isclose(local(api, f"runs/{model.model_id}")["loss"], 2.0)


def test_huge_and_tiny_values_are_read_as_they_were_logged(api, model):
    values = [1e39, -1e308, 1e308, 1e308, 1e-50]
    entries = [{"step": step, "metrics": {"loss": value}} for step, value in enumerate(values)]
    assert log(api, model.model_id, *entries).status_code == 200
    assert curve(api, model.model_id, "loss")["y"] == values
    few = curve(api, model.model_id, "loss", width=2)
    assert all(each is not None for name in ("y", "low", "high") for each in few[name])
    spark = local(api, f"runs/{model.model_id}")["spark"]
    assert spark == values


def test_long_curves_are_reduced_and_zoomed(api, model):
    values = [math.sin(step / 50) for step in range(5_000)]
    for start in range(0, 5_000, 1_000):
        rows = [
            {"step": step, "metrics": {"wave": values[step]}}
            for step in range(start, start + 1_000)
        ]
        assert log(api, model.model_id, *rows).status_code == 200
    whole = curve(api, model.model_id, "wave", width=100)
    assert len(whole["x"]) <= 100
    assert max(whole["high"]) == pytest.approx(max(values))
    part = curve(api, model.model_id, "wave", start=100, end=119, width=100)
    assert part["x"] == list(range(100, 120))
    assert "low" not in part


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"step": -1}, "step"),
        ({"step": 1 << 60}, "step"),
        ({"metrics": {}}, "step"),
        ({"step": 1, "time": "nan"}, "time"),
        ({"step": 1, "time": "Infinity"}, "time"),
        ({"step": 1, "time": 1e300}, "time"),
        ({"step": 1, "metrics": {"a": "many"}}, "metrics"),
        ({"step": 1, "metrics": {"a\u0000b": 1}}, "metrics"),
        ({"step": 1, "metrics": {f"m{n}": 1 for n in range(201)}}, "metrics"),
        ({"step": 1, "samples": [{"prompt": "x"}]}, "text"),
        ({"step": 1, "samples": [{"tokens": [1, 2], "logprobs": [0.1]}]}, "logprobs"),
    ],
)
def test_invalid_log_entry_is_refused_with_the_name_of_its_field(api, model, entry, field):
    answer = log(api, model.model_id, entry)
    assert answer.status_code in {400, 422}
    assert field in answer.json()["detail"] + str(answer.json().get("field"))
    assert local(api, f"runs/{model.model_id}")["metrics"] == []


def test_a_bad_name_of_a_metric_is_refused_with_the_number_of_its_entry(api, model):
    good, bad = {"good": 1.0}, {"good": 1.0, "bad\n": 1.0}
    entries = [{"step": step, "metrics": names} for step, names in enumerate((good, good, bad))]
    refused = log(api, model.model_id, *entries)
    assert refused.status_code == 400
    assert refused.json()["field"] == "entries.2.metrics"


def test_a_run_that_does_not_exist_is_not_found(api):
    assert log(api, "nobody:train:0", {"step": 1}).status_code == 404
    for path in ("", "/metrics", "/checkpoints", "/samples", "/sample_steps", "/samples/0"):
        answer = api.http.get(f"/local/runs/nobody:train:0{path}")
        assert answer.status_code == 404
        assert "nobody:train:0" in answer.json()["detail"]


def test_metrics_beyond_those_of_one_answer_are_in_the_next(api, model):
    names = [f"metric {number:03}" for number in range(120)]
    assert log(api, model.model_id, {"step": 1, "metrics": dict.fromkeys(names, 1.0)}).is_success
    parts = [local(api, f"runs/{model.model_id}/metrics", offset=n) for n in (0, 50, 100, 150)]
    assert [name for part in parts for name in part["metrics"]] == names
    assert all(part["names"] == names for part in parts)
    assert [len(part["metrics"]) for part in parts] == [50, 50, 20, 0]


def test_ten_thousand_metrics_in_one_report_are_refused(api, model):
    many = {f"metric {number}": 1.0 for number in range(10_000)}
    answer = log(api, model.model_id, {"step": 1, "metrics": many})
    assert answer.status_code in {400, 422}
    assert "at most 200 different metrics" in answer.json()["detail"]
    assert local(api, f"runs/{model.model_id}/metrics")["names"] == []


@pytest.mark.parametrize("query", ["width=1", "offset=-1", "width=9999", "axis=price", "start=x"])
def test_bad_plots_are_refused(api, model, query):
    answer = api.http.get(f"/local/runs/{model.model_id}/metrics?{query}")
    assert answer.status_code in {400, 422}
    assert query.partition("=")[0] in answer.text


# -- samples -------------------------------------------------------------------------------------------


def test_samples_are_found_by_step_and_sorted_by_reward(api, model):
    samples = [
        {"prompt": "2+2?", "text": str(number), "reward": reward, "group": "sum"}
        for number, reward in ((3, 0.0), (4, 1.0), (5, None))
    ]
    log(api, model.model_id, {"step": 1, "samples": samples}, {"step": 7, "samples": samples[:1]})
    steps = local(api, f"runs/{model.model_id}/sample_steps")["steps"]
    assert steps == [
        {"step": 1, "samples": 3, "reward": 0.5},
        {"step": 7, "samples": 1, "reward": 0.0},
    ]
    path = f"runs/{model.model_id}/samples"
    assert local(api, path)["step"] == 7

    def texts(**query):
        return [sample["text"] for sample in local(api, path, step=1, **query)["samples"]]

    assert texts() == ["3", "4", "5"]
    assert texts(order="best") == ["4", "3", "5"]
    assert texts(order="worst") == ["3", "4", "5"]
    assert texts(limit=1, offset=1) == ["4"]


def test_tokens_get_their_texts_from_the_tokenizer(api, model):
    sample = {
        "tokens": [40, 41, 42],
        "logprobs": [-0.5, "-inf", None],
        "alternatives": [[[40, -0.5], [43, -1.5]], [], []],
    }
    log(api, model.model_id, {"step": 1, "samples": [sample]})
    found = local(api, f"runs/{model.model_id}/samples")["samples"][0]
    assert len(found["token_texts"]) == 3
    assert "".join(found["token_texts"]) == found["text"]
    assert found["alternatives"][0][0] == [found["token_texts"][0], -0.5]


def test_a_sample_of_ten_megabytes_is_cut_and_can_be_downloaded_whole(api, model):
    text = "ab" * (5 << 20)
    assert log(api, model.model_id, {"step": 1, "samples": [{"text": text}]}).status_code == 200
    found = local(api, f"runs/{model.model_id}/samples")["samples"][0]
    assert found["cut"] is True
    assert found["text"] == text[:SHOWN_CHARACTERS]
    assert found["bytes"] > len(text)
    whole = api.http.get(f"/local/runs/{model.model_id}/samples/{found['number']}")
    assert whole.json()["text"] == text
    assert whole.headers["content-disposition"].startswith("attachment")
    assert api.http.get(f"/local/runs/{model.model_id}/samples/9").status_code == 404
    assert local(api, f"runs/{model.model_id}")["bytes"] > 10 << 20


def test_a_short_sample_is_not_cut_and_many_tokens_are(api, model):
    tokens = list(range(SHOWN_TOKENS + 1))
    log(api, model.model_id, {"step": 1, "samples": [{"text": "a"}, {"tokens": tokens}]})
    short, long = local(api, f"runs/{model.model_id}/samples")["samples"]
    assert short["cut"] is False
    assert long["cut"] is True
    assert len(long["tokens"]) == len(long["token_texts"]) == SHOWN_TOKENS


def test_what_is_known_of_a_run_goes_when_it_is_closed_and_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_OPEN", 2)

    async def scenario():
        async with housed(tmp_path) as (made, client):
            models = [await new_model(client) for _ in range(6)]
            entry = {"step": 1, "samples": [{"text": "a"}]}
            passing = {"data": [datum()], "loss_fn": "cross_entropy"}
            for seq in (1, 3):
                for model in models:
                    named = {"model_id": model}
                    body = {**named, "seq_id": seq, "forward_backward_input": passing}
                    await told(client, "forward_backward", body)
                    step = {**named, "seq_id": seq + 1, "adam_params": {}}
                    await told(client, "optim_step", step)
                    await told(client, f"training_runs/{model}/log", {"entries": [entry]})
            listed = (await client.get("http://localhost/local/runs")).json()["runs"]
            assert [(row["steps"], row["tokens"], len(row["spark"])) for row in listed] == [
                (2, 6, 2)
            ] * 6
            hanging = (
                made.run_metrics._runs,
                made.recorder._progress,
                made.captured._kept,
                made.captured._logged,
            )
            assert all(len(each) <= 2 for each in hanging)

    asyncio.run(scenario())


def test_a_page_shows_few_alternatives_of_a_token_and_few_samples_of_many(api, model):
    wide = [[[5, -1.0]] * (SHOWN_ALTERNATIVES + 9)] * 900
    entry = {"step": 1, "samples": [{"tokens": [5] * 900, "alternatives": wide}]}
    for _ in range(24):
        assert log(api, model.model_id, entry).status_code == 200
    first = local(api, f"runs/{model.model_id}/samples", limit=200)
    assert first["total"] == 24
    assert all(sample["cut"] for sample in first["samples"])
    rows = [row for sample in first["samples"] for row in sample["alternatives"]]
    assert {len(row) for row in rows} == {SHOWN_ALTERNATIVES}
    assert len(rows) * SHOWN_ALTERNATIVES < 1.1 * PAGE_ITEMS
    shown = len(first["samples"])
    assert 0 < shown < 24
    rest = local(api, f"runs/{model.model_id}/samples", limit=200, offset=shown)
    assert shown + len(rest["samples"]) == 24
    whole = api.http.get(f"/local/runs/{model.model_id}/samples/0").json()
    assert whole["alternatives"] == wide


def test_a_report_with_too_many_alternatives_of_a_token_is_refused_by_name(api, model):
    def report(count):
        sample = {"tokens": [5, 5], "alternatives": [[], [[5, -1.0]] * count]}
        return log(api, model.model_id, {"step": 1, "samples": [sample]})

    assert report(MAX_ALTERNATIVES).status_code == 200
    refused = report(MAX_ALTERNATIVES + 1)
    assert refused.status_code == 400
    assert refused.json()["field"] == "entries.0.samples.0.alternatives"


def test_texts_of_tokens_are_looked_up_and_pages_encoded_in_the_turn_of_their_key(
    tmp_path, monkeypatch
):
    threads = set()

    def noted(real):
        def call(*arguments):
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return real(*arguments)

        return call

    monkeypatch.setattr(Vocabulary, "token_text", noted(Vocabulary.token_text))
    monkeypatch.setattr(dashboard_api, "_json", noted(dashboard_api._json))

    async def scenario():
        async with housed(tmp_path) as (_, client):
            model = await new_model(client)
            entry = {"step": 1, "samples": [{"tokens": [5, 6]}]}
            await told(client, f"training_runs/{model}/log", {"entries": [entry]})
            url = f"http://localhost/local/runs/{model}/samples"
            for _ in range(2):  # the vocabulary is loaded, and then known
                page = (await client.get(url)).json()
                assert len(page["samples"][0]["token_texts"]) == 2

    asyncio.run(scenario())
    assert threads == {"tinkex-reading"}


def test_a_few_samples_of_each_step_are_kept_without_being_logged(api):
    model = api.model()
    model.step()
    path = model.save("mid", "save_weights_for_sampler")
    sampler = api.sampler(model.session_id, model_path=path)
    drawn = sampler.tokens(num_samples=5) + sampler.tokens(num_samples=5)
    api.sampler(model.session_id, 1, base_model=TINY).tokens()  # not of this run
    found = local(api, f"runs/{model.model_id}/samples")
    assert (found["step"], found["total"]) == (1, 8)
    assert [sample["tokens"] for sample in found["samples"]] == drawn[:8]
    assert all(len(sample["logprobs"]) == 5 for sample in found["samples"])
    assert found["samples"][0]["prompt_tokens"] == [5, 6, 7]
    log(api, model.model_id, {"step": 1, "samples": [{"text": "mine"}]})
    model.step()
    sampler.tokens()
    assert local(api, f"runs/{model.model_id}/sample_steps")["steps"][-1]["step"] == 1


@pytest.fixture
def two_keys(tmp_path: Path) -> Iterator[tuple[Api, Api]]:
    """Two keys of one service."""
    file = tmp_path / "keys"
    file.write_text("ann: tml-ann-key-1\nbob: tml-bob-key-1\n")
    with (
        service("fake", keys=Keys.from_file(file)) as started,
        Api(started.url, "tml-ann-key-1") as ann,
        Api(started.url, "tml-bob-key-1") as bob,
    ):
        yield ann, bob


def test_samples_of_published_weights_are_not_kept_in_the_run_of_another_key(two_keys):
    ann, bob = two_keys
    model = ann.model()
    path = model.save("open", "save_weights_for_sampler")
    checkpoint = f"training_runs/{model.model_id}/checkpoints/sampler_weights/open"
    assert ann.post(f"{checkpoint}/publish").status_code == 200
    assert bob.sampler(model_path=path).tokens()
    assert ann.sampler(model_path=path).tokens()
    steps = local(ann, f"runs/{model.model_id}/sample_steps")["steps"]
    assert [each["samples"] for each in steps] == [1]


# -- deleting ------------------------------------------------------------------------------------------


def ended(api, model):
    """Finish the session of a run, and wait until its model is unloaded."""
    finish = {"reason": {"type": "success"}}
    assert api.post(f"sessions/{model.session_id}/finish", finish).status_code == 200
    while local(api, f"runs/{model.model_id}")["state"]["kind"] != "ended":
        pass


@pytest.fixture
def alone():
    """A service without other runs."""
    with service("fake") as running, Api(running.url) as user:
        yield user


def test_deleted_run_is_gone_with_its_metrics_samples_and_checkpoints(alone):
    api, model = alone, alone.model()
    model.step()
    path = model.save("final", "save_weights_for_sampler")
    log(api, model.model_id, {"step": 1, "metrics": {"a": 1.0}, "samples": [{"text": "mine"}]})
    run = f"/local/runs/{model.model_id}"
    refused = api.http.delete(run)
    assert refused.status_code == 409
    assert "Close the client" in refused.json()["detail"]
    assert refused.headers["x-should-retry"] == "false"  # clients would repeat it for a minute
    ended(api, model)
    local(api, run.removeprefix("/local/") + "/metrics")  # waits until everything is written
    assert local(api, "service")["disk"]["metrics"] > 0
    with Listener(api) as listener:
        gone = api.http.delete(run)
        assert gone.status_code == 200, gone.text
        listener.until(lambda name, content: name == "gone" and model.model_id in content["runs"])
    assert (gone.json()["checkpoints"], gone.json()["kept"]) == (1, False)
    assert gone.json()["metric_bytes"] > 0
    assert local(api, "service")["disk"]["metrics"] == 0
    for part in ("", "/metrics", "/checkpoints", "/samples"):
        assert api.http.get(run + part).status_code == 404
    assert api.http.delete(run).status_code == 404
    assert model.model_id not in [each["id"] for each in local(api, "runs")["runs"]]
    assert api.get(f"training_runs/{model.model_id}").status_code == 404
    weights = api.post("weights_info", {"tinker_path": path})
    assert weights.status_code in {400, 404, 422}


def test_a_report_that_comes_while_its_run_is_deleted_leaves_nothing(tmp_path, monkeypatch):
    """Before, the directory of the run was there again, and no row that its owner could delete."""

    async def scenario():
        async with housed(tmp_path) as (made, client):
            model = await new_model(client)
            entry = {"step": 1, "metrics": {"a": 1.0}, "samples": [{"text": "late"}]}
            report = {"entries": [entry]}
            await told(client, f"training_runs/{model}/log", report)
            finish = {"reason": {"type": "success"}}
            await told(client, f"sessions/{model.partition(':')[0]}/finish", finish)
            url = f"http://localhost/local/runs/{model}"
            while (await client.get(url)).json()["state"]["kind"] != "ended":
                pass
            checked, deleted = asyncio.Event(), asyncio.Event()

            async def wait_for_deletion(*_):
                checked.set()
                await deleted.wait()

            monkeypatch.setattr(made.run_metrics, "make_room", wait_for_deletion)
            reporting = asyncio.ensure_future(
                client.post(f"training_runs/{model}/log", json=report)
            )
            await checked.wait()  # its row was there, and nothing is written yet
            assert (await client.delete(url)).status_code == 200
            deleted.set()
            assert (await reporting).status_code == 404
            files = made.run_metrics.directory("local", model)
            assert not list(files.parent.iterdir())
            with pytest.raises(NotFoundError):
                await logged.receive(made, "local", model, LogRequest.model_validate(report))
            assert not list(files.parent.iterdir())
            assert made.quotas.metric_bytes.used("local") == 0

    asyncio.run(scenario())


def test_checkpoints_of_a_deleted_run_can_be_kept(api):
    model = api.model()
    model.step()
    model.save("final", "save_weights_for_sampler")
    ended(api, model)
    gone = api.http.delete(f"/local/runs/{model.model_id}", params={"keep_checkpoints": True})
    assert (gone.json()["checkpoints"], gone.json()["kept"]) == (0, True)
    found = local(api, f"runs/{model.model_id}")
    assert (found["checkpoints"], found["steps"], found["metrics"], found["loss"]) == (
        1,
        0,
        [],
        None,
    )


def test_run_of_another_key_cannot_be_deleted(two_keys):
    ann, bob = two_keys
    model = ann.model()
    model.step()
    ended(ann, model)
    assert bob.http.delete(f"/local/runs/{model.model_id}").status_code == 404
    assert local(ann, f"runs/{model.model_id}")["steps"] == 1


def test_deleted_run_stays_deleted_after_a_restart(tmp_path):
    with service("fake", data_dir=tmp_path) as started, Api(started.url) as api:
        model = api.model()
        model.step()
        ended(api, model)
        assert api.http.delete(f"/local/runs/{model.model_id}").status_code == 200
    with service("fake", data_dir=tmp_path) as started, Api(started.url) as api:
        assert local(api, "runs")["runs"] == []
        assert not list((tmp_path / "metrics").rglob("*.bin"))


async def finished_run(made, client):
    """A run with a step and two checkpoints whose session has ended."""

    async def ask(path, /, **body):
        answer = await client.post(path, json=body)
        told = answer.json()
        while answer.status_code == 408 or "request_id" in told:
            request = {"request_id": told["request_id"]}
            answer = await client.post("retrieve_future", json=request)
            told = answer.json()
        assert answer.status_code == 200, answer.text
        return told

    session = (await ask("create_session", tags=[], sdk_version="0"))["session_id"]
    lora = {"rank": 1}
    run = (
        await ask(
            "create_model", session_id=session, model_seq_id=0, base_model=TINY, lora_config=lora
        )
    )["model_id"]
    inputs = {"data": [datum()], "loss_fn": "cross_entropy"}
    await ask("forward_backward", model_id=run, seq_id=1, forward_backward_input=inputs)
    await ask("optim_step", model_id=run, seq_id=2, adam_params={"learning_rate": 0.01})
    for number, name in ((3, "a"), (4, "b")):
        await ask("save_weights", model_id=run, seq_id=number, path=name)
    await ask(f"sessions/{session}/finish", reason={"type": "success"})
    return run


def test_run_is_deleted_while_the_ttl_of_a_checkpoint_changes(tmp_path):
    async def scenario():
        async with housed(tmp_path) as (made, client):
            run = await finished_run(made, client)
            changes: list[asyncio.Future[None]] = []

            def change(_):
                """When one checkpoint has been deleted, change the other: it has been listed before."""
                if not changes:
                    changes.append(asyncio.ensure_future(prolong()))

            async def prolong():
                for row in await made.database(made.database.store.checkpoints_of_run, run):
                    await made.checkpoints.set_ttl(row, 3600)

            made.checkpoints.on_change.append(change)
            gone = await client.delete(f"http://localhost/local/runs/{run}")
            assert gone.status_code == 200, gone.text
            assert gone.json()["checkpoints"] == 2
            assert changes
            assert not list((tmp_path / "checkpoints").glob("*/*/*"))
            assert (await client.get(f"training_runs/{run}")).status_code == 404

    asyncio.run(scenario())


def test_run_whose_checkpoints_stay_loses_nothing(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path) as (made, client):
            run = await finished_run(made, client)

            async def replaced(*_, **__):
                """What a deletion does if another checkpoint of the same name appears meanwhile."""

            monkeypatch.setattr(made.checkpoints, "delete", replaced)
            refused = await client.delete(f"http://localhost/local/runs/{run}")
            assert refused.status_code == 409
            assert "still being written" in refused.json()["detail"]
            kept = (await client.get(f"http://localhost/local/runs/{run}")).json()
            assert (kept["checkpoints"], kept["steps"]) == (2, 1)

    asyncio.run(scenario())


# -- events --------------------------------------------------------------------------------------------


class Listener:
    """Reads the events of a service in a thread."""

    def __init__(self, api):
        self._api = api
        self.events = []
        self.heard = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self.heard.wait(60)
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join(60)

    def _read(self):
        with self._api.http.stream("GET", "/local/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            name = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.events.append((name, json.loads(line.removeprefix("data: "))))
                    self.heard.set()
                if self._closed.is_set():
                    return

    def until(self, fits):
        for _ in range(200):
            self.heard.clear()
            for name, content in list(self.events):
                if fits(name, content):
                    return content
            assert self.heard.wait(60), self.events
        raise AssertionError(self.events)


@pytest.mark.heavy
def test_open_pages_get_an_event_for_each_step(running, api):
    model = api.model()
    with Api(running.url) as page, Listener(page) as listener:
        assert listener.events[0][0] == "hello"
        model.step()

        def shows_the_step(name, content):
            return name == "runs" and any(
                run["id"] == model.model_id and run["steps"] == 1 and "metrics" in run["changed"]
                for run in content["runs"]
            )

        listener.until(shows_the_step)


def row_of(run_id, content):
    return next((run for run in content.get("runs", ()) if run["id"] == run_id), None)


def points_of(listener, run_id):
    """The points of all events of a run so far."""
    lines = [row_of(run_id, content) for name, content in list(listener.events) if name == "runs"]
    return [point for line in lines if line is not None for point in line.get("points") or ()]


@pytest.mark.heavy
def test_points_of_events_continue_the_curves_that_were_read(alone):
    api, model = alone, alone.model()
    model.step()
    model.step()
    before = local(api, f"runs/{model.model_id}/metrics")["metrics"]
    assert before["loss"]["points"] == 2
    with Listener(api) as listener:
        for _ in range(3):
            model.step()
        listener.until(lambda *_: len(points_of(listener, model.model_id)) >= 3)
    found = points_of(listener, model.model_id)
    after = local(api, f"runs/{model.model_id}/metrics")["metrics"]
    for name, curve in after.items():
        told = [point["values"][name] for point in found]
        known = before[name]["points"]
        assert [number for number, _ in told] == [known, known + 1, known + 2]
        assert before[name]["y"] + [value for _, value in told] == pytest.approx(curve["y"])
        assert before[name]["x"] + [point["step"] for point in found] == curve["x"]
    assert [point["tokens"] for point in found] == [9, 12, 15]


@pytest.mark.heavy
def test_an_event_without_room_for_the_points_says_so(alone):
    api, model = alone, alone.model()
    with Listener(api) as listener:
        entries = [{"step": step, "metrics": {"many": 1.0}} for step in range(6_000)]
        assert log(api, model.model_id, *entries).status_code == 200

        def says_so(name, content):
            run = row_of(model.model_id, content) if name == "runs" else None
            return run is not None and "metrics" in run["changed"] and run["points"] is None

        listener.until(says_so)
    assert curve(api, model.model_id, "many")["points"] == 6_000


@pytest.mark.heavy
def test_the_small_curve_of_a_run_that_trains_ends_with_its_last_step(alone):
    """Even where it has no pixel of its own for every step."""
    api, model = alone, alone.model()
    model.step()
    entries = [{"step": step, "metrics": {"loss": 1.0}} for step in range(2, 62)]
    assert log(api, model.model_id, *entries).is_success
    assert curve(api, model.model_id, "loss")["points"] == 61
    assert local(api, f"runs/{model.model_id}")["spark"][-1] == 1.0
    with Listener(api) as listener:
        assert log(api, model.model_id, {"step": 62, "metrics": {"loss": 5.0}}).is_success

        def has_the_step(name, content):
            run = row_of(model.model_id, content) if name == "runs" else None
            return run is not None and run["loss"] == 5.0

        heard = row_of(model.model_id, listener.until(has_the_step))
    assert (heard["state"]["kind"], heard["spark"][-1]) == ("training", 5.0)


@pytest.mark.heavy
def test_new_samples_are_told_apart_from_metrics(alone):
    api, model = alone, alone.model()
    with Listener(api) as listener:
        log(api, model.model_id, {"step": 1, "samples": [{"text": "mine"}]})

        def tells_of_samples(name, content):
            run = row_of(model.model_id, content) if name == "runs" else None
            return run is not None and "samples" in run["changed"]

        heard = row_of(model.model_id, listener.until(tells_of_samples))
    assert "metrics" not in heard["changed"]
    assert "points" not in heard


@pytest.mark.heavy
def test_points_of_one_key_never_reach_another(two_keys):
    ann, bob = two_keys
    annas, bobs = ann.model(), bob.model()
    with Listener(bob) as listener, Listener(ann) as other:
        for _ in range(3):
            annas.step()
            bobs.step()
            log(ann, annas.model_id, {"step": 1, "metrics": {"of ann": 1.0}})
        listener.until(lambda *_: len(points_of(listener, bobs.model_id)) >= 3)
        other.until(lambda *_: len(points_of(other, annas.model_id)) >= 6)
    assert annas.model_id not in str(listener.events)
    assert "of ann" not in str(listener.events)
    assert bobs.model_id not in str(other.events)


@pytest.mark.heavy
def test_events_have_the_checkpoints_as_they_are_now(alone):
    api, model = alone, alone.model()

    def shown(listener):
        lines = [row_of(model.model_id, content) for _, content in list(listener.events)]
        return next((line["checkpoints"] for line in reversed(lines) if line is not None), None)

    with Listener(api) as listener:
        model.step()
        listener.until(lambda *_: shown(listener) == 0)
        model.save("first", "save_weights_for_sampler")
        model.save("second")
        listener.until(lambda *_: shown(listener) == 2)
        where = f"/api/v1/training_runs/{model.model_id}/checkpoints/sampler_weights/first"
        assert api.http.delete(where).is_success
        model.step()
        listener.until(lambda *_: shown(listener) == 1)


def test_a_pass_without_a_step_gives_a_page_nothing_to_draw(alone):
    api, model = alone, alone.model()
    model.step()
    local(api, f"runs/{model.model_id}/metrics")  # waits until everything is written
    with Listener(api) as listener:
        api.retrieve(model.forward_backward())

        def shows_the_pass(name, content):
            return name == "runs" and any(run["tokens"] > 4 for run in content["runs"])

        heard = listener.until(shows_the_pass)
    assert [run["changed"] for run in heard["runs"]] == [["state"]]
    assert heard["runs"][0]["queued"] == 0


# -- playground ----------------------------------------------------------------------------------------


def play(api, **fields):
    answer = api.http.post("/local/playground", json={"model": TINY, "seed": 3, **fields})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    return [(block[0][7:], json.loads(block[1][6:])) for block in blocks]


def test_the_playground_streams_the_text_that_the_api_samples(api, model):
    from tokenizers import Tokenizer

    from tinkex.server.service import default_cache_dir

    directory = next(default_cache_dir().glob("tinkex--tiny-*"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    story = tokenizer.encode("the cat sat. ").ids * 4
    for _ in range(10):
        api.retrieve(model.forward_backward([datum(story[:-1], story[1:])]))
        api.retrieve(model.optim_step(0.5))
    path = model.save("story", "save_weights_for_sampler")
    prompt = "the"
    drawn = api.sampler(model_path=path).sample(
        tokenizer.encode(prompt).ids, max_tokens=12, temperature=0.5, seed=3
    )
    expected = tokenizer.decode(drawn["sequences"][0]["tokens"])
    assert expected.isascii()
    events = play(api, model=path, prompt=prompt, max_tokens=12, temperature=0.5)
    name, done = events[-1]
    assert name == "done"
    assert "".join(content["text"] for name, content in events if name == "token") == expected
    assert (done["tokens"], done["text"]) == (12, expected)
    assert len(done["alternatives"]) == len(done["texts"]) == 12
    assert all(len(row) == 5 for row in done["alternatives"])


def test_the_playground_answers_a_chat_and_plays_checkpoints(api, model):
    model.step()
    path = model.save("play", "save_weights_for_sampler")
    choices = local(api, "choices")
    assert TINY in choices["models"]
    assert path in [each["path"] for each in choices["checkpoints"]]
    events = play(api, model=path, messages=[{"role": "user", "content": SCRIPT}], max_tokens=3)
    assert events[-1][0] == "done"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "model": "no/model"}, "model"),
        ({"prompt": "a", "model": "tinker://nobody:train:0/weights/a"}, "checkpoint"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_field(api, fields, field):
    answer = api.http.post("/local/playground", json={"model": TINY, **fields})
    assert answer.status_code in {400, 404, 422}
    assert field in answer.text


@pytest.mark.parametrize(
    ("status", "content", "media"),
    [
        (
            415,
            b'{"model": "tinkex/tiny", "prompt": "a"}',
            "text/plain",
        ),  # as a foreign page can send
        (413, b" " * ((4 << 20) + 1), "application/json"),
        (413, b"[" * 2_000, "application/json"),
    ],
)
def test_a_bad_body_of_the_playground_is_refused(api, status, content, media):
    answer = api.http.post("/local/playground", content=content, headers={"content-type": media})
    assert answer.status_code == status, answer.text


# -- the service ---------------------------------------------------------------------------------------


def test_the_service_page_has_engine_queue_disk_and_failures(api, model):
    model.step()
    failed = model.do("load_weights", path="tinker://nobody:train:0/weights/a")
    assert "error" in failed
    found = local(api, "service")
    assert found["engine"]["kind"] == "fake"
    assert found["models"][0]["name"] == TINY
    assert found["disk"]["free"] > 0
    assert found["usage"]["training"] >= 3
    newest = found["failures"][0]
    assert newest["scope"] == model.model_id
    assert newest["message"]
    assert "time" in found["history"]


# -- the page ------------------------------------------------------------------------------------------


def test_browsers_get_the_dashboard_and_programs_the_plain_page(api):
    browser = api.http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert browser.headers["content-type"] == "text/html; charset=utf-8"
    policy = browser.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "set-cookie" not in browser.headers
    assert "Base models" in api.http.get("/").text
    assert "Base models" in api.http.get("/about").text


def test_files_of_the_page_are_compressed_and_revalidated(api):
    for name, asset in static.assets().items():
        answer = api.http.get(f"/static/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content == asset.content
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = api.http.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "../api.py", "%2e%2e/api.py", "", "static/../x"])
def test_other_files_are_not_served(api, name):
    assert api.http.get(f"/static/{name}").status_code == 404


def test_all_files_together_are_small():
    """A page on a slow line: 150 kB with everything it ever loads."""
    assert sum(len(asset.compressed) for asset in static.assets().values()) <= 150_000


def test_service_with_keys_refuses_reads_without_a_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-ann-key-1\nbob: tml-bob-key-1\n")
    with service("fake", keys=Keys.from_file(file)) as started:
        with Api(started.url) as nobody:
            for path in ("runs", "service", "events", "choices", "runs/x"):
                assert nobody.http.get(f"/local/{path}").status_code == 401
            assert nobody.http.post("/local/playground", json={}).status_code == 401
            assert nobody.http.get("/", headers={"accept": "text/html"}).status_code == 200
        with Api(started.url, "tml-ann-key-1") as ann, Api(started.url, "tml-bob-key-1") as bob:
            model = ann.model()
            model.step()
            assert [run["id"] for run in local(ann, "runs")["runs"]] == [model.model_id]
            assert local(bob, "runs")["runs"] == []
            assert log(bob, model.model_id, {"step": 1}).status_code == 404
            assert local(bob, "service")["owner"] == "bob"


def test_metrics_continue_after_a_restart(tmp_path):
    with service("fake", data_dir=tmp_path) as started, Api(started.url) as api:
        model = api.model()
        first = model.step()
        passed = api.retrieve(model.forward_backward())
    with service("fake", data_dir=tmp_path) as started, Api(started.url) as api:
        model.api = api
        api.retrieve(model.optim_step())
        found = curve(api, model.model_id, "loss")
        assert found["x"] == [1, 2]
        second = passed["metrics"]["loss:sum"]
        assert found["y"] == pytest.approx([first / 3, second / 3])
