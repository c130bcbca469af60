"""OpenAI's API: answers, streams and parameters."""

from __future__ import annotations

import json

import pytest

from tinkex.types import ModelInput, SamplingParams

TINY = "tinkex/tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
#: "Hi" in the chat template of `tinkex/tiny`.
PROMPT = [259, *b"user\nHi", 260, 10, 259, *b"assistant\n"]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def sampler(served):
    return served.client().create_sampling_client(base_model=TINY)


def native(sampler, prompt, **params):
    return (
        sampler.sample(ModelInput.from_ints(prompt), 1, SamplingParams(**params))
        .result()
        .sequences[0]
    )


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
def test_models_are_listed(http, prefix):
    listed = http.client.get(f"{prefix}/models").json()
    assert [model["id"] for model in listed["data"]][:2] == [TINY, "thinker"]
    assert http.client.get(f"{prefix}/models/{TINY}").json()["id"] == TINY
    assert http.client.get(f"{prefix}/models/none").status_code == 404


@pytest.mark.parametrize("path", [CHAT, "/oai/api/v1/chat/completions"])
def test_chat_equals_native_sampling(http, sampler, path):
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 5, "max_tokens": 12}
    answer = http.told(
        path, model=TINY, messages=HI, return_token_ids=True, logprobs=True, **options
    )
    expected = native(sampler, PROMPT, **options)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == expected.tokens
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == pytest.approx(expected.logprobs, abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
    assert answer["object"] == "chat.completion"


def test_content_parts_and_developer_messages_are_text(http):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    whole = http.told(
        CHAT,
        model=TINY,
        messages=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}],
        return_token_ids=True,
        max_tokens=1,
    )
    prompt = bytes(token for token in whole["choices"][0]["prompt_token_ids"] if token < 256)
    assert prompt == b"system\nBe kind.\nuser\nHi\nassistant\n"


def test_several_answers_differ_and_repeat_with_the_seed(http):
    asked = {
        "model": TINY,
        "messages": HI,
        "n": 3,
        "seed": 1,
        "max_tokens": 6,
        "return_token_ids": True,
    }
    choices = http.told(CHAT, **asked)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    again = http.told(CHAT, **asked)["choices"]
    assert [choice["token_ids"] for choice in again] == [choice["token_ids"] for choice in choices]


def test_stream_has_the_text_tokens_and_logprobs_of_the_whole_answer(http):
    asked = {
        "model": TINY,
        "messages": HI,
        "seed": 9,
        "max_tokens": 24,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "return_token_ids": True,
    }
    whole = http.told(CHAT, **asked)
    *chunks, usage, done = http.events(CHAT, stream_options={"include_usage": True}, **asked)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"]
        tokens = [token for part in parts for token in part.get("token_ids", ())]
        assert tokens == choice["token_ids"]
        entries = [
            entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]
        ]
        assert entries == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        assert parts[0]["delta"]["role"] == "assistant"


def test_tokens_arrive_one_by_one(http):
    chunks = http.events(
        CHAT, model=TINY, messages=HI, max_tokens=8, return_token_ids=True, logit_bias=ascii_only()
    )
    counts = [len(chunk["choices"][0].get("token_ids", ())) for chunk in chunks[:-1]]
    assert max(counts) == 1
    assert sum(counts) == 8


def ascii_only() -> dict[str, float]:
    return {str(token): -100 for token in (*range(32), *range(127, 264))}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer_and_is_not_part_of_it(http, stream):
    asked = {"model": TINY, "messages": HI, "seed": 3, "max_tokens": 60, "logit_bias": ascii_only()}
    text = http.told(CHAT, **asked)["choices"][0]["message"]["content"]
    assert len(text) == 60
    stop = text[20:23]
    if stream:
        chunks = http.events(CHAT, stop=[stop, "\x01\x02"], **asked)[:-1]
        found = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = http.told(CHAT, stop=stop, **asked)["choices"]
        found, reason = choice["message"]["content"], choice["finish_reason"]
    assert found == text[: text.index(stop)]
    assert reason == "stop"


def test_penalties_and_bias_change_the_answer(http):
    asked = {
        "model": TINY,
        "messages": HI,
        "temperature": 0,
        "max_tokens": 12,
        "return_token_ids": True,
    }
    forced = http.told(CHAT, logit_bias={"65": 100}, **asked)["choices"][0]["token_ids"]
    assert forced == [65] * 12
    varied = http.told(
        CHAT, logit_bias={"65": 4}, frequency_penalty=2.0, presence_penalty=2.0, **asked
    )
    assert len(set(varied["choices"][0]["token_ids"])) > 6


