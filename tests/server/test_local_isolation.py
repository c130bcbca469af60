"""The surfaces beside the protocol, as a hostile second user, a web page and a client that never reads see them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tinkex.engine.values import SampledResult
from tinkex.errors import RateLimitError
from tinkex.server.auth import Keys
from tinkex.server.bodies import read_body_limit
from tinkex.server.dashboard.api import CALLS
from tinkex.server.dashboard.live import BEAT, MAX_LISTENERS, Live
from tinkex.server.quotas import KeyLimits
from tinkex.server.serving import aliases
from tinkex.server.serving.generation import TokenCounts
from tinkex.testing import service

from .api import TINY, Api


def log(api, run, *entries):
    answer = api.post(f"training_runs/{run}/log", {"entries": list(entries)})
    assert answer.status_code == 200, answer.text
    return answer.json()


OF_RUN = [call for call in CALLS if "{run_id}" in call.path]


@pytest.fixture(scope="module")
def annas(two):
    """Ann, Bob, and a run of Ann's with a sample, a checkpoint and an alias; its id and the path of its checkpoint."""
    ann, bob = two
    model = ann.model()
    model.step()
    path = model.save("secret", "save_weights_for_sampler")
    log(ann, model.model_id, {"step": 1, "samples": [{"text": "secret", "reward": 1.0}]})
    made = ann.http.put("/local/aliases", json={"name": "annas", "path": path})
    assert made.status_code == 200, made.text
    return ann, bob, model.model_id, path


