"""Every operation with two keys: no key reads or changes data of the other."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinkex._wire.operations import OPERATIONS
from tinkex.server.auth import Keys
from tinkex.testing import service

from .api import PROTO, TINY, Api, Model, datum, training_request

#: Part of everything that Ann sends; another key that receives it has read her data.
SECRET = "anns-own-words"
INPUTS = {"data": [datum()], "loss_fn": "cross_entropy"}
DAY = timedelta(days=1)
NOW = datetime.now(UTC)
SPAN = {"starting_on": (NOW - DAY).isoformat(), "ending_before": (NOW + DAY).isoformat()}
#: Operations whose responses concern only the service or the caller.
HARMLESS = "harmless"
#: Operations that list data of the caller.
EMPTY = "empty"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two keys of one service."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    with (
        service("fake", keys=Keys.from_file(file), hold=0.1) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        yield ann, bob


class Anns:
    """One object of every kind."""

    def __init__(self, ann: Api) -> None:
        self.session = ann.session(
            display_name=SECRET, user_metadata={"k": SECRET}, project_id=SECRET
        )
        self.model = ann.model(self.session, user_metadata={"k": SECRET})
        self.run = self.model.model_id
        self.model.step()
        self.path = self.model.save(SECRET, user_metadata={"k": SECRET})
        self.weights = self.model.save(SECRET, "save_weights_for_sampler")
        self.external = self.model.save(SECRET, "save_weights_external")
        self.sampler = ann.sampler(self.session, model_path=self.weights)
        self.done = self.sampler.send()["request_id"]
        ann.retrieve(self.done)
        # In a separate model, where it waits for missing numbers.
        self.waiting = ann.model(self.session, 1).forward_backward(seq_id=9)["request_id"]
        ann.told("telemetry", report(self.session))
        self.ids = (self.session, self.run, self.sampler.sampler_id, self.done, self.waiting)


def report(session: str) -> dict[str, Any]:
    event = {
        "event": "SESSION_START",
        "event_id": "e1",
        "event_session_index": 0,
        "severity": "INFO",
        "timestamp": NOW.isoformat(),
        "type": "SESSION_START",
    }
    return {
        "events": [event],
        "platform": SECRET,
        "sdk_version": "0.36.0",
        "session_id": session,
    }


@dataclass(frozen=True)
class Attempt:
    """A request and its expected outcome: a status, or a response without data of another key."""

    expected: int | str = 404
    body: Any = None
    places: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)


def attempts(its: Anns, mine: str) -> dict[str, Attempt]:
    """For every operation, the request that comes closest to another key's data; `mine` is an own session."""
    run, session, sampler = its.run, its.session, its.sampler.sampler_id
    numbered = {"model_id": run, "seq_id": 5}
    at_session = {"session_id": session}
    at_run = {"training_run_id": run}
    at_checkpoint = {"training_run_id": run, "checkpoint_id": f"weights/{SECRET}"}
    at_external = {"training_run_id": run, "checkpoint_id": f"external_weights/{SECRET}"}
    target = {"sampling_session_id": sampler}
    return {
        "healthz": Attempt(HARMLESS),
        "get_server_capabilities": Attempt(HARMLESS),
        "client_config": Attempt(HARMLESS, {"sdk_version": "0.36.0"}),
        "client_dynamic_config": Attempt(HARMLESS, {"sdk_version": "0.36.0"}),
        "auth_token": Attempt(HARMLESS, {}),
        "get_api_key": Attempt(HARMLESS),
        "delete_api_key": Attempt(403),
        "create_session": Attempt(HARMLESS, {"tags": [], "sdk_version": "0.36.0"}),
        "session_heartbeat": Attempt(body=at_session),
        "finish_session": Attempt(places=at_session, body={"reason": {"type": "success"}}),
        "list_sessions": Attempt(EMPTY, query={"access_scope": "accessible", "limit": 1000}),
        "get_session": Attempt(places=at_session, query={"access_scope": "accessible"}),
        "assign_session_project": Attempt(places=at_session, body={"project_id": "bobs"}),
        "trace_export": Attempt(places=at_session),
        "search_sessions": Attempt(
            EMPTY, {"owner": {"type": "user", "owner_urns": ["ann", "bob", "tml:user:ann"]}}
        ),
        "create_model": Attempt(body={**at_session, "model_seq_id": 7, "base_model": TINY}),
        "get_info": Attempt(body={"model_id": run}),
        "unload_model": Attempt(body={"model_id": run}),
        "forward": Attempt(body={**numbered, "forward_input": INPUTS}),
        "forward_backward": Attempt(body={**numbered, "forward_backward_input": INPUTS}),
        "optim_step": Attempt(body={**numbered, "adam_params": {}}),
        "create_custom_loss": Attempt(
            body={
                **at_session,
                "custom_loss_seq_id": 0,
                "name": "mine",
                "inputs": [{"name": "logprobs", "rank": 1}],
                "graph": {"nodes": []},
            }
        ),
        "load_weights": Attempt(
            body={"session_id": mine, "model_seq_id": 0, "path": its.path, "optimizer": True}
        ),
        "save_weights": Attempt(body={**numbered, "path": "bobs"}),
        "save_weights_for_sampler": Attempt(body={**numbered, "path": "bobs"}),
        "save_weights_external": Attempt(body={**numbered, "path": "bobs"}),
        "copy_weights": Attempt(body={"source_path": its.path, "session_id": mine}),
        "weights_info": Attempt(body={"tinker_path": its.path}),
        "create_sampling_session": Attempt(
            body={"session_id": mine, "sampling_session_seq_id": 0, "model_path": its.weights}
        ),
        "join_sampling_session": Attempt(body=target),
        "get_sampler": Attempt(places={"sampler_id": sampler}),
        "asample": Attempt(body=its.sampler.request()),
        "stream_sample": Attempt(body=its.sampler.request()),
        "retrieve_future": Attempt(410, {"request_id": its.done}),
        "retrieve_futures": Attempt(body={"target": {**target, "cloned_sampler_id": 0}}),
        "cancel_future": Attempt(HARMLESS, {"request_id": its.waiting}),
        "list_training_runs": Attempt(EMPTY, query={"access_scope": "accessible", "limit": 1000}),
        "get_training_run": Attempt(places=at_run, query={"access_scope": "accessible"}),
        "list_checkpoints": Attempt(places=at_run),
        "list_user_checkpoints": Attempt(EMPTY, query={"limit": 1000}),
        "delete_checkpoint": Attempt(places=at_checkpoint),
        "publish_checkpoint": Attempt(places=at_checkpoint),
        "unpublish_checkpoint": Attempt(places=at_checkpoint),
        "set_checkpoint_ttl": Attempt(places=at_checkpoint, body={"ttl_seconds": 3600}),
        "get_checkpoint_archive_url": Attempt(places=at_checkpoint),
        "get_external_weights_urls": Attempt(places=at_external),
        "telemetry": Attempt(HARMLESS, report(session) | {"platform": "bobs"}),
        "log_run": Attempt(
            places=at_run, body={"entries": [{"step": 1, "metrics": {"loss": 0.0}}]}
        ),
        "get_audit_log": Attempt(EMPTY, query={"event_type": "all"}),
        "get_billing_usage": Attempt(EMPTY, query=SPAN),
        "get_current_checkpoint_storage_usage": Attempt(EMPTY, query={"project_id": SECRET}),
    }


