"""Names of models: checkpoints, aliases, and that each answer is of the model that was asked for."""

from __future__ import annotations

import concurrent.futures
import json

import pytest

from tests.cli.commands import run
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

from .test_openai import CHAT, HI, PROMPT, TEXT, TINY

MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def checkpoints(served) -> list[str]:
    """Three checkpoints of one run, and a training checkpoint, each with other weights."""
    training = served.client().create_lora_training_client(TINY, rank=8, seed=1)
    paths = []
    for name in ("a", "b", "c"):
        data = [Datum(ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": [2, 3, 4, ord(name)]})]
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(AdamParams(learning_rate=0.05)).result()
        paths.append(training.save_weights_for_sampler(name).result().path)
    paths.append(training.save_state("whole").result().path)
    return paths


ROUTES = [
    (CHAT, {"messages": HI}),
    ("/oai/api/v1/chat/completions", {"messages": HI}),
    (TEXT, {"prompt": PROMPT}),
    ("/oai/api/v1/completions", {"prompt": PROMPT}),
    (MESSAGES, {"messages": HI}),
    ("/anthropic/api/v1/messages", {"messages": HI}),
]


def tokens_of(answer) -> list[int]:
    found: list[int] = (
        answer["choices"][0]["token_ids"] if "choices" in answer else answer["token_ids"]
    )
    return found


def test_every_answer_is_of_the_model_that_was_asked_for(served, http, checkpoints):
    """Three checkpoints of one run and the base model, 300 requests at once through every route."""
    client = served.client()
    models = [TINY, *checkpoints[:3]]
    samplers = {
        model: client.create_sampling_client(
            **({"base_model": model} if model == TINY else {"model_path": model})
        )
        for model in models
    }
    asked = [(models[number % 4], ROUTES[number % 6], number) for number in range(300)]
    native = {
        number: samplers[model].sample(
            ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=6, seed=number)
        )
        for model, _, number in asked
    }

    def answer(each):
        model, (path, body), number = each
        options = {"max_tokens": 6, "seed": number, "return_token_ids": True}
        return tokens_of(http.told(path, model=model, **body, **options))

    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(answer, asked))
    expected = [native[number].result().sequences[0].tokens for _, _, number in asked]
    assert answers == expected
    assert len({tuple(tokens) for tokens in answers}) > 200


def test_checkpoint_can_be_named_in_several_ways(served, http, checkpoints):
    path = checkpoints[1]
    http.client.put("/local/aliases", json={"name": "latest", "path": path}).raise_for_status()
    options = {"prompt": "x", "seed": 1, "max_tokens": 6, "return_token_ids": True}
    expected = tokens_of(http.told(TEXT, model=path, **options))
    for name in (f"{TINY};{path}", "latest", f"{TINY};latest"):
        answer = http.told(TEXT, model=name, **options)
        assert tokens_of(answer) == expected
        assert answer["model"] == name
    assert tokens_of(http.told(TEXT, model=TINY, **options)) != expected
    whole = tokens_of(http.told(TEXT, model=checkpoints[3], **options))
    assert whole == tokens_of(http.told(TEXT, model=checkpoints[2], **options))
    error = http.refused(TEXT, 400, model=f"thinker;{path}", **options)
    assert error["param"] == "model"
    assert "was trained on tinkex/tiny" in error["message"]


def test_alias_is_listed_moved_and_deleted(served, http, checkpoints):
    def alias(*arguments: str):
        options = ("--base-url", served.url, "--api-key", "tml-local", "--format", "json")
        return run("alias", *arguments, *options)

    done = alias("team/best", checkpoints[0])
    assert done.code == 0, done.err
    listed = [model["id"] for model in http.client.get("/v1/models").json()["data"]]
    assert "team/best" in listed
    assert http.client.get("/v1/models/team/best").json()["root"] == checkpoints[0]
    alias("team/best", checkpoints[2])
    found = {each["name"]: each["path"] for each in json.loads(alias().out)["aliases"]}
    assert found["team/best"] == checkpoints[2]
    assert alias("team/best", "--delete").code == 0
    assert http.refused(CHAT, 404, model="team/best", messages=HI)["code"] == "model_not_found"
    assert alias("team/best", "--delete").code == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "tinkex/tiny", "path": "tinker://a/weights/b"}, "name"),
        ({"name": "a b", "path": "tinker://a/weights/b"}, "name"),
        ({"name": "", "path": "tinker://a/weights/b"}, "name"),
        ({"name": "ok"}, "path"),
        ({"name": "ok", "path": "tinker://a/weights/b", "more": 1}, "more"),
    ],
)
def test_invalid_alias_is_refused(http, body, field):
    response = http.client.put("/local/aliases", json=body)
    assert response.status_code == 400
    assert response.json()["field"] == field
    missing = {"name": "ok", "path": "tinker://a/weights/b"}
    assert http.client.put("/local/aliases", json=missing).status_code == 404
