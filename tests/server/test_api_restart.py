"""A service that is restarted on the same data: clients notice nothing."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime, timedelta

import pytest

from tinkex.errors import ConfigError
from tinkex.server.journal import Journal, Kind
from tinkex.testing import service

from .api import PROTO, Api, Model, Sampler, datum, training_request

FINISH = {"reason": {"type": "success"}}


class Restarting:
    """A service on its own data directory, and one client."""

    def __init__(self, data_dir, **settings):
        self.data_dir, self.settings = data_dir, settings
        self.running = contextlib.ExitStack()
        self.api = self._start()

    def _start(self) -> Api:
        started = service("fake", data_dir=self.data_dir, **self.settings)
        return self.running.enter_context(Api(self.running.enter_context(started).url))

    def restart(self) -> Api:
        self.running.close()
        self.api = self._start()
        return self.api


@pytest.fixture
def place(tmp_path):
    place = Restarting(tmp_path)
    yield place
    place.running.close()


def again(model: Model, api: Api) -> Model:
    """The same model through another connection."""
    return Model(api, model.model_id, model.next_seq)


def test_results_can_be_fetched_after_a_restart(place):
    model, sampler = place.api.model(), place.api.sampler()
    promises = [model.forward_backward(), model.optim_step(), model.forward_backward(loss_fn="x")]
    promises += [sampler.send(), model.send("save_weights", path="a")]
    before = [place.api.retrieve(promise) for promise in promises]
    binary = place.api.retrieve(promises[0], PROTO)
    api = place.restart()
    assert [api.retrieve(promise) for promise in promises] == before
    assert api.retrieve(promises[0], PROTO) == binary
    assert "error" in before[2]


def test_training_after_a_restart_gives_the_same_losses(place, tmp_path_factory):
    def steps(model, numbers):
        return [model.step([datum((n, n + 1, 9), (n + 1, 9, 3))]) for n in numbers]

    undisturbed = service("fake", data_dir=tmp_path_factory.mktemp("whole"))
    with undisturbed as running, Api(running.url) as api:
        whole = api.model()
        expected = steps(whole, range(20, 28)), whole.logprobs([datum((20, 25), (21, 26))])
    model = place.api.model()
    losses = steps(model, range(20, 24))
    passed = model.forward_backward([datum((24, 25, 9), (25, 9, 3))])  # no optim_step yet
    losses.append(place.api.retrieve(passed)["metrics"]["loss:sum"])
    model = again(model, place.restart())
    model.optim_step()
    losses += steps(model, range(25, 28))
    assert (losses, model.logprobs([datum((20, 25), (21, 26))])) == expected


def test_losses_are_the_same_with_and_without_snapshots(tmp_path):
    outcomes = []
    for name, every in (("never", 1e9), ("always", 0.0)):
        place = Restarting(tmp_path / name, snapshot_every=every)
        model = place.api.model()
        for _ in range(3):
            for _ in range(2):
                model.step()
            model = again(model, place.restart())
        outcomes.append((model.step(), model.logprobs()))
        place.running.close()
    assert outcomes[0] == outcomes[1]


def test_a_random_adapter_initialisation_survives_a_restart(place):
    model = place.api.model(lora_config={"rank": 4})  # the service draws the seed
    model.step()
    before = model.logprobs()
    assert again(model, place.restart()).logprobs() == before


def test_a_request_waiting_for_an_earlier_number_still_waits_after_a_restart(place):
    model = place.api.model()
    step = model.optim_step(seq_id=2)
    proto = training_request(model.model_id, 3)
    passed = place.api.told("forward_backward", proto, headers={"content-type": PROTO})
    api = place.restart()
    model = again(model, api)
    model.forward_backward(seq_id=1)
    assert api.retrieve(step)["metrics"]["grad_norm"] > 0
    assert api.retrieve(passed)["metrics"]["loss:sum"] > 0
    assert model.optim_step(seq_id=2) == step  # the retry is still recognised


def test_an_earlier_refused_number_is_skipped_after_a_restart(place):
    model = place.api.model()
    model.step()
    assert model.ask("optim_step", adam_params={"beta1": 5}).status_code == 422
    model.step()
    api = place.restart()
    assert api.poll(again(model, api).optim_step()).status_code == 200


def refuse(model: Model, number: int) -> None:
    refused = model.ask("forward_backward", seq_id=number, forward_backward_input="bad")
    assert refused.status_code == 422


def test_the_last_refused_number_is_skipped_after_a_restart(place):
    model = place.api.model()
    model.step()
    refuse(model, 3)
    api = place.restart()
    model = again(model, api)
    assert api.poll(model.forward_backward(seq_id=4)).status_code == 200
    assert model.ask("optim_step", seq_id=3, adam_params={}).status_code == 400


def test_a_number_refused_out_of_order_does_not_skip_others(place):
    model = place.api.model()
    second = model.forward_backward(seq_id=2)
    refuse(model, 3)
    api = place.restart()
    model = again(model, api)
    fourth, first = model.optim_step(seq_id=4), model.forward_backward(seq_id=1)
    for promise in (first, second, fourth):
        assert "metrics" in api.poll(promise).json()


def test_samplers_give_the_same_samples_after_a_restart(place):
    api = place.api
    model = api.model()
    model.step()
    unnamed = model.do("save_weights_for_sampler", sampling_session_seq_id=0)
    path = model.save("s", "save_weights_for_sampler")
    model.step()
    samplers = [
        Sampler(api, unnamed["sampling_session_id"]),
        api.sampler(model.session_id, 1, model_path=path),
        api.sampler(model.session_id, 2),
    ]
    before = [sampler.tokens(num_samples=2) for sampler in samplers]
    assert before[0] == before[1] != before[2]
    api = place.restart()
    after = [Sampler(api, sampler.sampler_id) for sampler in samplers]
    for sampler in after:
        sampler.next_seq = 1
    assert [sampler.tokens(num_samples=2) for sampler in after] == before


def test_a_retried_create_sampler_returns_the_original_after_a_restart(place):
    """The client lost the response and retries; its checkpoint has been replaced meanwhile."""
    model = place.api.model()
    model.step()
    path = model.save("latest")
    sampler = place.api.sampler(model.session_id, 0, model_path=path)
    before = sampler.tokens()
    for _ in range(20):
        model.step()
    model.save("latest", overwrite=True)
    sampler = place.restart().sampler(model.session_id, 0, model_path=path)
    sampler.next_seq = 1
    assert sampler.tokens() == before


def test_samples_in_flight_finish_after_a_restart(place):
    sampler = place.api.sampler()
    request = sampler.request(num_samples=16, max_tokens=1000)
    # Official clients 0.13.0 use sequence numbers over 64 bits for samples of copied clients.
    request["seq_id"] = 10**21
    whole = sampler.sample(num_samples=16, max_tokens=1000)
    promise = place.api.told("asample", request)
    api = place.restart()
    assert api.retrieve(promise) == whole
    assert api.told("asample", request) == promise


@pytest.mark.heavy
def test_samples_in_flight_without_a_session_finish_after_a_restart(place):
    path = place.api.model().save("w")
    named = {"sampling_session_id": None, "model_path": path}
    sampler = Sampler(place.api, "")
    whole = sampler.sample(num_samples=16, max_tokens=1000, fields=named)
    promise = sampler.send(num_samples=16, max_tokens=1000, fields=named)
    api = place.restart()
    assert api.retrieve(promise) == whole
    assert Sampler(api, "").sample(num_samples=16, max_tokens=1000, fields=named) == whole


def test_a_poll_receives_samples_that_finished_across_a_restart(tmp_path):
    place = Restarting(tmp_path, use_retrieve_futures=True)
    sampler = place.api.sampler()
    target = {"type": "sampling_session", "sampling_session_id": sampler.sampler_id}
    first = sampler.send()
    heard = place.api.told("retrieve_futures", {"target": target, "prev_cursor": 0})
    assert [entry["request_id"] for entry in heard["completions"]] == [first["request_id"]]
    unheard = sampler.send()
    place.api.retrieve(unheard)
    api = place.restart()
    later = Sampler(api, sampler.sampler_id)
    later.next_seq = 2
    promises = [unheard, later.send()]
    cursor = heard["cursor"]
    found: set[str] = set()
    while len(found - {first["request_id"]}) < 2:
        heard = api.told("retrieve_futures", {"target": target, "prev_cursor": cursor})
        assert heard["cursor"] > cursor
        cursor = heard["cursor"]
        found |= {entry["request_id"] for entry in heard["completions"]}
    assert found >= {promise["request_id"] for promise in promises}
    place.running.close()


def test_a_model_created_from_a_checkpoint_survives_its_deletion(place):
    api = place.api
    first = api.model()
    first.step()
    path = first.save("a")
    model = api.loaded(path, optimizer=True)
    for _ in range(2):
        model.step()
    expected = model.logprobs()
    run, checkpoint = first.model_id, "weights/a"
    assert api.ask("DELETE", f"training_runs/{run}/checkpoints/{checkpoint}").status_code == 200
    assert again(model, place.restart()).logprobs() == expected


def test_a_model_created_from_a_checkpoint_survives_its_overwrite(place):
    """The usual pattern: save under one name and continue from there."""
    first = place.api.model()
    first.step()
    path = first.save("latest")
    model = place.api.loaded(path, optimizer=True)
    model.step()
    expected = model.logprobs()
    for _ in range(3):
        first.step()
    first.save("latest", overwrite=True)
    for _ in range(2):  # also after the second restart
        model = again(model, place.restart())
        assert model.logprobs() == expected


def test_an_unloaded_model_stays_unloaded(place):
    model = place.api.model()
    model.step()
    place.api.retrieve(place.api.told("unload_model", {"model_id": model.model_id}))
    assert again(model, place.restart()).ask("optim_step", adam_params={}).status_code == 400


def test_a_model_whose_creation_failed_stays_failed(place):
    path = place.api.model().save("a")
    (weights,) = place.data_dir.glob("checkpoints/*/training/a/adapter_model.safetensors")
    weights.write_bytes(b"nonsense")
    session = place.api.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path}
    failed = place.api.told("load_weights", body)
    assert "error" in place.api.retrieve(failed)
    api = place.restart()
    assert api.told("load_weights", body) == failed
    refused = Model(api, f"{session}:train:0").ask("optim_step", adam_params={})
    assert refused.status_code in {400, 404}


def test_sessions_are_unchanged_after_a_restart(place):
    active, finished = place.api.session(), place.api.session()
    key = {"x-idempotency-key": "one"}
    body = {"tags": [], "sdk_version": "0.36.0"}
    same = place.api.told("create_session", body, headers=key)
    place.api.told(f"sessions/{finished}/finish", FINISH)
    api = place.restart()
    assert api.post("session_heartbeat", {"session_id": active}).status_code == 200
    assert api.post("session_heartbeat", {"session_id": finished}).status_code == 410
    assert api.told("create_session", body, headers=key) == same
    assert api.model(active).step() > 0


def test_models_of_an_ended_session_are_not_restored(place):
    model = place.api.model()
    waiting = model.optim_step(seq_id=2)
    place.api.told(f"sessions/{model.session_id}/finish", FINISH)
    assert place.api.retrieve(waiting)["category"] == "user"
    api = place.restart()
    assert api.retrieve(waiting)["category"] == "user"
    assert again(model, api).ask("optim_step", adam_params={}).status_code == 400


def test_checkpoints_and_their_links_survive_a_restart(place):
    model = place.api.model()
    path = model.save("a", ttl_seconds=3600, user_metadata={"k": "v"})
    listed = place.api.got("checkpoints")
    link = place.api.get(f"training_runs/{model.model_id}/checkpoints/weights/a/archive")
    usage = {"starting_on": "2020-01-01", "ending_before": "2020-01-02"}
    assert place.api.got("billing/usage/events", **usage)["data"] == []
    location = link.headers["location"].partition("/archives/")[2]
    api = place.restart()
    assert api.got("checkpoints") == listed
    assert api.http.get(f"/archives/{location}").status_code == 200
    assert api.loaded(path).step() > 0


def test_a_second_service_on_a_data_directory_is_refused(place):
    with (
        pytest.raises(ConfigError, match=f"data_dir.*process {os.getpid()};"),
        service("fake", data_dir=place.data_dir),
    ):
        pass
    assert place.api.model().step() > 0


def test_the_service_starts_despite_an_unreadable_request(place, tmp_path):
    place.api.got("healthz")
    place.running.close()
    journal = Journal(tmp_path / "journal")
    journal.open()
    for number, operation in enumerate(("asample", "create_custom_loss")):
        named = {"id": f"{number:032}", "op": operation, "owner": "local", "scope": "s:x"}
        head = {**named, "seq": "1", "media": "json", "at": 1.0, "extra": {}}
        journal.append(Kind.REQUEST, head, b'{"of": "another release"}')
    journal.close()
    api = place.restart()
    for number in range(2):
        assert "error" in api.retrieve(f"{number:032}")


# -- runs that cannot be restored --------------------------------------------------------------


def corrupted(api: Api, model: Model) -> bool:
    flag: bool = api.got(f"training_runs/{model.model_id}")["corrupted"]
    return flag


def check_given_up(place: Restarting, model: Model, why: str) -> None:
    """Its requests fail with the reason, its run is marked, and other runs are not affected, also after a restart."""
    api = place.restart()
    model = again(model, api)
    assert not corrupted(api, model)  # not detected yet
    failed = api.retrieve(model.optim_step())
    assert why in failed["error"]
    assert failed["category"] == "server"
    assert corrupted(api, model)
    assert "is corrupted" in api.retrieve(model.forward_backward())["error"]
    api = place.restart()
    assert "is corrupted" in api.retrieve(again(model, api).optim_step())["error"]
    assert corrupted(api, model)
    assert api.model().step() > 0


def test_a_damaged_snapshot_marks_the_run_corrupted(tmp_path):
    place = Restarting(tmp_path, snapshot_every=0.0)
    model = place.api.model()
    snapshots = tmp_path / "snapshots"
    while not list(snapshots.glob("*/current.json")):  # written in the background
        model.step()
    path = model.save("last")
    before = model.logprobs()
    place.running.close()
    for weights in snapshots.glob("*/*/adapter_model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    check_given_up(place, model, "adapter_model.safetensors is damaged")
    goes_on = place.api.loaded(path, optimizer=True)
    assert goes_on.logprobs() == before
    assert not corrupted(place.api, goes_on)
    place.running.close()


def test_a_journal_with_a_gap_marks_the_run_corrupted(place, tmp_path):
    model = place.api.model()
    for _ in range(3):
        model.step()
    place.running.close()
    rewrite_without_change(tmp_path / "journal", 4)
    check_given_up(place, model, "the journal lacks change 4")


def rewrite_without_change(directory, lost, *, keep_request=False):
    """Remove one request and its result from a journal, or only its result."""
    old, new = Journal(directory), Journal(directory.with_name("rewritten"))
    records = old.open()
    new.open()
    (gone,) = (record.head["id"] for record in records if record.head.get("change") == lost)
    for record in records:
        if record.head["id"] != gone or (keep_request and record.kind is Kind.REQUEST):
            new.append(record.kind, record.head, old.read(record.place))
    old.close()
    new.close()
    directory.rename(directory.with_name("damaged"))
    directory.with_name("rewritten").rename(directory)


def test_usage_of_a_replayed_request_is_counted_once(place, tmp_path):
    def used(api):
        day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        span = {"starting_on": day, "ending_before": day + timedelta(days=2)}
        events = api.got("billing/usage/events", **{k: v.isoformat() for k, v in span.items()})
        kinds = {"training": "token_count", "checkpoint": "count"}
        infos = [event["event_info"] for event in events["data"]]
        return {info["type"]: info[kinds[info["type"]]] for info in infos}

    model = place.api.model()
    passed = [
        promise for _ in range(3) for promise in (model.forward_backward(), model.optim_step())
    ]
    model.save("a")
    before, counted = [place.api.retrieve(promise) for promise in passed], used(place.api)
    assert counted == {"training": 9, "checkpoint": 1}
    place.running.close()
    rewrite_without_change(tmp_path / "journal", 4, keep_request=True)
    api = place.restart()
    assert [api.retrieve(promise) for promise in passed] == before
    assert used(api) == counted
    again(model, api).step()
    assert used(api) == {"training": 12, "checkpoint": 1}