#: Further attempts: other body formats, other fields that name objects.
def more_attempts(its: Anns, mine: str) -> list[tuple[str, Attempt]]:
    on = {"session_id": its.session}
    sampled = {"sampling_session_seq_id": 7}
    return [
        ("load_weights", Attempt(body={"model_id": its.run, "seq_id": 5, "path": its.path})),
        ("load_weights", Attempt(body={**on, "model_seq_id": 7, "path": its.path})),
        ("copy_weights", Attempt(body={"source_path": its.external})),
        ("copy_weights", Attempt(body={**on, "source_path": its.path})),
        ("weights_info", Attempt(body={"tinker_path": its.weights})),
        ("create_sampling_session", Attempt(body={**on, **sampled, "base_model": TINY})),
        (
            "create_sampling_session",
            Attempt(body={"session_id": mine, **sampled, "model_path": its.path}),
        ),
        ("retrieve_future", Attempt(410, {"request_id": its.waiting})),
        ("retrieve_future", Attempt(410, {"request_id": "0" * 32})),  # as if it did not exist
        ("search_sessions", Attempt(EMPTY, {"session_id": its.session})),
        ("search_sessions", Attempt(EMPTY, {"display_name": SECRET})),
        ("search_sessions", Attempt(EMPTY, {"user_metadata": {"k": SECRET}})),
        ("search_sessions", Attempt(EMPTY, {"project_ids": [SECRET]})),
        ("list_training_runs", Attempt(EMPTY, query={"project_id": SECRET})),
        ("get_current_checkpoint_storage_usage", Attempt(EMPTY)),
        ("cancel_future", Attempt(HARMLESS, {"request_id": its.done})),
    ]


