"""Operations besides training and sampling: sessions, runs, checkpoints, files, telemetry and access."""

from __future__ import annotations

import io
import json
import re
import tarfile
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pyrage  # type: ignore[import-untyped]
import pytest

from tinkex._wire.operations import OPERATIONS
from tinkex.server.auth import Keys
from tinkex.testing import service

from .api import TINY, Api, datum

OLD_CLIENT = {"user-agent": "AsyncTinker/Python 0.27.2"}
DATE = re.compile(r"[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT")


def today() -> dict[str, str]:
    now = datetime.now(UTC)
    return {
        "starting_on": (now - timedelta(days=1)).isoformat(),
        "ending_before": (now + timedelta(days=1)).isoformat(),
    }


# -- the service itself ----------------------------------------------------------------------------


def test_capabilities_and_health_answer_the_first_requests_of_a_client(api):
    health = api.got("healthz")
    (engine,) = health.pop("engines")
    assert health == {"status": "ok", "engine": "idle"}
    assert (engine["name"], engine["up"], engine["restarts"]) == ("engine", True, 0)
    (model,) = api.got("get_server_capabilities")["supported_models"]
    assert model["model_name"] == TINY
    assert model["max_context_length"] == 2048
    assert model["trainable"] is model["sampleable"] is True
    flags = api.told("client/config", {"sdk_version": "0.36.0"})
    assert flags["use_pyqwest_transport"] is False
    for name in (
        "proto_write_fwdbwd",
        "create_model_via_load_weights",
        "sample_join_sampling_session",
    ):
        assert flags[name] is True
    assert not flags["custom_loss_server_side"]
    assert api.told("client/dynamic_config", {"sdk_version": "0.36.0"})["sample_cancel_enabled"]


def test_whoami_without_keys_is_the_local_owner(api):
    me = api.got("auth/apikey/me")
    assert me["details"]["org_details"]["name"]
    assert "@" in me["details"]["user_details"]["email"]
    assert api.ask("DELETE", "auth/apikey/me").status_code == 403
    assert api.told("auth/token")["jwt"].startswith("eyJ")


@pytest.mark.heavy
def test_the_fake_engine_refuses_traced_losses(api):
    logprobs = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    output = {"op": "output", "name": "output", "target": "output", "args": [{"ref": "logprobs"}]}
    graph = {"nodes": [logprobs, output]}
    inputs = [{"name": "logprobs", "rank": 1}]
    body = {"session_id": api.session(), "custom_loss_seq_id": 0, "name": "l"}
    refused = api.post("create_custom_loss", body | {"inputs": inputs, "graph": graph})
    failed = api.retrieve(refused.json()["request_id"])
    assert failed["category"] == "user"
    assert "graph" in failed["error"]


# -- sessions ---------------------------------------------------------------------------------------


def test_a_retry_with_the_same_idempotency_key_returns_the_same_session(api):
    body = {"tags": [], "sdk_version": "0.36.0"}
    made = {
        api.told("create_session", body, headers={"x-idempotency-key": key})["session_id"]
        for key in ("a", "a", "b")
    }
    made |= {api.told("create_session", body)["session_id"] for _ in range(2)}
    assert len(made) == 4


def test_a_session_stays_active_until_it_is_finished(api):
    session = api.session()
    assert api.post("session_heartbeat", {"session_id": session}).status_code == 200
    assert api.post("session_heartbeat", {"session_id": "nobody"}).status_code == 404
    for reason in ("errored", "success"):  # the first reason stays
        body = {"reason": {"type": reason}, "detail": reason}
        assert api.post(f"sessions/{session}/finish", body).status_code == 200
    gone = api.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    assert gone.status_code == 410
    (found,) = api.told("sessions/search", {"session_id": session})["sessions"]
    assert found["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "errored",
    }
    assert api.post("sessions/nobody/finish", {"reason": {"type": "success"}}).status_code == 404


