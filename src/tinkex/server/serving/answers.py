"""Splits the text of an answer, as it arrives, into reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from .stops import overlap
from .tools import ToolFormat, ToolUse

__all__ = ["AnswerParser", "Piece", "Thinking", "ToolCall", "thinking_of"]

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"

#: Whether a model reasons before it answers: never, sometimes, or always, because the prompt ends with the opening tag.
Thinking = Literal["none", "maybe", "open"]


def thinking_of(template: str, prompt: str) -> Thinking:
    """Whether a model reasons, recognized by its chat template and by the end of the rendered prompt."""
    if prompt.rstrip().endswith(_OPEN):
        return "open"
    return "maybe" if _CLOSE in template and not prompt.rstrip().endswith(_CLOSE) else "none"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text of its reasoning or content, or a complete call."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class AnswerParser:
    """Splits the text of one answer into parts. The parts do not depend on how the text is divided when it arrives."""

    def __init__(self, thinking: Thinking, tools: ToolUse | None) -> None:
        self._tools = tools if tools is not None and tools.callable else None
        self._held = ""
        self._state: Literal["start", "reasoning", "content", "call"] = (
            "reasoning" if thinking == "open" else "start" if thinking == "maybe" else "content"
        )
        self._trim = thinking == "open"  # white space at the beginning of a part is dropped

    def add(self, text: str) -> list[Piece]:
        self._held += text
        return list(self._advance())

    def end(self) -> list[Piece]:
        """The remaining parts. A call that is cut off counts as content."""
        pieces = list(self._advance())
        calls = self._whole_answer
        rest, self._held = self._held, ""
        if calls:
            pieces += list(self._calls_in(rest))
        elif self._state == "call":
            pieces.append(Piece("content", self._format.before.strip() + rest))
        elif rest and not (self._trim and not rest.strip()):
            pieces.append(Piece("reasoning" if self._state == "reasoning" else "content", rest))
        return pieces

    @property
    def _format(self) -> ToolFormat:
        assert self._tools is not None
        return self._tools.format

    @property
    def _whole_answer(self) -> bool:
        """Whether the rest may be calls without a mark; then it is held back until the end."""
        return (
            self._state == "content"
            and self._tools is not None
            and not self._format.mark
            and self._held.lstrip()[:1] == "{"
        )

    def _advance(self) -> Iterator[Piece]:
        while True:
            before = self._state, self._held
            if self._trim:
                self._held = self._held.lstrip()
                self._trim = not self._held
            if self._state == "start":
                self._begin()
            elif self._state == "reasoning":
                yield from self._until(_CLOSE, "reasoning", "content")
            elif self._state == "call":
                yield from self._call()
            elif self._tools is not None and self._format.mark:
                yield from self._until(self._format.mark, "content", "call")
            elif (
                not self._whole_answer
                and self._held
                and not (self._tools and not self._held.strip())
            ):
                piece, self._held = Piece("content", self._held), ""
                yield piece
            if (self._state, self._held) == before:
                return

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._state, self._held, self._trim = "reasoning", text.removeprefix(_OPEN), True
        elif text and not _OPEN.startswith(text):
            self._state = "content"

    def _until(
        self, mark: str, kind: Literal["reasoning", "content"], then: Literal["content", "call"]
    ) -> Iterator[Piece]:
        text, found, rest = self._held.partition(mark)
        if found:
            self._state, self._held, self._trim = then, rest, then == "content"
            text = text.rstrip() if kind == "reasoning" or then == "call" else text
        else:
            # White space at the end of a part is dropped, and this may be the end.
            kept = max(overlap(text, mark), len(text) - len(text.rstrip()))
            kept = max(kept, len(text) - len(text[: len(text) - overlap(text, mark)].rstrip()))
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        if text:
            yield Piece(kind, text)

    def _call(self) -> Iterator[Piece]:
        mark = self._format.after.strip()
        text, found, rest = self._held.partition(mark)
        if not found:
            return
        self._state, self._held, self._trim = "content", rest, True
        call = self._read(text)
        raw = f"{self._format.before.strip()}{text}{mark}"
        yield Piece("content", raw) if call is None else Piece("call", call=call)

    def _calls_in(self, text: str) -> Iterator[Piece]:
        """The calls of an answer that consists of them, separated by white space or semicolons."""
        found, rest = [], text.strip()
        while rest:
            try:
                _, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                break
            call = self._read(rest[:end])
            if call is None:
                break
            found.append(call)
            rest = rest[end:].lstrip(" \n\t;")
        if rest:
            yield Piece("content", text)
        else:
            yield from (Piece("call", call=call) for call in found)

    def _read(self, text: str) -> ToolCall | None:
        try:
            content = json.loads(text)
        except ValueError:
            return None
        if not isinstance(content, dict):
            return None
        name, arguments = content.get("name"), content.get(self._format.arguments, {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall(name, arguments)