def sent(user: Api, name: str, attempt: Attempt) -> Any:
    row = OPERATIONS[name]
    path = row.url_path(dict(attempt.places)).removeprefix("/api/v1/")
    return user.ask(row.method, path, attempt.body, params=dict(attempt.query))


def state(ann: Api, its: Anns) -> dict[str, Any]:
    """All data that Ann can see of her own."""
    at = f"training_runs/{its.run}"
    telemetry = ann.http.get("/local/telemetry", params={"session_id": its.session})
    return {
        "session": ann.got(f"sessions/{its.session}"),
        "found": ann.told("sessions/search", {"session_id": its.session}),
        "run": ann.got(at),
        "checkpoints": ann.got(f"{at}/checkpoints"),
        "sampler": ann.got(f"samplers/{its.sampler.sampler_id}"),
        "audit": ann.got("audit"),
        "usage": ann.got("billing/usage/events", **SPAN),
        "storage": ann.got("billing/usage/checkpoints/current"),
        "done": ann.retrieve(its.done),
        "telemetry": telemetry.json(),
    }


@pytest.fixture(scope="module")
def its(two):
    return Anns(two[0])


def test_every_operation_has_an_attempt(its):
    assert attempts(its, "s").keys() == OPERATIONS.keys()


@pytest.fixture(scope="module")
def before(two, its):
    return state(two[0], its)


@pytest.mark.parametrize("name", OPERATIONS)
def test_data_of_another_key_is_neither_read_nor_changed(two, its, before, name):
    ann, bob = two
    mine = bob.session()
    tries = [attempts(its, mine)[name]]
    tries += [attempt for other, attempt in more_attempts(its, mine) if other == name]
    for attempt in tries:
        answer = sent(bob, name, attempt)
        if isinstance(attempt.expected, int):
            assert answer.status_code == attempt.expected, answer.text
        else:
            assert answer.status_code == 200, answer.text
            # The response contains nothing that he did not send himself.
            asked = json.dumps([attempt.body, dict(attempt.query), dict(attempt.places)])
            for words in (SECRET, *its.ids):
                assert words not in answer.text or (
                    attempt.expected == HARMLESS and words in asked
                ), name
            assert SECRET not in answer.text
    assert state(ann, its) == before


def test_data_of_another_key_cannot_be_reached_with_protobuf(two, its, before):
    ann, bob = two
    for forward_only in (False, True):
        body = training_request(its.run, 5, forward_only=forward_only)
        refused = bob.post("forward_backward", body, headers={"content-type": PROTO})
        assert refused.status_code == 404
    assert state(ann, its) == before


