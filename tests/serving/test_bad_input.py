"""Requests that are refused: in the API's own form, with the parameter named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkex.server.auth import Keys
from tinkex.testing import service

from .conftest import Http
from .test_openai import ADD, CHAT, HI, TEXT, TINY

MESSAGES = "/v1/messages"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
NO_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


@pytest.mark.parametrize(
    ("path", "parameter", "change"),
    [
        (CHAT, "frobnicate", {"frobnicate": 1}),
        (CHAT, "audio", {"audio": {}}),
        (CHAT, "store", {"store": True}),
        (CHAT, "temperature", {"temperature": -1}),
        (CHAT, "max_tokens", {"max_tokens": "many"}),
        (CHAT, "top_logprobs", {"top_logprobs": 3}),
        (CHAT, "stop", {"stop": [""]}),
        (CHAT, "n", {"n": 0}),
        (CHAT, "n", {"n": 100_000}),
        (CHAT, "logit_bias", {"logit_bias": {"99999": 1}}),
        (CHAT, "messages", {"messages": []}),
        (CHAT, "messages.0.role", {"messages": [{"role": "poet", "content": "x"}]}),
        (CHAT, "messages.0.content.0", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (CHAT, "messages.0.mood", {"messages": [{"role": "user", "content": "x", "mood": "good"}]}),
        (CHAT, "response_format.type", {"response_format": {"type": "poem"}}),
        (CHAT, "response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            CHAT,
            "response_format.json_schema.schema",
            {"response_format": form({"type": "nonsense"})},
        ),
        (CHAT, "response_format.json_schema.schema", {"response_format": form(False)}),
        (CHAT, "response_format", {"response_format": {"type": "regex", "regex": "("}}),
        (
            CHAT,
            "response_format",
            {"response_format": {"type": "grammar", "grammar": "start: /[^\\s\\S]/"}},
        ),
        (CHAT, "tools.0.function.parameters", {"tools": [NO_SCHEMA]}),
        (CHAT, "tools.0", {"tools": [{"type": "retrieval"}]}),
        (CHAT, "tool_choice", {"tool_choice": "required"}),
        (
            CHAT,
            "tool_choice",
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "no"}}},
        ),
        (
            CHAT,
            "response_format",
            {"tools": [ADD], "response_format": {"type": "grammar", "grammar": 'start: "a"'}},
        ),
        (
            CHAT,
            "chat_template_kwargs.enable_thinking",
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        (CHAT, "chat_template_kwargs.reasoning_effort", {"reasoning_effort": "high"}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "x" * 3000}]}),
        (TEXT, "prompt", {"prompt": "x" * 3000}),
        (TEXT, "prompt", {"prompt": [1, 99999]}),
        (TEXT, "prompt", {"prompt": []}),
        (TEXT, "suffix", {"suffix": "x"}),
        (TEXT, "best_of", {"best_of": 5}),
    ],
)
def test_openai_error_names_the_parameter(http, path, parameter, change):
    body = {"model": TINY, "messages": HI} if path == CHAT else {"model": TINY, "prompt": "x"}
    error = http.refused(path, 400, **body | change)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == parameter, error
    assert error["message"]


@pytest.mark.parametrize("instead", [["user"], {}])
@pytest.mark.parametrize(
    ("path", "parameter", "change"),
    [
        (CHAT, "messages.0.role", lambda word: {"messages": [{"role": word, "content": "x"}]}),
        (MESSAGES, "messages.0.role", lambda word: {"messages": [{"role": word, "content": "x"}]}),
        (CHAT, "response_format.type", lambda word: {"response_format": {"type": word}}),
        (TEXT, "response_format.type", lambda word: {"response_format": {"type": word}}),
        (CHAT, "tool_choice", lambda word: {"tools": [ADD], "tool_choice": {"type": word}}),
        (MESSAGES, "tool_choice", lambda word: {"tool_choice": {"type": word}}),
    ],
)
def test_a_list_or_an_object_in_place_of_a_word_is_refused(http, path, parameter, change, instead):
    body = {"model": TINY, "max_tokens": 1}
    body |= {"prompt": "x"} if path == TEXT else {"messages": HI}
    error = http.refused(path, 400, **body | change(instead))
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{parameter}: ")


def test_prompt_over_the_context_says_by_how_much(http):
    error = http.refused(TEXT, 400, model=TINY, prompt="x" * 2100)
    assert "has 2100 tokens" in error["message"]
    assert "context of 2048" in error["message"]
    assert "at least 53 tokens" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES])
def test_missing_model_is_named(http, path):
    body = {"prompt": "x"} if path == TEXT else {"messages": HI}
    error = http.refused(path, 400, max_tokens=1, **body)
    assert error["message"].startswith("model: ")
    assert error.get("param", "model") == "model"


def test_misspelt_parameter_is_guessed(http):
    assert (
        "did you mean max_tokens?"
        in http.refused(CHAT, 400, model=TINY, messages=HI, max_token=1)["message"]
    )


@pytest.mark.parametrize(
    ("parameter", "change"),
    [
        ("mood", {"mood": 1}),
        ("max_tokens", {"max_tokens": None}),
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (
            "messages.0.content.0",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        ),
        ("messages.0.role", {"messages": [{"role": "system", "content": "x"}]}),
        ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": {"type": "nonsense"}}]}),
        ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
        ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "tool"}}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 3000}]}),
    ],
)
def test_anthropic_error_names_the_parameter(http, parameter, change):
    body = {"model": TINY, "messages": HI, "max_tokens": 5} | change
    response = http.client.post(MESSAGES, json=body)
    content = response.json()
    assert response.status_code == 400
    assert content["type"] == "error"
    assert content["error"]["type"] == "invalid_request_error"
    assert content["error"]["message"].startswith(f"{parameter}: ")
    assert response.headers["request-id"] == content["request_id"]


@pytest.mark.parametrize(
    "model",
    [
        "none",
        "tinker://x:train:0/sampler_weights/a",
        "tinker://nonsense",
        "tinkex/tiny;none",
        "tinkex/tiny;tinker://a/weights/b",
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, TEXT])
def test_unknown_model_is_not_found(http, path, model):
    body = {"model": model, "max_tokens": 5}
    body |= {"prompt": "x"} if path == TEXT else {"messages": HI}
    error = http.refused(path, 404, **body)
    assert "There is no" in error["message"]
    if path != MESSAGES:
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    else:
        assert error["type"] == "not_found_error"


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'"x"', b"\xff"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_body_that_is_no_json_object(http, path, body):
    response = http.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_body_of_another_type_is_refused(http):
    response = http.client.post(CHAT, content=b"model=x", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_body_over_the_limit_is_refused():
    limits = {"chat_completions": 100}
    with service("fake", body_limits=limits) as running, Http(running.url) as user:
        long = [{"role": "user", "content": "x" * 200}]
        error = user.refused(CHAT, 413, model=TINY, messages=long)
    assert error["code"] == "request_too_large"
    assert "--body-limit chat_completions" in error["message"]


def test_parameter_with_a_name_of_megabytes_is_refused_in_a_few_words(http):
    error = http.refused(CHAT, 400, model=TINY, messages=HI, **{"x" * 2_000_000: 1})
    assert error["param"] == "x" * 100
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("path", "parameter", "change"),
    [
        (TEXT, "prompt", {"prompt": "x" * 2_000_000}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
    ],
)
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(http, path, parameter, change):
    error = http.refused(path, 400, model=TINY, **change)
    assert error["param"] == parameter
    assert "characters" in error["message"]


def test_too_many_prompts_are_refused(http):
    error = http.refused(TEXT, 400, model=TINY, prompt=["x"] * 300, n=4, max_tokens=1)
    assert error["param"] == "prompt"
    assert "max_samples" in error["message"]


def test_nested_arguments_of_a_call_are_refused(http):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    error = http.refused(CHAT, 400, model=TINY, messages=[*HI, said])
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"


def costly(place):
    """A tool whose small schema takes a tenth of a second to compile; one that is no schema takes the last place."""
    choices = [
        {
            "anyOf": [
                {"type": "object", "properties": {f"p{i}{j}": {"type": "integer"}}}
                for j in range(4)
            ]
        }
        for i in range(5)
    ]
    schema = {"allOf": choices} if place < 8 else {"type": "nonsense"}
    return {"type": "function", "function": {"name": f"f{place}", "parameters": schema}}


def test_other_requests_are_answered_while_schemas_compile(http, served):
    with ThreadPoolExecutor(1) as threads:
        tools = [costly(place) for place in range(9)]
        costs = threads.submit(http.refused, CHAT, 400, model=TINY, messages=HI, tools=tools)
        answered = 0
        with Http(served.url) as other:
            while not costs.done():
                assert other.client.get("/api/v1/healthz").status_code == 200
                answered += 1
        assert costs.result()["param"] == "tools.8.function.parameters"
    assert (
        answered > 20
    )  # about five come before the tools; with the event loop busy, none after them


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_too_many_tools_are_refused(http, path):
    error = http.refused(path, 400, model=TINY, messages=HI, max_tokens=1, tools=[{}] * 129)
    assert "128" in error["message"]


@pytest.fixture
def keyed(tmp_path):
    """A service with two keys."""
    keys = tmp_path / "keys"
    keys.write_text("ann: tml-ann-0123456789\nbob: tml-bob-0123456789\n")
    with service("fake", keys=Keys.from_file(keys)) as running:
        running.api_key = "tml-ann-0123456789"
        yield running


def test_key_is_needed(keyed):
    with Http(keyed.url) as stranger:
        for path in (CHAT, MESSAGES):
            error = stranger.refused(path, 401, model=TINY, messages=HI, max_tokens=1)
            assert error["type"] == "authentication_error"
    with Http(keyed.url, authorization="Bearer wrong") as stranger:
        assert stranger.refused(CHAT, 401, model=TINY)["code"] == "invalid_api_key"


def test_a_key_uses_only_its_own_checkpoints_and_aliases(keyed):
    training = keyed.client().create_lora_training_client(TINY)
    path = training.save_weights_for_sampler("mine").result().path
    with (
        Http(keyed.url, authorization="Bearer tml-ann-0123456789") as ann,
        Http(keyed.url, **{"x-api-key": "tml-bob-0123456789"}) as bob,
    ):
        asked = {"messages": HI, "max_tokens": 1}
        assert ann.told(CHAT, model=path, **asked)["model"] == path
        assert "There is no checkpoint" in bob.refused(CHAT, 404, model=path, **asked)["message"]
        alias = {"name": "mine", "path": path}
        assert ann.client.put("/local/aliases", json=alias).status_code == 200
        assert ann.told(MESSAGES, model="mine", **asked)["model"] == "mine"
        assert bob.refused(MESSAGES, 404, model="mine", **asked)["type"] == "not_found_error"
        assert bob.client.put("/local/aliases", json=alias).status_code == 404
        assert bob.client.get("/local/aliases").json() == {"aliases": []}
