"""Find and load the tokenizer of a model."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from tinkex.errors import InvalidInputError

__all__ = ["decode", "encode", "is_path", "load_tokenizer", "set_tokenizer_loader", "tokenizer_id"]

Loader = Callable[[str, str | None], Any]

#: An open copy: the repositories of Llama 3 are gated.
_LLAMA_3: Final = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
_LOCAL: Final = re.compile(r"[/\\.~]|[A-Za-z]:[/\\]")
#: Tokenizers that run code from their repository; each is pinned to one revision.
_PINNED: Final = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
#: Models that use the tokenizer of another model.
_SHARED: Final = {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}
#: Models whose tokenizers are in the package `tml_tokenizers`.
_MAKERS: Final = ("TML/", "thinkingmachines/")


def tokenizer_id(model_name: str, stated: str | None = None) -> str:
    """The id to load: the one that the service states, else one derived from the model's name.

    A suffix after the first colon names a variant of the model; the tokenizer is the same. A local path is returned
    unchanged.
    """
    if is_path(stated or model_name):
        return stated or model_name
    name = (stated or model_name).partition(":")[0]
    if not stated:
        if name.startswith("meta-llama/Llama-3"):
            return _LLAMA_3
        if name.count("/") == 2:
            name = name.rpartition("/")[0]
    return _SHARED.get(name, name)


def is_path(name: str) -> bool:
    """Whether an id is a path of a directory, not a model on the hub."""
    return _LOCAL.match(name) is not None


def _default_loader(name: str, revision: str | None) -> Any:
    found = _from_makers(name) if name.startswith(_MAKERS) else None
    return _from_transformers(name, revision) if found is None else found


def _from_makers(name: str) -> Any:
    try:
        makers = import_module("tml_tokenizers.tinker_tokenizers")
    except ImportError as error:
        raise InvalidInputError(
            f"the tokenizer of {name} is in the package tml_tokenizers, which is not installed; "
            "tml-renderers works without a tokenizer",
            field="tokenizer",
        ) from error
    return makers.get_tinker_tokenizer(name)


def _from_transformers(name: str, revision: str | None) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidInputError(
            "loading a tokenizer needs transformers: pip install 'tinkex[hf]'", field="tokenizer"
        ) from error
    # Only a pinned revision may run code. False also stops transformers from asking at the terminal.
    options: dict[str, Any] = {"trust_remote_code": revision is not None}
    if revision is not None:
        options["revision"] = revision
    return AutoTokenizer.from_pretrained(name, **options)


_cache: dict[str, Any] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
_loader: Loader = _default_loader


def set_tokenizer_loader(loader: Loader | None) -> None:
    """Load tokenizers with `loader(name, revision)` from now on; None restores the default."""
    global _loader  # noqa: PLW0603
    with _guard:
        _loader = loader or _default_loader
        _cache.clear()


def load_tokenizer(name: str) -> Any:
    """The tokenizer `name` (a hub id or a local path). It is loaded once and shared by all threads."""
    loaded = _cache.get(name)
    if loaded is not None:
        return loaded
    with _guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        loaded = _cache.get(name)
        if loaded is None:
            loaded = _cache[name] = _loader(name, _PINNED.get(name))
        return loaded


def encode(text: str, tokenizer: Any) -> list[int]:
    """Token ids of `text`, without a chat template."""
    if not isinstance(text, str):
        raise InvalidInputError(f"expected str, got {type(text).__name__}", field="text")
    ids: list[int] = list(tokenizer.encode(text))
    return ids


def decode(token_ids: list[int], tokenizer: Any) -> str:
    if isinstance(token_ids, str) or not hasattr(token_ids, "__iter__"):
        raise InvalidInputError(
            f"expected token ids, got {type(token_ids).__name__}", field="token_ids"
        )
    ids = list(token_ids)
    for index, token in enumerate(ids):
        # integers of numpy and torch are accepted too
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InvalidInputError(
                f"expected a whole number, got {type(token).__name__}", field=f"token_ids.{index}"
            )
    return str(tokenizer.decode(ids))