# -- completions --------------------------------------------------------------------------------------


def test_completion_equals_native_sampling(http, sampler):
    options = {"temperature": 1.0, "seed": 2, "max_tokens": 9}
    answer = http.told(TEXT, model=TINY, prompt="Once", return_token_ids=True, **options)
    assert answer["choices"][0]["token_ids"] == native(sampler, list(b"Once"), **options).tokens
    assert answer["object"] == "text_completion"


def test_completion_takes_prompts_as_texts_and_tokens(http):
    one = http.told(TEXT, model=TINY, prompt="abc", seed=1, return_token_ids=True)["choices"][0]
    same = http.told(TEXT, model=TINY, prompt=[97, 98, 99], seed=1, return_token_ids=True)[
        "choices"
    ][0]
    assert same["token_ids"] == one["token_ids"]
    several = http.told(TEXT, model=TINY, prompt=["abc", "xyz"], n=2, seed=1, return_token_ids=True)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["token_ids"] == one["token_ids"]
    both = http.told(TEXT, model=TINY, prompt=[[97, 98, 99], [1]], seed=1, return_token_ids=True)
    assert both["choices"][0]["token_ids"] == one["token_ids"]


def test_echo_scores_the_prompt_like_compute_logprobs(http, sampler):
    prompt = list(b"The quick brown fox")
    answer = http.told(
        TEXT, model=TINY, prompt=prompt, echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    logprobs = answer["choices"][0]["logprobs"]
    expected = sampler.compute_logprobs(ModelInput.from_ints(prompt)).result()
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected[1:], abs=1e-4)
    assert logprobs["tokens"][:3] == ["T", "h", "e"]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(row) in {1, 2} for row in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    assert answer["choices"][0]["text"].startswith("The quick brown fox")