@pytest.mark.parametrize("call", OF_RUN, ids=lambda call: call.name)
def test_run_of_another_key_is_refused_like_one_that_does_not_exist(annas, call):
    _, bob, run, _ = annas
    answers = []
    for guessed in (run, f"{run[:-3]}zzz"):
        path = call.path.replace("{run_id}", guessed).replace("{number:int}", "0")
        answer = bob.http.request(call.method, path)
        answers.append((answer.status_code, answer.text.replace(guessed, "RUN")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


def test_models_of_another_key_are_refused_like_those_that_do_not_exist(annas):
    ann, bob, _, path = annas
    hi = [{"role": "user", "content": "hi"}]
    for name, nothing in (("annas", "bobby"), (path, path[:-3] + "zzz")):
        for route, body in (
            ("/v1/chat/completions", {"messages": hi, "max_tokens": 1}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
            ("/v1/messages", {"messages": hi, "max_tokens": 1}),
            ("/local/playground", {"prompt": "x", "max_tokens": 1}),
        ):
            answers = []
            for asked in (name, nothing):
                answer = bob.http.post(route, json={"model": asked, **body})
                text = answer.text.replace(asked, "NAME").split('"request_id"')[0]
                answers.append((answer.status_code, text))
            assert answers[0] == answers[1], route
            assert answers[0][0] == 404
        assert bob.http.get(f"/v1/models/{name}").status_code == 404
    assert "annas" not in bob.http.get("/v1/models").text
    assert bob.http.delete("/local/aliases/annas").status_code == 404
    assert bob.http.put("/local/aliases", json={"name": "x", "path": path}).status_code in {
        403,
        404,
    }
    # The same name is another alias for another key.
    assert "annas" in ann.http.get("/v1/models").text


@pytest.mark.parametrize("name", ["../x", "/x", "a\nb", "аnnas", "", "x" * 200, TINY, "tinker://a"])
def test_name_of_an_alias_that_could_mislead_is_refused(annas, name):
    ann, _, _, path = annas
    answer = ann.http.put("/local/aliases", json={"name": name, "path": path})
    assert answer.status_code == 400, answer.text


def test_alias_stands_for_a_checkpoint_and_not_for_another_alias(annas):
    ann, _, _, _ = annas
    answer = ann.http.put("/local/aliases", json={"name": "loop", "path": "annas"})
    assert answer.status_code in {400, 404}, answer.text


def test_aliases_of_a_key_are_limited(annas, monkeypatch):
    ann, _, _, path = annas
    monkeypatch.setattr(aliases, "MAX_ALIASES", 1)
    refused = ann.http.put("/local/aliases", json={"name": "second", "path": path})
    assert refused.status_code == 400
    assert "at most 1 aliases" in refused.text
    again = ann.http.put("/local/aliases", json={"name": "annas", "path": path})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("name", ["put_alias", "play_prompt"])
def test_limit_that_an_error_names_can_be_changed(name):
    assert read_body_limit(f"{name}=100") == (name, 100)


def test_body_limit_of_a_local_call_is_kept():
    limits = {"put_alias": 100, "play_prompt": 100}
    with service("fake", body_limits=limits) as running, Api(running.url) as user:
        alias = user.http.put("/local/aliases", json={"name": "x" * 200, "path": ""})
        played = user.http.post("/local/playground", json={"model": TINY, "prompt": "x" * 200})
        for answer, name in ((alias, "put_alias"), (played, "play_prompt")):
            assert answer.status_code == 413
            assert f"--body-limit {name}=" in answer.text


def test_report_of_too_many_metrics_is_refused_whole(annas):
    """Before, all of them were acknowledged and most were lost."""
    ann, _, run, _ = annas
    entries = [{"step": step, "metrics": {f"m{n}": 1.0 for n in range(100)}} for step in range(501)]
    answer = ann.post(f"training_runs/{run}/log", {"entries": entries})
    assert answer.status_code == 400
    assert answer.json()["field"] == "entries.metrics"
    assert log(ann, run, *entries[1:])["metrics"] == 50_000
    kept = ann.http.get(f"/local/runs/{run}/metrics", params={"names": "m7"}).json()
    assert kept["metrics"]["m7"]["points"] == 500


def test_flood_of_reports_loses_nothing_that_was_acknowledged(annas):
    ann, _, run, _ = annas
    entries = [{"step": step, "metrics": {f"f{n}": 1.0 for n in range(50)}} for step in range(900)]
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda _: log(ann, run, *entries)["metrics"], range(4)))
    assert taken == [45_000] * 4
    kept = ann.http.get(f"/local/runs/{run}/metrics", params={"names": "f7"}).json()
    assert kept["metrics"]["f7"]["points"] == 3_600


def test_step_beyond_all_steps_is_refused_by_name(annas):
    ann, _, run, _ = annas
    answer = ann.http.get(f"/local/runs/{run}/samples", params={"step": 10**30})
    assert answer.status_code == 422
    assert "step" in answer.text


async def no_runs(_: list[str]) -> list[dict[str, Any]]:
    return []


def test_pages_that_listen_are_counted_before_they_read():
    async def scenario():
        live = Live()

        def listen():
            return live.listen("ann", no_runs, dict, lambda: False)

        leaving = [listen()[1] for _ in range(MAX_LISTENERS)]
        with pytest.raises(RateLimitError):
            listen()
        live.listen("bob", no_runs, dict, lambda: False)
        leaving[0]()
        listen()

    asyncio.run(scenario())


def test_open_streams_count_as_requests_in_flight(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    limits = KeyLimits.of_options(["requests=3"])
    with (
        service("fake", keys=Keys.from_file(file), limits=limits) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        with ExitStack() as opened:
            for _ in range(3):
                stream = opened.enter_context(ann.http.stream("GET", "/local/events"))
                assert stream.status_code == 200
            refused = ann.http.get("/local/runs")
            assert refused.status_code == 429
            assert "--limit requests=" in refused.text
            assert ann.http.post("/v1/completions", json={}).status_code == 429
            assert bob.http.get("/local/runs").status_code == 200
        while ann.http.get("/local/runs").status_code == 429:  # until the service has noticed
            pass


def test_open_page_hears_nothing_more_once_its_key_is_revoked(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    keys = Keys.from_file(file)
    with (
        service("fake", keys=keys) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        run = ann.model().model_id
        with ExitStack() as opened:
            of_ann, of_bob = (
                opened.enter_context(each.http.stream("GET", "/local/events", timeout=2 * BEAT))
                for each in (ann, bob)
            )
            heard = {each: each.iter_lines() for each in (of_ann, of_bob)}
            for lines in heard.values():
                assert next(lines) == "event: hello"
            file.write_text("ann: tml-new-key-of-ann\nbob: tml-key-of-bob\n")
            keys.reload()
            with Api(running.url, "tml-new-key-of-ann") as renewed:
                log(renewed, run, {"step": 1, "metrics": {"loss": 1.0}})
            assert next((line for line in heard[of_ann] if line.startswith("event")), None) is None
            assert "event: beat" in heard[of_bob]


def test_cached_tokens_do_not_count_what_the_request_itself_has_read():
    result = SampledResult([], [], [], cached_tokens=16)
    scored = TokenCounts(cached_tokens=0, counts_cache=False)
    scored.add([1] * 20, result)
    assert (scored.prompt_tokens, scored.cached_tokens) == (20, 0)
    plain = TokenCounts()
    plain.add([1] * 20, result)
    assert plain.cached_tokens == 16


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/local/playground"),
        ("PUT", "/local/aliases"),
        ("DELETE", "/local/runs/x"),
        ("GET", "/local/events"),
        ("GET", "/v1/models"),
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_web_page_reaches_nothing_of_a_service_without_keys(keyless, method, path, headers):
    answer = keyless.http.request(method, path, json={}, headers=headers)
    assert answer.status_code == 403, answer.text


@pytest.fixture(scope="module")
def keyless():
    with service("fake") as running, Api(running.url) as user:
        yield user
