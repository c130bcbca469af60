"""The tokenizer of a base model in the service: text to tokens, and each token to its bytes.

Text is decoded byte by byte, so that a streamed answer and a whole one have the same text, and a character that several
tokens share is sent when it is complete. transformers is loaded only for a model without a `tokenizer.json`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from tinkex.engine.base_models import PreparedModel
from tinkex.errors import InvalidInputError
from tinkex.server.file_threads import FileThreads
from tinkex.server.threads import InTurn

__all__ = ["TextDecoder", "Vocabularies", "Vocabulary"]

#: Longer texts are tokenized in a thread: a thousand characters take about a tenth of a millisecond.
_OFF_LOOP: Final = 8192
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class _Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that the service uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...


class Vocabulary:
    """Tokens of one base model."""

    def __init__(self, model: PreparedModel) -> None:
        self._directory = model.directory
        self.context_length = model.context_length
        self.vocab_size = model.vocab_size
        self.ends = model.eos_token_ids
        self._tokenizer: _Tokenizer = _load(self._directory)
        self._bytes: dict[int, bytes] = {}

    # -- text to tokens ----------------------------------------------------------------------

    async def encode(self, text: str, in_turn: InTurn, *, special: bool, field: str) -> list[int]:
        """The tokens of a text; `special` adds those that the model's tokenizer puts around it."""
        if len(text) < _OFF_LOOP:
            return self._encode(text, special)
        most = self.context_length * self._longest_token
        if len(text) > most:  # tokenizing megabytes takes seconds
            raise InvalidInputError(
                f"has {len(text)} characters; the model's context of {self.context_length} tokens has room for "
                f"{most} at most",
                field=field,
            )
        return await in_turn(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        names = map(self._tokenizer.id_to_token, range(self.vocab_size))
        return max(len(name) for name in names if name is not None)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    # -- tokens to text ----------------------------------------------------------------------

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; for a special token, its name."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._decoded(token)
        return known

    def token_text(self, token: int) -> str:
        """The text of a token by itself, which may be a part of a character; `?` if there is no such token."""
        known = 0 <= token < self.vocab_size
        return self.token_bytes(token).decode("utf-8", "replace") if known else "?"

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; special ones have none unless they are asked for."""
        known = [token for token in tokens if 0 <= token < self.vocab_size]
        decoder = TextDecoder(self, frozenset(known) if special else frozenset())
        return "".join(map(decoder.add, known)) + decoder.end()

    def _decoded(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:  # the model's vocabulary is padded
            return b""
        if token in self.added:
            return text.encode()
        if found := _BYTE.fullmatch(text):
            return bytes.fromhex(found[1])
        if self._byte_level:
            return bytes(_BYTES_OF[char] if char in _BYTES_OF else ord("?") for char in text)
        return text.replace("▁", " ").encode()

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        file = self._directory / "tokenizer.json"
        found: Mapping[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
        return found

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(self._settings.get("decoder"))

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether the tokenizer writes a space before the first word that is not part of the text."""
        decoder = json.dumps(self._settings.get("decoder"))
        return '"Strip"' in decoder or '"Metaspace"' in decoder

    @cached_property
    def added(self) -> Mapping[int, bool]:
        """Tokens added to the vocabulary as whole strings; True for special tokens, which are not text."""
        return {
            int(token["id"]): bool(token.get("special"))
            for token in self._settings.get("added_tokens", ())
        }

    def is_special(self, token: int) -> bool:
        return self.added.get(token, False) or token in self.ends

    # -- configuration -----------------------------------------------------------------------

    @cached_property
    def configuration(self) -> Mapping[str, Any]:
        file = self._directory / "tokenizer_config.json"
        found: Mapping[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
        return found

    @cached_property
    def named_tokens(self) -> Mapping[str, str]:
        """The texts of `bos_token`, `eos_token` and others, which chat templates use."""
        given = {name: self.configuration.get(name) for name in _NAMED}
        texts = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in given.items()
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def chat_template(self) -> str | None:
        """The model's chat template: a file of its own, or an entry of `tokenizer_config.json`."""
        file = self._directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.configuration.get("chat_template")
        if isinstance(template, list):  # several templates by name
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        return template if isinstance(template, str) else None

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer: the model's, and the end token of its tokenizer."""
        named = self.token_id(self.named_tokens.get("eos_token", ""))
        return tuple(dict.fromkeys([*self.ends, *([] if named is None else [named])]))


class TextDecoder:
    """Text of tokens that arrive one by one. Special tokens have no text, except those in `shown`."""

    def __init__(self, vocabulary: Vocabulary, shown: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = vocabulary.strips_first_space

    def add(self, token: int) -> str:
        """The text that is complete with this token."""
        if self._vocabulary.is_special(token) and token not in self._shown:
            return ""
        text = self._decoder.decode(self._vocabulary.token_bytes(token))
        if self._first and text:
            self._first = False
            text = text.removeprefix(" ")
        return text

    def end(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Vocabularies:
    """The vocabularies of all base models, each loaded once."""

    def __init__(self, files: FileThreads) -> None:
        self._files = files
        self._loaded: dict[Path, Vocabulary] = {}
        self._loading = asyncio.Lock()

    def known(self, model: PreparedModel) -> Vocabulary | None:
        return self._loaded.get(model.directory)

    async def of(self, model: PreparedModel) -> Vocabulary:
        found = self._loaded.get(model.directory)
        if found is None:
            async with self._loading:
                found = self._loaded.get(model.directory)
                if found is None:
                    found = await self._files(Vocabulary, model)
                    self._loaded[model.directory] = found
        return found


def _load(directory: Path) -> _Tokenizer:
    fast = directory / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(fast))
    from transformers import AutoTokenizer

    return _Slow(AutoTokenizer.from_pretrained(str(directory)))


class _Slow:
    """A tokenizer of transformers without a `tokenizer.json`, with the methods that the service uses."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return _Encoded(ids)

    def id_to_token(self, id: int) -> str | None:
        token: str | None = self._tokenizer.convert_ids_to_tokens(id)
        return token

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found


class _Encoded:
    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)


def _byte_table() -> dict[str, int]:
    """How byte-level tokenizers write bytes as characters: printable ones unchanged, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES_OF: Final = _byte_table()