def test_a_finished_session_refuses_new_work(api):
    model = api.model()
    sampler = api.sampler(model.session_id)
    path = model.save("kept")
    waiting = model.optim_step(seq_id=9)
    done = model.api.retrieve(sampler.send())
    api.told(f"sessions/{model.session_id}/finish", {"reason": {"type": "interrupted"}})
    assert api.retrieve(waiting)["category"] == "user"
    refusals = {
        "create_model": {"model_seq_id": 1, "base_model": TINY},
        "load_weights": {"model_seq_id": 1, "path": path},
        "create_sampling_session": {"sampling_session_seq_id": 1, "base_model": TINY},
        "copy_weights": {"model_seq_id": 1, "source_path": path},
    }
    answers = [
        api.post(path, {"session_id": model.session_id, **body}) for path, body in refusals.items()
    ]
    answers.append(model.ask("optim_step", adam_params={}))
    answers.append(api.post("asample", sampler.request()))
    answers.append(api.post("stream_sample", sampler.request()))
    assert [answer.status_code for answer in answers] == [400] * 7
    # Checkpoints stay, and so do results.
    assert api.loaded(path).step() > 0
    assert done["sequences"]


def test_a_session_without_heartbeats_expires():
    silent = service("fake", session_expiry=0.0, housekeeping_interval=0.01)
    with silent as running, Api(running.url) as api:
        session = api.session()
        while True:  # a search is no heartbeat
            (found,) = api.told("sessions/search", {"session_id": session})["sessions"]
            if found["status"]["type"] != "active":
                break
        assert found["status"]["type"] == "cancelled"
        assert found["status"]["detail"]
        assert api.post("session_heartbeat", {"session_id": session}).status_code == 410


def test_a_session_can_be_fetched(api):
    session = api.session(
        user_metadata={"run": "7", "depth": 3}, display_name="Blue Moon", project_id="p"
    )
    assert api.got(f"sessions/{session}", access_scope="owned") == {
        "training_run_ids": [],
        "sampler_ids": [],
        "user_metadata": {"run": "7", "depth": "3"},
        "display_name": "Blue Moon",
    }
    model, sampler = api.model(session), api.sampler(session, 4)
    found = api.got(f"sessions/{session}")
    assert found["training_run_ids"] == [model.model_id]
    assert found["sampler_ids"] == [sampler.sampler_id]
    assert api.get("sessions/nobody").status_code == 404


def test_sessions_are_listed_newest_first(api):
    made = [api.session() for _ in range(3)]
    assert api.got("sessions", limit=3)["sessions"] == made[::-1]
    assert api.got("sessions", limit=1, offset=1, access_scope="accessible")["sessions"] == [
        made[1]
    ]
    assert api.got("sessions", limit=0)["sessions"] == []


