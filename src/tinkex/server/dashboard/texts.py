"""Text and tokens of base models, in the service: for prompts of the playground and for tokens of samples.

Reads `tokenizer.json` with the library that all fast tokenizers are made of, so neither torch nor transformers is
loaded into the process of the service.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinkex.errors import InvalidInputError

__all__ = ["Stretch", "Texts", "texts_of"]


@lru_cache(maxsize=8)
def texts_of(directory: Path) -> Texts:
    """The texts of the base model in a directory."""
    return Texts(directory)


class Texts:
    """The tokenizer and the chat template of one base model."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._config = _json(directory / "tokenizer_config.json")
        self._template = _template(directory, self._config)
        self._known: dict[int, str] = {}

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        return text

    def each(self, tokens: Iterable[int]) -> list[str]:
        """The text of every token by itself; a token may be a part of a character."""
        found = []
        for token in tokens:
            text = self._known.get(token)
            if text is None:
                known = 0 <= token < self._tokenizer.get_vocab_size()
                text = self._tokenizer.decode([token], skip_special_tokens=False) if known else "?"
                self._known[token] = text
            found.append(text)
        return found

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins."""
        if self._template is None:
            raise InvalidInputError(
                "the base model has no chat template; give a plain prompt", field="messages"
            )
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # A model may come from anywhere, and so may its template.
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = {
            name: value if isinstance(value, str) else value.get("content", "")
            for name, value in self._config.items()
            if name in {"bos_token", "eos_token"} and value
        }
        try:
            text = sandbox.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **names
            )
        except TemplateError as error:
            raise InvalidInputError(
                f"the chat template refuses them: {error}", field="messages"
            ) from error
        return self.encode(text, special=False)


class Stretch:
    """Decodes tokens one by one into pieces of text whose sum is the text of all of them."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._tokens: list[int] = []
        self._start = 0  # from where on tokens are decoded anew
        self._done = ""  # the text of these tokens that was given out

    def add(self, token: int) -> str:
        """The text that a token adds; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._texts.decode(self._tokens[self._start :])
        if text.endswith("\ufffd"):
            return ""
        more = text[len(self._done) :]
        self._done = text
        if len(self._tokens) - self._start > 32 and text.endswith("\n"):
            self._start, self._done = len(self._tokens), ""  # so that long texts stay cheap
        return more

    def rest(self) -> str:
        """What is left of an incomplete character at the end."""
        text = self._texts.decode(self._tokens[self._start :])
        return text[len(self._done) :]


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
