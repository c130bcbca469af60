"""A conversation as a prompt: messages and tools through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tinkex.errors import InvalidInputError

from .answers import Thinking, thinking_of
from .models import ServedModel
from .templates import ChatTemplate, Message
from .tools import Tool, ToolUse, explained

__all__ = ["ChatPrompt", "Conversation", "chat_prompt"]

#: Variables of a template that a request cannot choose: they are made from its other parameters.
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Conversation(Protocol):
    """The part of a chat request, of either API, that makes its prompt."""

    @property
    def model(self) -> str: ...
    @property
    def conversation(self) -> list[Message]: ...
    @property
    def offered_tools(self) -> list[Tool]: ...
    @property
    def choice(self) -> tuple[Literal["auto", "none", "required"], str | None]:
        """How tools may be called, and the name of the tool that must be called, if one is given."""

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls."""

    @property
    def template_variables(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ChatPrompt:
    tokens: list[int]
    thinking: Thinking


async def chat_prompt(
    model: ServedModel,
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: ToolUse | None,
    variables: Mapping[str, Any],
) -> ChatPrompt:
    """The tokens of a conversation; `variables` are the request's own for the template."""
    _check_variables(template, variables)
    if not messages:
        raise InvalidInputError("must have at least one message", field="messages")
    offered = tools.tools if tools is not None and tools.callable else ()
    more: dict[str, Any] = dict(variables)
    if "tools" not in template.variables:
        messages = explained(messages, offered)
    elif offered:
        more["tools"] = [tool.for_template() for tool in offered]
    text = await template.render(messages, model.in_turn, **more)
    tokens = await model.vocabulary.encode(text, model.in_turn, special=False, field="messages")
    return ChatPrompt(tokens, thinking_of(template.source, text))


def _check_variables(template: ChatTemplate, variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in _OWN or name not in template.variables:
            raise InvalidInputError(
                f"the chat template of this model does not use {name!r:.60}",
                field=f"chat_template_kwargs.{name}",
            )