def test_sessions_can_be_searched_by_their_fields():
    with service("fake") as running, Api(running.url) as api:
        made = [
            api.session(display_name=f"{word} run", project_id=project, user_metadata={"n": word})
            for word, project in (("Red", "p"), ("Blue", "p"), ("Deep Blue", "q"))
        ]
        path = api.model(made[0]).save("a")
        api.told(f"sessions/{made[1]}/finish", {"reason": {"type": "success"}})

        def found(**query):
            names = {session: index for index, session in enumerate(made)}
            answer = api.told("sessions/search", query)
            return [names[session["session_id"]] for session in answer["sessions"]]

        assert found() == [2, 1, 0]
        assert found(display_name="blue") == [2, 1]
        assert found(display_name="BLUE deep") == [2]
        assert found(session_id=made[0], display_name="deep") == [2, 0]  # either
        assert found(project_ids=["p"]) == [1, 0]
        assert found(user_metadata={"n": "Red"}) == [0]
        assert found(statuses=[{"type": "active"}]) == [2, 0]
        assert found(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == [1]
        assert found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == []
        assert found(statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []
        assert found(owner={"type": "accessible"}) == [2, 1, 0]
        assert found(owner={"type": "user", "owner_urns": ["tml:user:local"]}) == [2, 1, 0]
        assert found(owner={"type": "user", "owner_urns": ["somebody"]}) == []
        (summary,) = api.told("sessions/search", {"session_id": made[0]})["sessions"]
        assert (summary["checkpoints_count"], summary["project_id"]) == (1, "p")
        size = api.got("checkpoints")["checkpoints"][0]["size_bytes"]
        assert summary["checkpoint_storage_bytes"] == size
        assert path
        pages, query = [], {"limit": 2}
        while True:
            page = api.told("sessions/search", query)
            pages.append([session["session_id"] for session in page["sessions"]])
            if page.get("next_cursor") is None:
                break
            query["cursor"] = page["next_cursor"]
        assert pages == [[made[2], made[1]], [made[0]]]


def test_a_session_moves_to_a_project_with_its_runs(api):
    model = api.model()
    project = f"sessions/{model.session_id}/project"
    assert api.ask("PUT", project, {"project_id": "elsewhere"}).status_code == 200
    runs = api.got("training_runs", project_id="elsewhere")
    assert [run["training_run_id"] for run in runs["training_runs"]] == [model.model_id]
    assert runs["cursor"] == {"offset": 0, "limit": 20, "total_count": 1}
    assert api.ask("PUT", project, {"project_id": " "}).status_code == 400
    assert api.ask("PUT", project, {}).status_code == 400
    assert api.ask("PUT", "sessions/nobody/project", {"project_id": "p"}).status_code == 404


def test_the_trace_of_a_session_has_a_signed_link(api):
    model = api.model()
    model.step()
    ready = api.got(f"sessions/{model.session_id}/trace_export")
    assert ready["status"] == "ready"
    events = api.http.get(ready["url"]).json()["traceEvents"]
    assert {"create_model", "forward_backward", "optim_step"} <= {e["name"] for e in events}
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in events)
    assert api.http.get(ready["url"].replace("signature=", "signature=0")).status_code == 403
    assert api.get("sessions/nobody/trace_export").status_code == 404


# -- runs ----------------------------------------------------------------------------------------------


def test_a_run_lists_its_newest_checkpoints(api):
    model = api.model(user_metadata={"seed": 1})
    run = api.got(f"training_runs/{model.model_id}", access_scope="owned")
    assert run["base_model"] == TINY
    assert (run["is_lora"], run["lora_rank"], run["corrupted"]) == (True, 8, False)
    assert run["user_metadata"] == {"seed": "1"}
    assert run.get("last_checkpoint") is run.get("last_sampler_checkpoint") is None
    for name in ("a", "b"):
        model.save(name)
        model.save(name, "save_weights_for_sampler")
    later = api.got(f"training_runs/{model.model_id}")
    assert later["last_checkpoint"]["checkpoint_id"] == "weights/b"
    assert later["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/b"
    assert datetime.fromisoformat(later["last_request_time"]) > datetime.fromisoformat(
        run["last_request_time"]
    )
    assert api.get("training_runs/nobody:train:0").status_code == 404


def test_runs_are_listed_most_recently_used_first(api):
    models = [api.model() for _ in range(3)]
    models[0].step()
    page = api.got("training_runs", limit=2, offset=0)
    assert [run["training_run_id"] for run in page["training_runs"]] == [
        models[0].model_id,
        models[2].model_id,
    ]
    rest = api.got("training_runs", limit=1, offset=2)
    assert rest["training_runs"][0]["training_run_id"] == models[1].model_id
    assert rest["cursor"]["total_count"] == page["cursor"]["total_count"] >= 3


# -- checkpoints -----------------------------------------------------------------------------------------


def test_checkpoints_are_listed_in_the_clients_format():
    with service("fake") as running, Api(running.url) as api:
        model = api.model()
        paths = [
            model.save("a", user_metadata={"step": "1"}, ttl_seconds=7200),
            model.save("b", "save_weights_for_sampler"),
            model.save("c", "save_weights_external"),
        ]
        of_run = api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
        assert [entry["tinker_path"] for entry in of_run] == paths
        assert [entry["checkpoint_type"] for entry in of_run] == [
            "training",
            "sampler",
            "external",
        ]
        first = of_run[0]
        assert first["checkpoint_id"] == "weights/a"
        assert first["user_metadata"] == {"step": "1"}
        assert (first["public"], first["size_bytes"] > 0) == (False, True)
        left = datetime.fromisoformat(first["expires_at"]) - datetime.fromisoformat(first["time"])
        assert left == timedelta(hours=2)
        assert "expires_at" not in of_run[1]
        mine = api.got("checkpoints", limit=2, offset=0)
        assert [entry["tinker_path"] for entry in mine["checkpoints"]] == [paths[2], paths[1]]
        assert mine["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
        rest = api.got("checkpoints", limit=2, offset=2)
        assert [entry["tinker_path"] for entry in rest["checkpoints"]] == [paths[0]]
        # Clients before 0.28 cannot decode external ones.
        with Api(running.url, **OLD_CLIENT) as old:
            for where in ("checkpoints", f"training_runs/{model.model_id}/checkpoints"):
                kinds = {entry["checkpoint_type"] for entry in old.got(where)["checkpoints"]}
                assert kinds == {"training", "sampler"}
            # Page sizes and counts leave them out.
            page = old.got("checkpoints", limit=2, offset=0)
            assert [entry["tinker_path"] for entry in page["checkpoints"]] == [paths[1], paths[0]]
            assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 2}


def test_a_deleted_checkpoint_is_gone_and_its_name_is_free(api):
    model = api.model()
    path = model.save("a")
    place = f"training_runs/{model.model_id}/checkpoints/weights/a"
    assert api.ask("DELETE", place).status_code == 200
    assert api.ask("DELETE", place).status_code == 404
    assert api.get(f"{place}/archive").status_code == 404
    assert api.post("weights_info", {"tinker_path": path}).status_code == 404
    body = {"session_id": model.session_id, "model_seq_id": 1, "path": path}
    assert api.post("load_weights", body).status_code == 404
    assert model.save("a") == path  # its name is free again


@pytest.mark.parametrize("name", ["a", "weights", "nonsense/a", "weights%2Fa%2Fb"])
def test_an_invalid_checkpoint_id_is_refused(api, name):
    place = f"training_runs/{api.model().model_id}/checkpoints/{name}"
    assert api.ask("DELETE", place).status_code in {400, 404}
    assert api.ask("PUT", f"{place}/ttl", {"ttl_seconds": None}).status_code in {400, 404}
    assert api.ask("POST", f"{place}/publish").status_code in {400, 404}


def test_a_ttl_can_be_set_and_removed(api):
    model = api.model()
    model.save("a")
    place = f"training_runs/{model.model_id}/checkpoints/weights/a"

    def expiry():
        (entry,) = api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
        return entry.get("expires_at")

    for seconds in (3600, 10 * 365 * 86_400):
        assert api.ask("PUT", f"{place}/ttl", {"ttl_seconds": seconds}).status_code == 200
        left = datetime.fromisoformat(expiry()) - datetime.now(UTC)
        assert abs(left - timedelta(seconds=seconds)) < timedelta(minutes=5)
    for seconds in (3599, 10 * 365 * 86_400 + 1, 0, -5):
        refused = api.ask("PUT", f"{place}/ttl", {"ttl_seconds": seconds})
        assert (refused.status_code, refused.json()["field"]) == (400, "ttl_seconds")
    assert api.ask("PUT", f"{place}/ttl", {}).status_code == 422
    assert expiry() is not None
    assert api.ask("PUT", f"{place}/ttl", {"ttl_seconds": None}).status_code == 200
    assert expiry() is None


def test_publishing_is_idempotent(api):
    model = api.model()
    model.save("a")
    place = f"training_runs/{model.model_id}/checkpoints/weights/a"
    for method, public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        assert api.ask(method, f"{place}/publish").status_code == 200
        (entry,) = api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
        assert entry["public"] is public
    assert api.ask("POST", f"{place}x/publish").status_code == 404


# -- files ----------------------------------------------------------------------------------------------


def archive(api, model, checkpoint="weights/a"):
    return api.get(f"training_runs/{model.model_id}/checkpoints/{checkpoint}/archive")


def test_an_archive_is_a_link_that_works_without_a_key(api):
    model = api.model()
    model.step()
    model.save("a")
    answer = archive(api, model)
    assert answer.status_code == 302
    assert DATE.fullmatch(answer.headers["expires"])
    expires = datetime.strptime(answer.headers["expires"], "%a, %d %b %Y %H:%M:%S GMT")
    assert expires.replace(tzinfo=UTC) > datetime.now(UTC)
    download = api.http.get(answer.headers["location"])
    assert download.status_code == 200
    assert int(download.headers["content-length"]) == len(download.content)
    with tarfile.open(fileobj=io.BytesIO(download.content)) as tar:
        names = tar.getnames()
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names)
        assert all("/" not in name and tar.getmember(name).isfile() for name in names)
        config = tar.extractfile("adapter_config.json")
        assert config is not None
        assert json.load(config)["r"] == 8


def test_a_changed_link_is_refused(api):
    model = api.model()
    model.save("a")
    model.save("b")
    link = archive(api, model).headers["location"]
    for forged in (
        link.replace("/training/a?", "/training/b?"),
        link.replace("signature=", "signature=f"),
        re.sub(r"expires=\d+", "expires=99999999999", link),
        re.sub(r"expires=\d+&", "", link),
        link.partition("?")[0],
        link.replace("/training/a?", "/training/%2e%2e?"),
        link.replace("/archives/", "/files/").replace("?", "/tinkex.json?"),
    ):
        assert api.http.get(forged).status_code in {403, 404}, forged
    assert api.http.get(link).status_code == 200
    api.ask("DELETE", f"training_runs/{model.model_id}/checkpoints/weights/a")
    assert api.http.get(link).status_code == 404


def test_a_link_expires():
    with service("fake", url_lifetime=-1) as running, Api(running.url) as api:
        model = api.model()
        model.save("a")
        late = api.http.get(archive(api, model).headers["location"])
        assert late.status_code == 403
        assert "expired" in late.json()["detail"]


def external(api, model, **fields):
    model.save("out", "save_weights_external", **fields)
    place = f"training_runs/{model.model_id}/checkpoints/external_weights/out"
    return api.got(f"{place}/external_weights_urls")


def test_external_weights_are_files_with_links(api):
    found = external(api, api.model(), ttl_seconds=3600)
    assert sorted(found["urls"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert datetime.fromisoformat(found["expires"]) > datetime.now(UTC)
    for name, url in found["urls"].items():
        content = api.http.get(url).content
        assert content
        if name.endswith(".json"):
            assert json.loads(content)["base_model_name_or_path"] == TINY


def test_external_weights_can_be_encrypted(api):
    identity = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    found = external(api, api.model(), age_encryption_recipients=recipients)
    assert sorted(found["urls"]) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    content = api.http.get(found["urls"]["adapter_config.json.age"]).content
    assert json.loads(pyrage.decrypt(content, [identity]))["r"] == 8


def test_an_invalid_recipient_is_refused_and_not_shown(api):
    model = api.model()
    secret = str(pyrage.x25519.Identity.generate())
    failed = model.do("save_weights_external", path="x", age_encryption_recipients=[secret])
    assert failed["category"] == "user"
    assert "age_encryption_recipients" in failed["error"]
    assert secret not in failed["error"]
    assert api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"] == []


def test_only_external_weights_have_file_links(api):
    model = api.model()
    model.save("a")
    refused = api.get(f"training_runs/{model.model_id}/checkpoints/weights/a/external_weights_urls")
    assert (refused.status_code, refused.json()["field"]) == (400, "checkpoint_id")


# -- copies ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_copied_into_a_session_for_clients_before_0_34(api):
    model = api.model()
    model.step()
    path = model.save("a", user_metadata={"k": "v"})
    session = api.session()
    body = {"source_path": path, "session_id": session, "model_seq_id": 5, "ttl_seconds": 3600}
    copied = api.told("copy_weights", body)["tinker_path"]
    assert copied == f"tinker://{session}:train:5/weights/a"
    assert api.told("copy_weights", body)["tinker_path"] == copied
    api.ask("DELETE", f"training_runs/{model.model_id}/checkpoints/weights/a")
    assert api.loaded(copied, optimizer=True).logprobs() == model.logprobs()
    (entry,) = api.got(f"training_runs/{session}:train:5/checkpoints")["checkpoints"]
    assert entry["user_metadata"] == {"k": "v"}
    assert "expires_at" in entry


def test_a_checkpoint_is_copied_into_a_project_for_later_clients(api):
    path = api.model().save("a", "save_weights_for_sampler")
    body = {"source_path": path, "destination_project_id": "copies"}
    key = {"x-idempotency-key": "copy-1", "x-tinker-weights-access-token": "unused"}
    copied = api.told("copy_weights", body, headers=key)["tinker_path"]
    assert api.told("copy_weights", body, headers=key)["tinker_path"] == copied
    assert copied.endswith("/sampler_weights/a")
    assert copied != path
    other = api.told("copy_weights", body, headers={"x-idempotency-key": "copy-2"})["tinker_path"]
    assert other != copied
    totals = api.got("billing/usage/checkpoints/current", project_id="copies")["data"]
    assert [entry["checkpoint_count"] for entry in totals] == [2]
    assert api.sampler(model_path=copied).tokens()


def test_a_failed_copy_leaves_nothing_behind(api):
    path = api.model().save("a")
    sessions = api.got("sessions")["sessions"]
    runs = api.got("training_runs")["cursor"]
    for body, status in (
        ({"source_path": "tinker://nobody:train:0/weights/a"}, 404),
        ({"source_path": "nonsense"}, 400),
        ({"source_path": path, "ttl_seconds": 60}, 400),
        ({"source_path": path, "session_id": "nobody"}, 404),
        ({}, 422),
    ):
        assert api.post("copy_weights", body).status_code == status, body
    assert api.got("sessions")["sessions"] == sessions
    assert api.got("training_runs")["cursor"] == runs


# -- reports ------------------------------------------------------------------------------------------------------


def test_telemetry_is_always_accepted(api):
    moment = "2026-01-02T03:04:05Z"
    common = {"event_id": "e", "event_session_index": 0, "severity": "INFO", "timestamp": moment}
    kinds: list[dict[str, object]] = [
        {"event": "SESSION_START"},
        {"event": "SESSION_END", "duration": "0:00:01"},
        {"event": "UNHANDLED_EXCEPTION", "error_type": "E", "error_message": "m"},
        {"event": "GENERIC_EVENT", "event_name": "n", "event_data": {"a": [1]}},
        {"event": "EVENT_OF_A_RELEASE_TO_COME", "anything": 1},
        {"event": "GENERIC_EVENT"},
    ]
    for session in (api.session(), "sessionless-123"):
        for events in ([], [common | kind for kind in kinds]):
            body = {"events": events, "platform": "Linux", "sdk_version": "0.7.0"}
            body["session_id"] = session
            assert api.told("telemetry", body) == {"status": "accepted"}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{}", {}),
        (b"", {}),
        (b"[]", {}),
        (b"\xff not json", {}),
        (b'{"events": [{"event_data": {"x": NaN}}], "session_id": "s"}', {}),
        (b"{}", {"content-type": "application/x-protobuf"}),
        (b"not gzip", {"content-encoding": "gzip"}),
        (b"{}", {"content-encoding": "of a release to come"}),
    ],
)
def test_an_invalid_telemetry_report_is_accepted(api, body, headers):
    kept = reported(api).json()["cursor"]["total_count"]
    assert api.told("telemetry", body, headers=headers) == {"status": "accepted"}
    assert reported(api).json()["cursor"]["total_count"] == kept


def reported(user: Api, **query: Any) -> httpx.Response:
    return user.http.get("/local/telemetry", params=query)


def report(user: Api, session_id: str, *events: dict[str, object]) -> None:
    common = {"severity": "INFO", "timestamp": "2026-01-02T03:04:05Z", "event": "GENERIC_EVENT"}
    body = {
        "events": [{**common, "event_session_index": 0, **event} for event in events],
        "platform": "Linux",
        "sdk_version": "0.36.0",
        "session_id": session_id,
    }
    assert user.told("telemetry", body) == {"status": "accepted"}


def named(*names: str) -> list[dict[str, object]]:
    return [{"event_id": f"id of {name}", "event_name": name} for name in names]


def test_telemetry_is_listed_by_session_and_by_page(api):
    one, two = api.session(), api.session()
    report(api, one, *named("a", "b", "c"))
    report(api, two, *named("d"))
    found = reported(api, session_id=one).json()
    assert [entry["event"]["event_name"] for entry in found["events"]] == ["a", "b", "c"]
    assert {entry["session_id"] for entry in found["events"]} == {one}
    assert datetime.fromisoformat(found["events"][0]["received_at"]) <= datetime.now(UTC)
    assert found["cursor"] == {"offset": 0, "limit": 100, "total_count": 3}
    page = reported(api, session_id=one, limit=1, offset=1).json()
    assert [entry["event"]["event_name"] for entry in page["events"]] == ["b"]
    everything = reported(api, limit=1000).json()["events"]
    assert {one, two} <= {entry["session_id"] for entry in everything}


def test_a_repeated_telemetry_report_is_stored_once(api):
    session_id = api.session()
    for events in (named("a", "b"), named("b", "c"), named("a", "c")):
        report(api, session_id, *events)
    found = reported(api, session_id=session_id).json()["events"]
    assert [entry["event"]["event_name"] for entry in found] == ["a", "b", "c"]


@pytest.mark.parametrize("query", [{"limit": 1001}, {"limit": -1}, {"offset": "x"}])
def test_the_page_size_of_telemetry_is_limited(api, query):
    answer = reported(api, **query)
    assert answer.status_code == 422
    assert answer.json()["field"] == next(iter(query))


def test_a_key_reads_only_its_own_telemetry(tmp_path):
    (tmp_path / "keys").write_text("tml-mine\ntml-yours\n")
    with (
        service("fake", keys=Keys.from_file(tmp_path / "keys")) as running,
        Api(running.url, "tml-mine") as mine,
        Api(running.url, "tml-yours") as yours,
        Api(running.url) as nobody,
    ):
        session_id = mine.session()
        report(mine, session_id, *named("secret"))
        report(yours, session_id, *named("secret"))  # another key cannot use my session id
        assert len(reported(mine, session_id=session_id).json()["events"]) == 1
        assert len(reported(yours).json()["events"]) == 1
        assert reported(nobody).status_code == 401


def test_the_audit_log_lists_changes_of_checkpoints(api):
    model = api.model()
    path = model.save("a")
    place = f"training_runs/{model.model_id}/checkpoints/weights/a"
    api.ask("POST", f"{place}/publish")
    api.ask("PUT", f"{place}/ttl", {"ttl_seconds": 3600})
    api.ask("DELETE", place)
    entries = [entry for entry in api.got("audit")["entries"] if entry.get("tinker_path") == path]
    assert [entry["event"] for entry in entries] == [
        "checkpoint_created",
        "checkpoint_published",
        "checkpoint_ttl_set",
        "checkpoint_deleted",
    ]
    assert {entry["model_id"] for entry in entries} == {model.model_id}
    day = datetime.now(UTC).date().isoformat()
    assert api.got("audit", event_type="checkpoints", day=day)["entries"]
    assert api.got("audit", event_type="projects", day=day)["entries"] == []
    assert api.got("audit", event_type="all", day="2020-01-01")["entries"] == []
    assert api.get("audit", event_type="nonsense").status_code == 422


def test_usage_is_counted():
    with service("fake") as running, Api(running.url) as api:
        model = api.model(api.session(user_metadata={"who": "me"}))
        model.forward_backward([datum(), datum()])
        model.save("a")
        sampler = api.sampler(model.session_id)
        sampler.sample(num_samples=2, max_tokens=4)
        usage = api.got("billing/usage/events", **today())
        counts = {
            event["event_info"]["type"]: event["event_info"].get("token_count", 0)
            + event["event_info"].get("count", 0)
            for event in usage["data"]
        }
        assert counts == {
            "training": 6,
            "sampling_prefill": 3,
            "sampling_sample": 8,
            "checkpoint": 1,
        }
        assert {event["base_model"] for event in usage["data"]} == {TINY}
        assert usage["sessions"] == {model.session_id: {"user_metadata": {"who": "me"}}}
        (storage,) = api.got("billing/usage/checkpoints/current")["data"]
        assert storage["checkpoint_count"] == 1
        assert storage["size_gigabytes"] == storage["size_bytes"] / 1e9 > 0


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"starting_on": "2026-01-02", "ending_before": "2026-01-01"},
        {"starting_on": "2026-01-01", "ending_before": "2026-02-01"},
        {"starting_on": "yesterday", "ending_before": "2026-02-01"},
        {"starting_on": "9999-12-31T00:00:00Z", "ending_before": "9999-12-31T00:00:00Z"},
        {"starting_on": "0001-01-01T00:00:00+14:00", "ending_before": "0001-01-02T00:00:00Z"},
    ],
)
def test_an_invalid_time_span_is_refused(api, query):
    assert api.get("billing/usage/events", **query).status_code in {400, 422}


@pytest.mark.parametrize("where", ["sessions", "training_runs", "checkpoints"])
@pytest.mark.parametrize("query", [{"limit": 10**20}, {"offset": 10**20}, {"limit": -1}])
def test_an_invalid_page_is_refused_or_empty(api, where, query):
    assert api.get(where, **query).status_code in {200, 400, 422}


def test_the_last_representable_day_is_accepted(api):
    assert api.get("audit", day="9999-12-31").status_code in {200, 400}


# -- keys ---------------------------------------------------------------------------------------------------------


def test_requests_without_a_key_are_refused(two):
    with Api(str(two[0].http.base_url)) as nobody:
        for key in ("", "tml-wrong-key", "eyJhbGciOiJIUzI1NiJ9.e30.x", "eyJ", "eyJ\xe9"):
            headers = {b"x-api-key": key.encode("latin-1")}
            for row in OPERATIONS.values():
                path = row.url_path(dict.fromkeys(row.placeholders, "a"))
                answer = nobody.http.request(row.method, path, headers=headers, content=b"{}")
                assert answer.status_code == 401, (row.name, key)
                assert re.search("x-api-key|token", answer.json()["detail"])


def test_a_key_may_be_a_bearer_token_or_an_api_key_header(two):
    ann, _ = two
    url = str(ann.http.base_url)
    for headers in ({"authorization": "Bearer tml-key-of-ann"}, {"x-api-key": "tml-key-of-ann"}):
        with Api(url, **headers) as same:
            assert same.got("auth/apikey/me")["name"] == "ann"


