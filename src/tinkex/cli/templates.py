"""A model's way of writing conversations, through the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.errors import InvalidInputError

__all__ = ["Message", "Text", "answer_of", "chat_tokens", "stop_tokens"]

Message = Mapping[str, Any]


def chat_tokens(tokenizer: Any, messages: Sequence[Message], *, asking: bool = False) -> list[int]:
    """Token ids of a conversation; `asking` ends it where the model is to answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "the model has no chat template; choose an instruct model", field="base_model"
        )
    written = [dict(message) for message in messages]
    try:
        ids = tokenizer.apply_chat_template(
            written, return_dict=False, add_generation_prompt=asking
        )
    except Exception as error:  # a template is a program; it may refuse an order of roles
        raise InvalidInputError(
            f"the model's chat template refuses this conversation: {error}", field="messages"
        ) from error
    return list(ids)


def answer_of(
    tokenizer: Any, messages: Sequence[Message], answer: Message
) -> tuple[list[int], list[int]]:
    """The tokens that ask for an answer, and those of the answer up to the token that ends it."""
    prompt = chat_tokens(tokenizer, messages, asking=True)
    whole = chat_tokens(tokenizer, [*messages, answer])
    if whole[: len(prompt)] != prompt:
        raise InvalidInputError(
            "the model's chat template does not write answers as it asks for them",
            field="messages",
        )
    written = whole[len(prompt) :]
    # Templates end the line after the token that ends the answer; nobody samples that far.
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
    except InvalidInputError:  # the template has its own idea of a conversation
        return ends
    last = written[-1:]
    if last and last[0] not in ends and not tokenizer.decode(last, skip_special_tokens=True):
        ends.append(last[0])
    return ends


class Text:
    """Text of tokens that come one by one: a character may take several, and is told when it is whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._told = 0
        self.whole = ""

    def add(self, token: int) -> str:
        """What a token adds, which is nothing while a character is incomplete."""
        self._ids.append(token)
        return self._news(final=False)

    def end(self) -> str:
        """What is left, complete or not."""
        return self._news(final=True)

    def _news(self, *, final: bool) -> str:
        # Decoded with the tokens told last before them: some tokenizers begin a text differently.
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
