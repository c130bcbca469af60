"""Invalid requests: the service refuses them, keeps working, and never shows one user's data to another."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api import Api, Model
from tinkex.server.auth import Keys
from tinkex.server.quotas import KeyLimits
from tinkex.testing import service

from .fuzzing import Ask, FromDocument, bodies_of_passes

SECRET = "nobody-else-may-read-this"
MINE, YOURS = "tml-mine-0123456789", "tml-yours-0123456789"


#: The stream of events that a dashboard stays connected to.
LIVE = "/local/events"


class Target:
    """A service with two users: "mine" owns secret data, and "yours" sends the invalid requests."""

    def __init__(self, url: str) -> None:
        self.mine, self.yours = Api(url, MINE), Api(url, YOURS)
        self.statuses: Counter[int] = Counter()
        self.found: list[str] = []
        session = self.mine.session(display_name=SECRET, user_metadata={"a": SECRET}, tags=[SECRET])
        self.model = self.mine.model(session, user_metadata={"b": SECRET})
        self.model.step()
        self.model.save(SECRET)
        # The other user knows these paths, but must not read what they hold.
        self.paths = [
            self.model.save("known", user_metadata={"c": SECRET}),
            self.model.save("known", "save_weights_for_sampler", user_metadata={"c": SECRET}),
        ]
        sampler = self.mine.sampler(session, 7, base_model="tinkex/tiny")
        self.promise = sampler.send()["request_id"]
        self.mine.retrieve(self.promise)
        self.mine.told(
            "telemetry",
            {"events": [], "session_id": session, "platform": SECRET, "sdk_version": "1"},
        )
        self.ids = [session, self.model.model_id, sampler.sampler_id, self.promise]
        self.before = self.model.logprobs()

    def send(self, ask: Ask, key: str = YOURS) -> httpx.Response:
        """Send one request; record a server error or leaked data as a finding."""
        api = self.yours if key == YOURS else self.mine
        try:
            with api.http.stream(
                ask.method, ask.path, content=ask.body, headers=dict(ask.headers)
            ) as answer:
                if answer.url.path == LIVE:  # never ends: look at its first event
                    answer = httpx.Response(answer.status_code, text=next(answer.iter_text(), ""))
                answer.read()
        except httpx.InvalidURL:
            return httpx.Response(400)
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            self._note(f"{answer.status_code} {answer.text[:300]}", ask)
        if SECRET in answer.text:
            self._note("shows another user's data", ask)
        return answer

    def look_at(self, promise: Any, ask: Ask) -> None:
        """Check an accepted request: it may fail with a user error, but not with a server error."""
        answer = self.yours.poll(promise)
        if answer.status_code != 408:
            result = answer.json() if answer.status_code == 200 else {}
            if answer.status_code >= 500 or result.get("category") in {"server", "unknown"}:
                self._note(f"work failed: {answer.text[:300]}", ask)

    def _note(self, what: str, ask: Ask) -> None:
        self.found.append(
            f"{what}\n  {ask.method} {ask.path} {dict(ask.headers)} {ask.body!r:.600}"
        )

    def check(self) -> None:
        """Check that nothing was found, secret state is unchanged, and both users can still train."""
        kinds = {found.splitlines()[0][:100]: found for found in self.found}
        for found in list(kinds.values())[:20]:
            print(found)
        assert not self.found, f"{len(self.found)} findings"
        assert self.model.logprobs() == self.before
        assert self.yours.poll(self.promise).status_code in {404, 410}
        page = self.mine.http.get("/metrics").text
        assert re.search(r"^tinkex_engine_lives 1\.0$", page, re.MULTILINE), "the engine died"
        for api in (self.mine, self.yours):
            model = api.model()
            losses = [model.step() for _ in range(5)]
            assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory: Path = tmp_path_factory.mktemp("fuzzed")
    (directory / "keys").write_text(f"mine: {MINE}\nyours: {YOURS}\n")
    keys = Keys.from_file(directory / "keys")
    limits = KeyLimits(models=1_000)  # the long form creates more models than the default allows
    with service(
        "torch", data_dir=directory / "data", keys=keys, hold=0.02, limits=limits
    ) as running:
        made = Target(running.url)
        with made.mine, made.yours:
            yield made


_IDS = {"session_id", "model_id", "sampling_session_id", "sampler_id", "request_id", "run_id"}
_PATHS = {"path", "tinker_path", "model_path"}


def learn(generator: FromDocument, answer: Any, name: str = "") -> None:
    """Remember the ids in a response, so that later requests can use them."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            learn(generator, value, key)
    elif isinstance(answer, list):
        for value in answer[:20]:
            learn(generator, value, name)
    elif isinstance(answer, str):
        if name.removeprefix("training_") in _IDS or name in {"sessions", "sampler_ids"}:
            generator.remember("id", answer)
        elif name in _PATHS:
            generator.remember("path", answer)


def test_random_requests_from_the_openapi_document_do_no_harm(target: Target, long: bool) -> None:
    count = 20_000 if long else 400
    document = target.yours.http.get("/openapi.json").json()
    generator = FromDocument(document, seed=1)
    target.found.clear()
    for known in target.ids:
        generator.remember("id", known)
    for path in target.paths:
        generator.remember("path", path)
    generator.remember("name", "mine")
    yours = target.yours.model()
    yours.save("mine")
    generator.remember("id", yours.model_id)
    for number in range(count):
        if number % 500 == 0:  # an earlier request may have ended the session
            generator.remember("id", target.yours.model().model_id)
        ask = generator.ask()
        answer = target.send(ask)
        if answer.headers.get("content-type") == "application/json" and answer.status_code == 200:
            content = answer.json()
            learn(generator, content)
            if isinstance(content, dict) and "request_id" in content:
                target.look_at(content, ask)
    print(f"\n{count} requests of the document: {dict(target.statuses.most_common())}")
    target.check()


def test_damaged_protobuf_bodies_do_no_harm(target: Target, long: bool) -> None:
    count = 20_000 if long else 400
    chance = random.Random(2)
    target.statuses.clear()
    target.found.clear()
    model: Model | None = None
    for number in range(count):
        if model is None or number % 100 == 0:  # a damaged seq_id can block all later requests
            model = target.yours.model()
        body, headers = bodies_of_passes(model.model_id, model.next_seq, chance)
        ask = Ask("POST", "/api/v1/forward_backward", body, headers)
        answer = target.send(ask)
        model.seq()
        if answer.status_code == 200:
            target.look_at(answer.json(), ask)
    print(f"\n{count} damaged bodies: {dict(target.statuses.most_common())}")
    target.check()