def test_idempotency_keys_of_different_users_do_not_collide(two):
    body = {"tags": [], "sdk_version": "0.36.0"}
    key = {"x-idempotency-key": "same"}
    ann, bob = (user.told("create_session", body, headers=key)["session_id"] for user in two)
    assert ann != bob


def test_a_public_checkpoint_can_be_read_but_not_changed_by_others(two):
    ann, bob = two
    model = ann.model(user_metadata={"a": "b"})
    model.step()
    public = model.save("open", user_metadata={"k": "v"})
    sampled = model.save("open", "save_weights_for_sampler")
    model.save("closed")
    run = model.model_id
    places = [
        f"training_runs/{run}/checkpoints/{kind}/open" for kind in ("weights", "sampler_weights")
    ]
    for place in places:
        assert ann.ask("POST", f"{place}/publish").status_code == 200
    assert bob.told("weights_info", {"tinker_path": public})["lora_rank"] == 8
    listed = bob.got(f"training_runs/{run}/checkpoints")["checkpoints"]
    assert {entry["tinker_path"] for entry in listed} == {public, sampled}
    seen = bob.got(f"training_runs/{run}")
    assert seen["last_checkpoint"]["tinker_path"] == public
    assert "closed" not in json.dumps(seen)
    assert "user_metadata" not in seen
    theirs = bob.loaded(public, optimizer=True)
    assert theirs.logprobs() == model.logprobs()
    assert bob.sampler(model_path=sampled).tokens()
    assert bob.told("copy_weights", {"source_path": public})["tinker_path"] != public
    assert archive(bob, model, "weights/open").status_code == 302
    assert archive(bob, model, "weights/closed").status_code == 404
    place = places[0]
    assert bob.ask("DELETE", place).status_code == 404
    assert bob.ask("PUT", f"{place}/ttl", {"ttl_seconds": 3600}).status_code == 404
    assert bob.ask("DELETE", f"{place}/publish").status_code == 404
    assert bob.post("optim_step", {"model_id": run, "adam_params": {}}).status_code == 404
    for place in places:
        assert ann.ask("DELETE", f"{place}/publish").status_code == 200
    assert bob.post("weights_info", {"tinker_path": public}).status_code == 404
    assert theirs.step() > 0  # loaded weights stay loaded
