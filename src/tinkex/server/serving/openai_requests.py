"""Requests of OpenAI's API: chat completions and completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tinkex.errors import InvalidInputError
from tinkex.types import SamplingParams

from .requests import MAX_TOOLS, ServingRequest, check_schema, text_of
from .templates import Message
from .tools import Tool

__all__ = ["ChatRequest", "CompletionRequest"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text"}
_KEYS = frozenset(
    (
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "reasoning",
        "refusal",
    )
)
_EMPTY = frozenset(("audio", "function_call", "annotations"))


class StreamOptions(ServingRequest):
    include_usage: bool = False


class _Sampled(ServingRequest):
    """Parameters of both kinds of completions. `user`, `metadata` and the like have no effect on the answer."""

    model: str
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, max_tokens: int | None, **constraint: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            temperature=self.temperature,
            top_k=self.top_k or -1,
            top_p=self.top_p,
            min_p=self.min_p or None,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or None,
            **constraint,
        )


class ChatRequest(_Sampled):
    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def topk(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("needs logprobs to be true", field="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return {**effort, **self.chat_template_kwargs}

    @property
    def conversation(self) -> list[Message]:
        return _chat_messages(self.messages)

    @property
    def offered_tools(self) -> list[Tool]:
        return _chat_tools(self.tools)

    @property
    def parallel(self) -> bool:
        return self.parallel_tool_calls

    @property
    def choice(self) -> tuple[Literal["auto", "none", "required"], str | None]:
        if isinstance(self.tool_choice, str):
            return self.tool_choice, None
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if self.tool_choice.get("type") != "function" or not isinstance(name, str):
            raise InvalidInputError(
                'must be "auto", "none", "required" or a function with its name',
                field="tool_choice",
            )
        return "required", name


class CompletionRequest(_Sampled):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    echo: bool = False
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidInputError("is empty", field="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def check(self) -> None:
        if self.best_of not in {None, self.n}:
            raise InvalidInputError(
                "must be equal to n: the service returns every answer that it samples",
                field="best_of",
            )


# -- messages and tools ---------------------------------------------------------------------------


def _chat_messages(given: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages as templates expect them: every content a string, arguments of calls as objects."""
    return [_message(message, f"messages.{place}") for place, message in enumerate(given)]


def _message(given: dict[str, Any], field: str) -> Message:
    message = {name: value for name, value in given.items() if value is not None}
    for name in message.keys() - _KEYS:
        if name in _EMPTY and not message[name]:
            continue
        raise InvalidInputError("this service does not support this key", field=f"{field}.{name}")
    role = message.get("role")
    content = text_of(message.get("content"), f"{field}.content", _PARTS)
    if role == "tool":
        return {"role": "tool", "content": content} | _kept(message, "tool_call_id", "name")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidInputError(
            f"must be system, developer, user, assistant or tool, not {role!r:.60}",
            field=f"{field}.role",
        )
    made: Message = {"role": _ROLES[role], "content": content} | _kept(message, "name")
    if role == "assistant":
        if message.get("tool_calls"):
            made["tool_calls"] = _calls(message["tool_calls"], f"{field}.tool_calls")
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if reasoning is not None:
            made["reasoning_content"] = text_of(reasoning, f"{field}.reasoning_content", _PARTS)
    return made


def _kept(message: Message, *names: str) -> Message:
    return {name: message[name] for name in names if name in message}


def _calls(given: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise InvalidInputError("must be a list", field=field)
    calls = []
    for place, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidInputError("must be a function with a name", field=f"{field}.{place}")
        arguments = function.get("arguments") or "{}"
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise InvalidInputError(
                "must be JSON", field=f"{field}.{place}.function.arguments"
            ) from None
        calls.append(
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": values},
            }
        )
    return calls


def _chat_tools(given: Sequence[dict[str, Any]]) -> list[Tool]:
    tools = []
    for place, tool in enumerate(given):
        field = f"tools.{place}"
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise InvalidInputError(
                f"must be a function; this service has no {tool.get('type')!r:.60}", field=field
            )
        function = tool["function"]
        if not isinstance(function.get("name"), str):
            raise InvalidInputError("is required", field=f"{field}.function.name")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        where = f"{field}.function.parameters"
        checked = check_schema(schema, where)
        tools.append(Tool(function["name"], function.get("description"), checked, where))
    return tools
