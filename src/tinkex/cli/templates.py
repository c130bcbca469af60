"""Conversations as tokens, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.errors import InvalidInputError

__all__ = ["Message", "Text", "answer_of", "chat_tokens", "stop_tokens"]

Message = Mapping[str, Any]


def chat_tokens(tokenizer: Any, messages: Sequence[Message], *, asking: bool = False) -> list[int]:
    """Token ids of a conversation; with `asking` they end where the answer of the model begins."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "the model has no chat template; choose an instruct model", field="base_model"
        )
    written = [dict(message) for message in messages]
    try:
        ids = tokenizer.apply_chat_template(
            written, return_dict=False, add_generation_prompt=asking
        )
    except (
        Exception
    ) as error:  # a template is a program and may refuse, for example, an order of roles
        raise InvalidInputError(
            f"the model's chat template refuses this conversation: {error}", field="messages"
        ) from error
    return list(ids)


def answer_of(
    tokenizer: Any, messages: Sequence[Message], answer: Message
) -> tuple[list[int], list[int]]:
    """The tokens before an answer, and those of the answer including its end token."""
    prompt = chat_tokens(tokenizer, messages, asking=True)
    whole = chat_tokens(tokenizer, [*messages, answer])
    if whole[: len(prompt)] != prompt:
        raise InvalidInputError(
            "the model's chat template writes an answer differently from the prompt for it",
            field="messages",
        )
    written = whole[len(prompt) :]
    # Templates add a line break after the end token; sampling stops before it.
    shortened = list(written)
    while shortened and tokenizer.decode(shortened[-1:]).isspace():
        shortened.pop()
    ended = shortened and not tokenizer.decode(shortened[-1:], skip_special_tokens=True)
    return prompt, shortened if ended else written


def stop_tokens(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's own, and the one its chat template writes after an answer.

    They are sent with each request because a service may have no default of its own.
    """
    ends: list[int] = []
    eos = getattr(tokenizer, "eos_token_id", None)
    if isinstance(eos, int):
        ends.append(eos)
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        _, written = answer_of(tokenizer, [asked], answer)
    except InvalidInputError:  # the template refuses this short conversation
        return ends
    last = written[-1:]
    if last and last[0] not in ends and not tokenizer.decode(last, skip_special_tokens=True):
        ends.append(last[0])
    return ends


class Text:
    """Decodes tokens one by one; a character that needs several tokens is returned when it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._told = 0
        self.whole = ""

    def add(self, token: int) -> str:
        """The new text after a token; empty while a character is incomplete."""
        self._ids.append(token)
        return self._news(final=False)

    def end(self) -> str:
        """The remaining text, complete or not."""
        return self._news(final=True)

    def _news(self, *, final: bool) -> str:
        # Decoded together with the tokens before: some tokenizers decode the start of a text differently.
        before = self._decoded(self._ids[self._start : self._told])
        now = self._decoded(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith("�") and not final):
            return ""
        self._start, self._told = self._told, len(self._ids)
        news = now[len(before) :]
        self.whole += news
        return news

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