def test_data_of_another_key_cannot_be_reached_under_other_paths(two, its, before):
    ann, bob = two
    telemetry = bob.http.get("/local/telemetry", params={"session_id": its.session})
    assert telemetry.status_code == 200
    assert SECRET not in telemetry.text
    for page in (
        "/",
        "/about",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/local/runs",
        "/local/choices",
        "/local/service",
    ):
        shown = bob.http.get(page)
        assert shown.status_code == 200
        assert not any(words in shown.text for words in (SECRET, *its.ids, '"ann"')), page
    for path in ("", "/metrics", "/checkpoints", "/sample_steps", "/samples", "/samples/0"):
        hidden = bob.http.get(f"/local/runs/{its.run}{path}")
        assert hidden.status_code == 404, path
    for path in (
        f"/archives/{its.run}/training/{SECRET}",
        f"/files/{its.run}/external/{SECRET}/adapter_model.safetensors",
        f"/traces/{its.session}",
    ):
        assert bob.http.get(path).status_code == 403
    assert state(ann, its) == before


def test_a_model_cannot_load_a_private_checkpoint_of_another_key(two, its, before):
    ann, bob = two
    failed = bob.model().do("load_weights", path=its.path)
    assert "no checkpoint" in failed["error"]
    assert state(ann, its) == before


def test_a_private_checkpoint_of_another_key_cannot_be_sampled_without_a_session(two, its, before):
    ann, bob = two
    body = bob.sampler().request(fields={"sampling_session_id": None, "model_path": its.weights})
    assert bob.post("asample", body).status_code == 404
    assert state(ann, its) == before


def test_refused_attempts_of_another_key_use_up_no_number(two, its, before):
    """All attempts used the numbers that Ann's client uses next."""
    ann, _ = two
    for _ in range(5):
        assert "metrics" in its.model.do("optim_step", adam_params={})
    assert its.sampler.tokens()
    waiting = ann.poll(its.waiting)
    assert waiting.status_code == 408 or "metrics" in waiting.json()
    assert its.model.save("later").endswith("/later")


def test_token_is_no_api_key_and_cannot_be_renewed(two):
    """The holder of a token can read weights, but has no other access to its owner's account."""
    ann, _ = two
    token = ann.told("auth/token")["jwt"]
    for headers in ({"x-api-key": token}, {"authorization": f"Bearer {token}"}):
        with Api(str(ann.http.base_url), **headers) as holder:
            for row in OPERATIONS.values():
                path = row.url_path(dict.fromkeys(row.placeholders, "a"))
                answer = holder.http.request(row.method, path, content=b"{}")
                assert answer.status_code == 401, row.name
                assert "weights_access_token" in answer.json()["detail"]
            for path in ("/metrics", "/local/telemetry"):
                assert holder.http.get(path).status_code == 401


def test_token_contains_no_plain_hash_of_the_key(two):
    ann, _ = two
    token = ann.told("auth/token")["jwt"]
    digest = hashlib.sha256(b"tml-key-of-ann").hexdigest()
    payload = token.split(".")[1]
    claims = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode()
    for start in range(0, 64, 8):
        assert digest[start : start + 8] not in claims


def test_token_is_invalid_once_its_key_is_removed(tmp_path):
    file, data_dir = tmp_path / "keys", tmp_path / "data"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")

    def copied(running: Any, path: str, token: str) -> int:
        with Api(running.url, "tml-key-of-bob") as bob:
            lent = {"source_path": path, "weights_access_token": token}
            return bob.post("copy_weights", lent).status_code

    with service("fake", data_dir=data_dir, keys=Keys.from_file(file)) as running:
        with Api(running.url, "tml-key-of-ann") as ann:
            path, token = ann.model().save("lent"), ann.told("auth/token")["jwt"]
        assert copied(running, path, token) == 200
    for left, expected in (
        ("ann: tml-key-of-ann\n", 200),  # a restart changes nothing
        ("", 403),
        ("ann: tml-another-key-of-ann\n", 403),
    ):
        file.write_text(f"{left}bob: tml-key-of-bob\n")
        with service("fake", data_dir=data_dir, keys=Keys.from_file(file)) as running:
            assert copied(running, path, token) == expected


