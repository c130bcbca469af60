"""Chat templates: messages as the text that a model was trained on.

The template is the model's own and runs in the sandbox of jinja2 with what transformers offers it: white space control,
loop controls, `tojson`, `raise_exception`, `strftime_now` and the tag `generation`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinkex.errors import InvalidInputError
from tinkex.server.threads import InTurn

from .vocabulary import Vocabulary

__all__ = ["ChatTemplate", "Message"]

Message = dict[str, Any]
#: Longer conversations are rendered in a thread.
_OFF_LOOP: Final = 16_384


class _Generation(Extension):
    """The tag `generation`, with which templates mark answers for training; it has no effect when sampling."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._names = dict(names)

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> ChatTemplate:
        if vocabulary.chat_template is None:
            raise InvalidInputError(
                "this model has no chat template; use completions with a prompt", field="model"
            )
        return cls(vocabulary.chat_template, vocabulary.named_tokens)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, such as `tools` or `enable_thinking`."""
        try:
            return frozenset(meta.find_undeclared_variables(_environment().parse(self.source)))
        except TemplateError as error:
            raise _refused(error) from None

    @cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self.source)

    async def render(
        self, messages: Sequence[Message], in_turn: InTurn, /, **variables: Any
    ) -> str:
        """The prompt of a conversation, up to the beginning of the next answer."""
        size = sum(len(str(message.get("content"))) for message in messages)
        if size < _OFF_LOOP:
            return self._render(messages, variables)
        return await in_turn(self._render, messages, variables)

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        given = {**self._names, "add_generation_prompt": True, **variables}
        try:
            text: str = self._compiled.render(messages=list(messages), **given)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise _refused(error) from None
        return text


def _refused(error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"the model's chat template does not accept these messages: {error}"[:500], field="messages"
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
