"""What the text of an answer must match: from `response_format`, from the tools, and after reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tinkex.errors import InvalidInputError

from .answers import Thinking
from .requests import check_schema
from .tools import ToolUse

__all__ = ["Format", "constraint", "format_of_response"]

#: A constraint of `SamplingParams`, by the name of its field.
Format = Mapping[str, Any]

_THOUGHT: Final = r"""
thought[lazy]: THOUGHT_TEXT "</think>"
THOUGHT_TEXT: /(.|\n)*/
BREAKS: /\n{0,2}/
"""


def format_of_response(asked: Mapping[str, Any] | None, field: str = "response_format") -> Format:
    """The constraint that a `response_format` asks for; empty for plain text."""
    kind = "text" if asked is None else asked.get("type")
    if asked is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema":
        described = asked.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise InvalidInputError("needs a schema", field=f"{field}.json_schema")
        return {"json_schema": check_schema(described["schema"], f"{field}.json_schema.schema")}
    if isinstance(kind, str) and kind in {"regex", "grammar"} and isinstance(asked.get(kind), str):
        return {kind: asked[kind]}
    raise InvalidInputError(
        f"must be text, json_object, json_schema, regex or grammar, not {kind!r:.60}",
        field=f"{field}.type",
    )


def constraint(
    form: Format, tools: ToolUse | None, thinking: Thinking, field: str = "response_format"
) -> Format:
    """The constraint of an answer. Reasoning comes before it and is free.

    With tools, an answer without calls must match `form`. `field` is the request's field that asked for `form`.
    """
    if tools is not None and tools.callable:
        if "grammar" in form:
            raise InvalidInputError("a grammar cannot be combined with tools", field=field)
        return {"grammar": _after_reasoning(tools.rules(_rule(form) if form else None), thinking)}
    if (
        not form or thinking == "none" or "grammar" in form
    ):  # a grammar of the user defines the whole answer, including reasoning
        return form
    return {"grammar": _after_reasoning(f"answer: {_rule(form)}", thinking)}


def _rule(form: Format) -> str:
    if "json_schema" in form:
        schema = {"x-guidance": {"whitespace_flexible": False}, **form["json_schema"]}
        return f"%json {json.dumps(schema)}"
    escaped = form["regex"].replace("/", r"\/")
    return f"/{escaped}/"


def _after_reasoning(rules: str, thinking: Thinking) -> str:
    if thinking == "none":
        return f"%llguidance {{}}\nstart: answer\n{rules}"
    preface = "thought BREAKS" if thinking == "open" else '("<think>" thought BREAKS)?'
    return f"%llguidance {{}}\nstart: {preface} answer\n{rules}\n{_THOUGHT}"