def test_token_expires(tmp_path):
    (tmp_path / "keys").write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    moment = [NOW]
    keys = Keys.from_file(tmp_path / "keys")
    with (
        service("fake", keys=keys, now=lambda: moment[0]) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        body = {"source_path": ann.model().save("lent")}
        body["weights_access_token"] = ann.told("auth/token")["jwt"]
        assert bob.post("copy_weights", body).status_code == 200
        moment[0] += timedelta(hours=1)
        refused = bob.post("copy_weights", body)
        assert refused.status_code == 403
        assert "expired" in refused.json()["detail"]


# -- lending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lent", ["a key", "a token"])
def test_a_lent_key_or_token_can_load_and_copy_its_owners_weights(two, its, lent):
    ann, bob = two
    token = "tml-key-of-ann" if lent == "a key" else ann.told("auth/token")["jwt"]
    expected = ann.loaded(its.path).logprobs()
    made = bob.loaded(its.path, weights_access_token=token)
    assert made.logprobs() == expected
    model = bob.model()
    assert "error" not in model.do("load_weights", path=its.path, weights_access_token=token)
    assert model.logprobs() == expected
    body = {"source_path": its.path}
    copies = [
        bob.told("copy_weights", body, headers={"x-tinker-weights-access-token": token}),
        bob.told(
            "copy_weights",
            body | {"session_id": bob.session(), "model_seq_id": 0, "weights_access_token": token},
        ),
    ]
    for copy in copies:
        assert bob.loaded(copy["tinker_path"]).logprobs() == expected
        assert ann.post("weights_info", copy).status_code == 404


@pytest.mark.parametrize(
    "wrong", ["tml-key-of-nobody", "eyJhbGciOiJIUzI1NiJ9.e30.AAAA", "eyJ\u00e9"]
)
def test_an_invalid_token_is_refused(two, its, wrong):
    _, bob = two
    model, body = bob.model(), {"path": its.path, "weights_access_token": wrong}
    refused = [
        model.ask("load_weights", **body),
        bob.post("load_weights", body | {"session_id": bob.session(), "model_seq_id": 0}),
        bob.post("copy_weights", {"source_path": its.path, "weights_access_token": wrong}),
    ]
    for answer in refused:
        assert answer.status_code == 403
        assert "weights_access_token" in answer.json()["detail"]
        assert wrong not in answer.text
    assert "metrics" in model.do("optim_step", adam_params={})  # the refused number is skipped


def test_a_token_reads_only_its_owners_weights(two, its):
    ann, bob = two
    mine = ann.loaded(its.path).save("mine")
    token = {"weights_access_token": "tml-key-of-bob"}
    assert (
        "no checkpoint" in bob.post("copy_weights", {"source_path": mine} | token).json()["detail"]
    )
    # Own data needs no token, and an invalid one is ignored.
    wrong = {"weights_access_token": "tml-key-of-nobody"}
    assert ann.post("copy_weights", {"source_path": mine} | wrong).status_code == 200


def test_a_lent_key_is_not_stored_and_not_needed_after_a_restart(tmp_path):
    file, data_dir = tmp_path / "keys", tmp_path / "data"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    keys = Keys.from_file(file)
    with (
        service("fake", data_dir=data_dir, keys=keys) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        path = ann.model().save("lent")
        model = bob.loaded(path, weights_access_token="tml-key-of-ann")
        model.step()
        before = model.logprobs()
    for written in data_dir.rglob("*"):
        assert written.is_dir() or b"tml-key-of-ann" not in written.read_bytes()
    with (
        service("fake", data_dir=data_dir, keys=keys) as running,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        assert Model(bob, model.model_id, model.next_seq).logprobs() == before
