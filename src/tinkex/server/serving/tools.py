"""Tools: how a model writes its calls, grammars that force calls to match their schema, prompts for models without tools.

Models write calls in one of two formats. Hermes, Qwen and many others put JSON between `<tool_call>` tags; Llama 3
answers with one JSON object. For a model whose chat template does not support tools, the system message explains the
first format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tinkex.errors import InvalidInputError

from .templates import ChatTemplate, Message

__all__ = ["HERMES", "LLAMA", "Tool", "ToolFormat", "ToolUse", "explained", "format_of", "tool_use"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT: Final = r"/(.|\n)*/"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `schema` describes its arguments."""

    name: str
    description: str | None
    schema: dict[str, Any]
    #: Where the request has the schema.
    field: str = "tools"

    def for_template(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: as JSON with these names, between these marks."""

    before: str
    after: str
    arguments: str

    def written(self, name: str, arguments: Any) -> str:
        """A call as the model would write it."""
        call = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.before}{call}{self.after}"

    @property
    def mark(self) -> str:
        """The text by which a call is recognized; empty if the whole answer is the call."""
        return self.before.strip()


HERMES: Final = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
LLAMA: Final = ToolFormat("", "", "parameters")


def format_of(template: ChatTemplate) -> ToolFormat:
    """The format of a model, recognized by its chat template."""
    source = template.source
    if "<tool_call>" in source:
        return HERMES
    if "tools" in template.variables and '"parameters": ' in source and "python" in source:
        return LLAMA
    return HERMES


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, and how they may be called."""

    tools: tuple[Tool, ...]
    format: ToolFormat
    choice: Literal["auto", "required", "none"]
    parallel: bool = True

    @property
    def callable(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    def rules(self, formed: str | None = None) -> str:
        """Rules of a grammar in which every call fits the schema of its tool; the first is `answer`.

        Text before the mark of a call is free. With `formed`, an answer either consists of calls or matches that rule.
        """
        rules = [f"tool_{place}: {self._rule(tool)}" for place, tool in enumerate(self.tools)]
        any_tool = " | ".join(f"tool_{place}" for place in range(len(self.tools)))
        before, after = self.format.before, self.format.after
        calls = 'call ("\\n" call)*' if before and self.parallel else "call"
        if self.choice == "required" or formed is not None:
            start = calls if self.choice == "required" else f"{calls} | formed"
            rules.append(f"call: {_literal(before)} ({any_tool}) {_literal(after)}")
            rules += [] if formed is None else [f"formed: {formed}"]
        elif not before:
            start = "(call | PLAIN)"
            rules += [f"call: {any_tool}", r"PLAIN: /([^{](.|\n)*)?/"]
        else:
            start = "call* TEXT" if self.parallel else "(call | TEXT)"
            mark, rest = self.format.mark, before[len(self.format.mark) :]
            rules += [
                f"open[lazy]: TEXT {json.dumps(mark)}",
                f"call: open {json.dumps(rest)} ({any_tool}) {json.dumps(after)}",
                f"TEXT: {_TEXT}",
            ]
        return "\n".join([f"answer: {start}", *rules])

    def _rule(self, tool: Tool) -> str:
        begin = f'{{"name": {json.dumps(tool.name)}, "{self.format.arguments}": '
        schema = {**tool.schema, "x-guidance": {"whitespace_flexible": False}}
        return f'{json.dumps(begin)} %json {json.dumps(schema)} "}}"'


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def tool_use(
    tools: Sequence[Tool],
    template: ChatTemplate,
    choice: Literal["auto", "required", "none"],
    only: str | None,
    *,
    parallel: bool,
    field: str,
) -> ToolUse:
    """The tools of a request; with `only`, just the tool of that name may be called."""
    for place, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise InvalidInputError(
                f"must be 1 to 64 letters, digits, '_', '-' or '.', not {tool.name!r:.80}",
                field=f"tools.{place}.name",
            )
    if choice == "required" and not tools:
        raise InvalidInputError("needs tools", field=field)
    if only is not None:
        kept = [tool for tool in tools if tool.name == only]
        if not kept:
            raise InvalidInputError(f"there is no tool {only!r:.80}", field=field)
        return ToolUse(tuple(kept), format_of(template), "required", parallel=False)
    return ToolUse(tuple(tools), format_of(template), choice, parallel)


def explained(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Messages for a template without tools: the system message explains the tools; calls and results become text."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            plain.append({"role": "user", "content": text})
            continue
        calls = message.get("tool_calls") or ()
        written = [
            HERMES.written(call["function"]["name"], call["function"]["arguments"])
            for call in calls
        ]
        content = "\n".join([*([message["content"]] if message["content"] else []), *written])
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        plain.append({**kept, "content": content})
    if not tools:
        return plain
    first = plain[0] if plain and plain[0]["role"] == "system" else None
    said = "" if first is None else f"{first['content']}\n\n"
    system = {"role": "system", "content": f"{said}{_explanation(tools)}"}
    return [system, *(plain if first is None else plain[1:])]


def _explanation(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    return (
        f"You may call these tools:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )
