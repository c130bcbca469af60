"""Requests of Anthropic's API: messages, and the number of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from tinkex.errors import InvalidInputError
from tinkex.types import SamplingParams

from .constraints import Format, format_of_response
from .requests import MAX_TOOLS, ServingRequest, check_schema, text_of
from .templates import Message
from .tools import Tool

__all__ = ["CountTokensRequest", "MessagesRequest"]

_TEXT: Final = {"text": "text"}


class CountTokensRequest(ServingRequest):
    """The part of a request that makes its prompt."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def conversation(self) -> list[Message]:
        return _anthropic_messages(self)

    @property
    def offered_tools(self) -> list[Tool]:
        return _anthropic_tools(self.tools)

    @property
    def choice(self) -> tuple[Literal["auto", "none", "required"], str | None]:
        kind, name = self.tool_choice.get("type"), self.tool_choice.get("name")
        if kind == "tool" and isinstance(name, str):
            return "required", name
        choices: dict[str, Literal["auto", "none", "required"]] = {
            "auto": "auto",
            "any": "required",
            "none": "none",
        }
        if not isinstance(kind, str) or kind not in choices:
            raise InvalidInputError(
                f"must be auto, any, none or tool with a name, not {kind!r:.60}",
                field="tool_choice",
            )
        return choices[kind], None

    @property
    def parallel(self) -> bool:
        return not self.tool_choice.get("disable_parallel_tool_use", False)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the template. `thinking` is one only where it turns reasoning off."""
        kind = "adaptive" if self.thinking is None else self.thinking.get("type")
        if kind == "disabled":
            return {"enable_thinking": False, **self.chat_template_kwargs}
        if kind != "adaptive":
            raise InvalidInputError(
                "a budget of reasoning tokens cannot be enforced; leave it out (a model that reasons does so without it)",
                field="thinking",
            )
        return self.chat_template_kwargs

    @property
    def format(self) -> Format:
        asked = self.output_format or (self.output_config or {}).get("format")
        if asked is None:
            return {}
        if not isinstance(asked, dict) or asked.get("type") != "json_schema":
            raise InvalidInputError("must be of type json_schema", field="output_config.format")
        described = {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}}
        return format_of_response(described, "output_config.format")


class MessagesRequest(CountTokensRequest):
    """`seed`, `min_p` and `return_token_ids` are extensions; `metadata` has no effect on the answer."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    return_token_ids: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences)

    def params(self, **constraint: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed,
            temperature=self.temperature,
            top_k=self.top_k or -1,
            top_p=self.top_p,
            min_p=self.min_p or None,
            **constraint,
        )


def _anthropic_messages(request: CountTokensRequest) -> list[Message]:
    """The messages as templates expect them; results of tools are messages of their own."""
    messages: list[Message] = []
    if request.system is not None:
        system = text_of(request.system, "system", _TEXT)
        messages.append({"role": "system", "content": system})
    for place, given in enumerate(request.messages):
        field = f"messages.{place}"
        role, content = given.get("role"), given.get("content")
        for name in given.keys() - {"role", "content"}:
            raise InvalidInputError(
                "this service does not support this key", field=f"{field}.{name}"
            )
        if not isinstance(role, str) or role not in {"user", "assistant"}:
            raise InvalidInputError(
                f"must be user or assistant, not {role!r:.60}", field=f"{field}.role"
            )
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _blocks(role, content, f"{field}.content")
        else:
            raise InvalidInputError(
                "must be a string or a list of blocks", field=f"{field}.content"
            )
    return messages


def _blocks(role: str, blocks: Sequence[Any], field: str) -> list[Message]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for place, block in enumerate(blocks):
        where = f"{field}.{place}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, where))
        elif kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), f"{where}.content", _TEXT)
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            )
        elif kind == "thinking" and role == "assistant":
            thoughts.append(text_of([block], where, {"thinking": "thinking"}))
        else:
            texts.append(text_of([block], field, _TEXT))
    message: Message = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*results, *([message] if texts or calls or not results else [])]


def _call(block: dict[str, Any], field: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        raise InvalidInputError("needs a name and an input that is an object", field=field)
    function = {"name": name, "arguments": given}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _anthropic_tools(given: Sequence[dict[str, Any]]) -> list[Tool]:
    tools = []
    for place, tool in enumerate(given):
        field = f"tools.{place}"
        if tool.get("type", "custom") != "custom":
            raise InvalidInputError(
                f"this service does not run tools itself, such as {tool['type']!r:.60}",
                field=f"{field}.type",
            )
        if not isinstance(tool.get("name"), str):
            raise InvalidInputError("is required", field=f"{field}.name")
        if "input_schema" not in tool:
            raise InvalidInputError("is required", field=f"{field}.input_schema")
        where = f"{field}.input_schema"
        schema = check_schema(tool["input_schema"], where)
        tools.append(Tool(tool["name"], tool.get("description"), schema, where))
    return tools
