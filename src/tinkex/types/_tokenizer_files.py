"""The files of a tokenizer, which the local service offers to clients on other machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import Field

from ._base import ResponseModel

__all__ = ["TOKENIZER_FILES", "TokenizerFile", "TokenizerFilesResponse", "tokenizer_digest"]

#: The only files that are sent or accepted: no weights, no code. transformers reads the class from `config.json`.
TOKENIZER_FILES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TokenizerFile(ResponseModel):
    name: str
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class TokenizerFilesResponse(ResponseModel):
    """The answer of `GET /local/tokenizers/<base model>`; `sha256` covers all files together."""

    base_model: str
    sha256: Sha256
    files: list[TokenizerFile]


def tokenizer_digest(files: Iterable[TokenizerFile]) -> str:
    """One checksum for a set of files: it changes with any name or content."""
    facts = sorted((file.name, file.sha256) for file in files)
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()