def test_echo_without_new_tokens_only_scores(http):
    answer = http.told(TEXT, model=TINY, prompt="score me", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "score me"
    assert len(choice["logprobs"]["token_logprobs"]) == 8


def test_completion_streams(http):
    asked = {"model": TINY, "prompt": "Once", "seed": 6, "max_tokens": 10, "logprobs": 1}
    whole = http.told(TEXT, **asked)["choices"][0]
    *chunks, done = http.events(TEXT, **asked)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    scores = [
        score
        for chunk in chunks
        for score in (chunk["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert scores == whole["logprobs"]["token_logprobs"]


# -- formats and tools --------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_is_the_first_event_of_a_stream(http, logprobs):
    asked = {"model": TINY, "prompt": ["Once", "upon"], "n": 2, "seed": 6, "max_tokens": 5}
    asked |= {"echo": True, "logit_bias": ascii_only(), "stream_options": {"include_usage": True}}
    asked |= {} if logprobs is None else {"logprobs": logprobs}
    whole = http.told(TEXT, **{name: asked[name] for name in asked if name != "stream_options"})
    *chunks, last, done = http.events(TEXT, **asked)
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["text"] == ["Once", "upon"][choice["index"] // 2]
        assert "".join(part["text"] for part in mine) == choice["text"]
        if logprobs is None:
            assert all(part["logprobs"] is None for part in mine)
            continue
        for name in ("tokens", "text_offset"):
            parts = [part["logprobs"][name] for part in mine if part["logprobs"]]
            assert [each for part in parts for each in part] == choice["logprobs"][name]
        assert mine[0]["logprobs"]["token_logprobs"][0] is None
        scores = [
            each for part in mine if part["logprobs"] for each in part["logprobs"]["token_logprobs"]
        ]
        assert scores[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)


def test_stream_of_an_echo_alone(http):
    first, _, done = http.events(
        TEXT, model=TINY, prompt="score", echo=True, logprobs=0, max_tokens=0
    )
    assert first["choices"][0]["text"] == "score"
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 5
    assert done == "[DONE]"


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", [TINY, "thinker"])
def test_answer_fits_its_schema(http, model):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}} if model == "thinker" else {}
    for seed in range(3):
        answer = http.told(
            CHAT, model=model, messages=HI, response_format=form, seed=seed, **kwargs
        )
        (choice,) = answer["choices"]
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 99
        assert choice["finish_reason"] == "stop"


def test_json_object_begins_as_an_object(http):
    form = {"type": "json_object"}
    text = http.told(CHAT, model=TINY, messages=HI, response_format=form, max_tokens=8)
    assert text["choices"][0]["message"]["content"].startswith("{")


def test_regular_expression(http):
    form = {"type": "regex", "regex": "(yes|no)"}
    text = http.told(TEXT, model=TINY, prompt="Well?", response_format=form)["choices"][0]["text"]
    assert text in {"yes", "no"}


@pytest.mark.parametrize("model", [TINY, "thinker"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_required_call_fits_the_schema_of_its_tool(http, model, choice):
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}} if model == "thinker" else {}
    asked = {
        "model": model,
        "messages": HI,
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = http.told(CHAT, **asked, **kwargs)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert 0 <= json.loads(call["function"]["arguments"])["x"] <= 999
    assert answer["message"]["content"] is None


FORM = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}


@pytest.mark.parametrize("model", [TINY, "thinker"])
def test_answer_that_calls_no_tool_has_the_format(http, model):
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}} if model == "thinker" else {}
    asked = {"model": model, "messages": HI, "tools": [ADD], "response_format": FORM, **kwargs}
    asked["parallel_tool_calls"] = False
    called = http.told(CHAT, **asked, logit_bias={str(ord("<")): 60})["choices"][0]["message"]
    assert called["tool_calls"][0]["function"]["name"] == "add"
    assert called["content"] is None
    answered = http.told(CHAT, **asked, logit_bias={str(ord('"')): 60})["choices"][0]
    assert json.loads(answered["message"]["content"]) in {"yes", "no"}
    assert answered["finish_reason"] == "stop"


def test_required_call_comes_before_the_format(http):
    asked = {"model": TINY, "messages": HI, "tools": [ADD], "response_format": FORM}
    (choice,) = http.told(CHAT, **asked, tool_choice="required", parallel_tool_calls=False)[
        "choices"
    ]
    assert choice["finish_reason"] == "tool_calls"


def test_call_is_streamed(http):
    asked = {
        "model": TINY,
        "messages": HI,
        "tools": [ADD],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    chunks = http.events(CHAT, **asked)[:-1]
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [call["index"] for call in calls] == [0]
    assert json.loads(calls[0]["function"]["arguments"]).keys() == {"x"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_reach_the_template_and_calls_come_back_in_history(http):
    history = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    for model, written in (
        (TINY, '{"name": "add", "arguments": {"x": 1}}'),
        ("thinker", '"arguments": {"x": 1}'),
    ):
        answer = http.told(
            CHAT,
            model=model,
            messages=history,
            tools=[ADD],
            tool_choice="auto",
            max_tokens=1,
            return_token_ids=True,
        )
        prompt = bytes(
            token for token in answer["choices"][0]["prompt_token_ids"] if token < 256
        ).decode()
        assert '"description": "Adds."' in prompt
        assert written in prompt
        assert "2" in prompt.split("arguments")[-1]


def test_no_tools_are_offered_with_choice_none(http):
    answer = http.told(
        CHAT,
        model="thinker",
        messages=HI,
        tools=[ADD],
        tool_choice="none",
        max_tokens=1,
        return_token_ids=True,
    )
    prompt = bytes(token for token in answer["choices"][0]["prompt_token_ids"] if token < 256)
    assert b"Adds." not in prompt


THOUGHT = {"type": "grammar", "grammar": 'start: "<think>because</think>\\n" /[a-z]{4}/'}


def test_reasoning_is_separated_from_the_answer(http):
    asked = {"model": "thinker", "messages": HI, "response_format": THOUGHT, "seed": 1}
    message = http.told(CHAT, **asked)["choices"][0]["message"]
    assert message["reasoning_content"] == "because"
    assert len(message["content"]) == 4
    deltas = [chunk["choices"][0]["delta"] for chunk in http.events(CHAT, **asked)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "because"
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_reasoning_stays_in_the_text_of_a_model_that_has_none(http):
    message = http.told(CHAT, model=TINY, messages=HI, response_format=THOUGHT)["choices"][0][
        "message"
    ]
    assert message["content"].startswith("<think>because</think>")
    assert "reasoning_content" not in message


def test_reasoning_may_come_before_an_answer_with_a_schema(http):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    asked = {"model": "thinker", "messages": HI, "response_format": form, "max_tokens": 100}
    answered = http.told(CHAT, **asked, logit_bias={str(ord("{")): 50})["choices"][0]["message"]
    assert json.loads(answered["content"]).keys() == {"name", "age"}
    assert "reasoning_content" not in answered
    reasoned = http.told(CHAT, **asked, logit_bias={str(ord("<")): 50})["choices"][0]["message"]
    assert reasoned["reasoning_content"] == "<" * 93
