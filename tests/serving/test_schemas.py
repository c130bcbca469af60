"""JSON schemas made at random: every constrained answer parses and validates."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher, LLTokenizer

from tinkex.server.serving.tools import HERMES, Tool, ToolUse

from .test_openai import CHAT, HI, TINY

#: Schemas of the short form; `--long` tries 200.
SHORT, LONG = 25, 200


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema whose answers are short: a model that knows nothing writes them."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "string":
        return rng.choice(
            [
                {"type": "string", "maxLength": rng.randint(0, 12)},
                {"type": "string", "pattern": "^[a-c]{2,5}$"},
                {"type": "string", "format": "date"},
                {"type": "string", "minLength": 2, "maxLength": 4},
            ]
        )
    if kind in {"integer", "number"}:
        low = rng.randint(-1000, 1000)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind in {"boolean", "null"}:
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, None, True, "é€😀"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x", 12, False, None])}
    if kind == "array":
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": schema(rng, depth + 1),
            "minItems": low,
            "maxItems": low + 2,
        }
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}
    names = rng.sample(["a", "b c", "naïve", "d", "e_1"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def test_every_constrained_answer_parses_and_validates(http, request):
    count = LONG if request.config.getoption("--long") else SHORT
    for seed in range(count):
        wanted = schema(random.Random(seed))
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted}}
        answer = http.told(
            CHAT, model=TINY, messages=HI, response_format=form, seed=seed, temperature=1.3
        )
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", wanted
        jsonschema.validate(json.loads(choice["message"]["content"]), wanted)


@pytest.mark.parametrize("path", ["chat", "messages"])
def test_arguments_of_calls_validate(http, path):
    rng = random.Random(1)
    for seed in range(6):
        properties = {"v": schema(rng, 1), "w": schema(rng, 1)}
        wanted = {
            "type": "object",
            "properties": properties,
            "required": ["v", "w"],
            "additionalProperties": False,
        }
        if path == "chat":
            tool = {"type": "function", "function": {"name": "f", "parameters": wanted}}
            asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
            message = http.told(CHAT, model=TINY, messages=HI, seed=seed, **asked)["choices"][0][
                "message"
            ]
            found = json.loads(message["tool_calls"][0]["function"]["arguments"])
        else:
            tools = [{"name": "f", "input_schema": wanted}]
            asked = {
                "tools": tools,
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            }
            answer = http.told(
                "/v1/messages", model=TINY, messages=HI, max_tokens=1500, seed=seed, **asked
            )
            found = answer["content"][0]["input"]
        jsonschema.validate(found, wanted)


def test_mark_of_a_call_makes_the_rest_fit_its_schema(thinker):
    """With tool_choice auto, text is free until the mark."""
    arguments = {"type": "object", "properties": {"x": {"enum": ["one", "two"]}}, "required": ["x"]}
    use = ToolUse((Tool("f", None, {**arguments, "additionalProperties": False}),), HERMES, "auto")
    tokenizer = LLTokenizer(str(thinker / "tokenizer.json"), n_vocab=264, eos_token=[257])
    matcher = LLMatcher(tokenizer, f"%llguidance {{}}\nstart: answer\n{use.rules()}")
    assert not matcher.is_error(), matcher.get_error()
    start = "Well <tool_call>"
    right = start + '\n{"name": "f", "arguments": {"x":"two"}}\n</tool_call> and more'
    assert matcher.validate_tokens(list(right.encode())) == len(right)
    for wrong in ("\nnonsense", '\n{"name": "g"', '\n{"name": "f", "arguments": {"x":"three'):
        assert matcher.validate_tokens(list((start + wrong).encode())) < len(start + wrong)
