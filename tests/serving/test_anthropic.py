"""Anthropic's API: answers, streams and parameters."""

from __future__ import annotations

import json

import pytest

from tinkex.types import ModelInput, SamplingParams

from .test_openai import ADD, HI, PROMPT, SCHEMA, THOUGHT, TINY

MESSAGES = "/v1/messages"
TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]


@pytest.mark.parametrize("path", [MESSAGES, "/anthropic/api/v1/messages"])
def test_message_equals_native_sampling(http, served, path):
    options = {"temperature": 0.7, "top_p": 0.95, "seed": 8, "max_tokens": 10}
    answer = http.told(path, model=TINY, messages=HI, return_token_ids=True, **options)
    sampler = served.client().create_sampling_client(base_model=TINY)
    drawn = sampler.sample(ModelInput.from_ints(PROMPT), 1, SamplingParams(**options)).result()
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["token_ids"] == drawn.sequences[0].tokens
    assert answer["usage"]["input_tokens"] == len(PROMPT)
    assert answer["usage"]["output_tokens"] == len(drawn.sequences[0].tokens)
    assert (answer["type"], answer["role"]) == ("message", "assistant")


def test_models_are_listed_in_anthropics_form(http):
    for path, headers in (
        ("/anthropic/api/v1/models", {}),
        ("/v1/models", {"anthropic-version": "2023-06-01"}),
    ):
        listed = http.client.get(path, headers=headers).json()
        assert [model["id"] for model in listed["data"]][:2] == [TINY, "thinker"]
        assert listed["data"][0]["type"] == "model"
        assert listed["has_more"] is False


def test_tokens_are_counted(http):
    counted = http.told("/v1/messages/count_tokens", model=TINY, messages=HI)
    assert counted == {"input_tokens": len(PROMPT)}
    more = http.told(
        "/anthropic/api/v1/messages/count_tokens", model=TINY, messages=HI, tools=[TOOL]
    )
    assert more["input_tokens"] > len(PROMPT)


def test_system_and_blocks_make_the_prompt(http):
    answer = http.told(
        MESSAGES,
        model="thinker",
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Sure."},
                    {"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}],
            },
        ],
        max_tokens=1,
        return_token_ids=True,
    )
    prompt = bytes(token for token in answer["prompt_token_ids"] if token < 256).decode()
    assert prompt.startswith("systemBe kind.")
    assert "<think>hm</think>" in prompt
    assert '"arguments": {"x": 1}' in prompt
    assert "tool2" in prompt


def test_stream_has_the_blocks_of_the_whole_message(http):
    asked = {"model": "thinker", "messages": HI, "max_tokens": 60, "seed": 2}
    asked |= {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked["chat_template_kwargs"] = {"enable_thinking": False}
    asked["max_tokens"] = 200
    whole = http.told(MESSAGES, **asked)
    events = http.events(MESSAGES, **asked)
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    (block,) = whole["content"]
    assert block["type"] == "tool_use"
    assert 0 <= block["input"]["x"] <= 999
    assert json.loads(events[2]["delta"]["partial_json"]) == block["input"]
    assert events[4]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert _tokens(events[4]["usage"]) == _tokens(whole["usage"])


def _tokens(usage: dict[str, int]) -> tuple[int, int]:
    """Prompt and answer; the second time, the cache holds most of the prompt."""
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return prompt, usage["output_tokens"]


def test_text_is_streamed_token_by_token(http):
    asked = {"model": TINY, "messages": HI, "max_tokens": 16, "seed": 3}
    whole = http.told(MESSAGES, **asked)
    events = http.events(MESSAGES, **asked)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
    assert len(deltas) > 4


def test_stop_sequence_is_named(http):
    letters = {"type": "json_schema", "schema": {"type": "string", "pattern": "^ab#cd$"}}
    asked = {"model": TINY, "messages": HI, "max_tokens": 30, "output_config": {"format": letters}}
    answer = http.told(MESSAGES, stop_sequences=["#"], **asked)
    assert answer["content"] == [{"type": "text", "text": '"ab'}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "#")
    assert http.told(MESSAGES, **asked)["stop_reason"] == "end_turn"


def test_output_format_is_followed(http):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = http.told(MESSAGES, model=TINY, messages=HI, max_tokens=100, output_config=form)
    assert json.loads(answer["content"][0]["text"]).keys() == {"name", "age"}


def test_reasoning_is_a_thinking_block(http):
    form = {"type": "json_schema", "schema": {"const": "x"}}
    whole = http.told(
        MESSAGES,
        model="thinker",
        messages=HI,
        max_tokens=9,
        output_config={"format": form},
        thinking={"type": "disabled"},
    )
    assert whole["content"] == [{"type": "text", "text": '"x"'}]
    assert THOUGHT["type"] == "grammar"
