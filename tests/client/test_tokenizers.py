"""Which tokenizer belongs to a model, and how it is loaded and cached."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tinkex._client.tokenizers import (
    decode,
    encode,
    load_tokenizer,
    set_tokenizer_loader,
    tokenizer_id,
)
from tinkex.errors import InvalidInputError

KIMI = "moonshotai/Kimi-K2-Thinking"
KIMI_REVISION = "612681931a8c906ddb349f8ad0f582cb552189cd"
LLAMA = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


class Loader:
    """Loads a dictionary with the requested name and revision; the test decides when a load finishes."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str | None]] = []
        self.may_finish = threading.Event()
        self.may_finish.set()

    def __call__(self, name: str, revision: str | None) -> Any:
        self.loaded.append((name, revision))
        assert self.may_finish.wait(10)
        return {"name": name, "revision": revision}


@pytest.fixture
def loader() -> Iterator[Loader]:
    fake = Loader()
    set_tokenizer_loader(fake)
    yield fake
    set_tokenizer_loader(None)


# -- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "stated", "found"),
    [
        ("org/model", None, "org/model"),
        ("model", None, "model"),
        ("org/model/variant", None, "org/model"),
        ("org/model:peft:1000", None, "org/model"),
        ("org/model/variant:2", None, "org/model"),
        ("meta-llama/Llama-3.1-8B", None, LLAMA),
        ("meta-llama/Llama-3.2-1B-Instruct:x", None, LLAMA),
        ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
        (KIMI, None, KIMI),
        ("moonshotai/Kimi-K2.5-Text-Only", None, "moonshotai/Kimi-K2.5"),
        ("moonshotai/Kimi-K2.5/long:2", None, "moonshotai/Kimi-K2.5"),
        ("org/model", "moonshotai/Kimi-K2.5-Text-Only", "moonshotai/Kimi-K2.5"),
        ("meta-llama/Llama-3.1-8B", "its/own", "its/own"),
        ("org/model", "its/own:revision", "its/own"),
        ("org/model", "its/own/deep/one", "its/own/deep/one"),
        ("org/model", "", "org/model"),
    ],
)
def test_tokenizer_id_is_stated_or_derived_from_the_model_name(model, stated, found):
    assert tokenizer_id(model, stated) == found


@pytest.mark.parametrize(
    "path", ["/models/foo", "/a/b", "./a/b", "../a/b", "~/models/foo", "/models/a:b", "C:\\m\\x"]
)
def test_local_path_is_not_changed(path):
    assert tokenizer_id(path) == path
    assert tokenizer_id("org/model", path) == path


# -- loading -------------------------------------------------------------------------------------


def test_tokenizer_is_loaded_once(loader):
    first = load_tokenizer("org/model")
    assert load_tokenizer("org/model") is first
    assert loader.loaded == [("org/model", None)]


def test_concurrent_threads_share_one_load(loader):
    loader.may_finish.clear()
    with ThreadPoolExecutor(8) as pool:
        loading = [pool.submit(load_tokenizer, "org/model") for _ in range(8)]
        loader.may_finish.set()
        loaded = [each.result(10) for each in loading]
    assert all(each is loaded[0] for each in loaded)
    assert len(loader.loaded) == 1


def test_slow_load_does_not_block_another_tokenizer(loader):
    slow_began, slow_may_end = threading.Event(), threading.Event()

    def load(name: str, _: str | None) -> str:
        if name == "slow":
            slow_began.set()
            assert slow_may_end.wait(10)
        return name

    set_tokenizer_loader(load)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(load_tokenizer, "slow")
        assert slow_began.wait(10)
        assert load_tokenizer("fast") == "fast"
        slow_may_end.set()
        assert slow.result(10) == "slow"


def test_failed_load_is_not_cached(loader):
    def fail(name: str, revision: str | None) -> Any:
        raise OSError("no network")

    set_tokenizer_loader(fail)
    with pytest.raises(OSError, match="no network"):
        load_tokenizer("org/model")
    set_tokenizer_loader(loader)
    assert load_tokenizer("org/model")["name"] == "org/model"


def test_setting_a_loader_clears_the_cache(loader):
    load_tokenizer("org/model")
    set_tokenizer_loader(lambda name, _: name.upper())
    assert load_tokenizer("org/model") == "ORG/MODEL"


def test_tokenizer_that_runs_code_has_a_pinned_revision(loader):
    assert load_tokenizer(KIMI)["revision"] == KIMI_REVISION
    for newer in ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6", "moonshotai/Kimi-K3"):
        assert len(load_tokenizer(newer)["revision"]) == len(KIMI_REVISION)
    assert load_tokenizer("moonshotai/Kimi-K2-Instruct")["revision"] is None


class AutoTokenizer:
    @staticmethod
    def from_pretrained(name: str, **options: Any) -> tuple[str, dict[str, Any]]:
        return name, options


@pytest.fixture
def transformers(monkeypatch):
    """A fake module transformers: the tests run without the library."""
    module = types.ModuleType("transformers")
    module.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    set_tokenizer_loader(None)
    yield
    set_tokenizer_loader(None)


@pytest.mark.usefixtures("transformers")
def test_remote_code_is_trusted_only_at_a_pinned_revision():
    assert load_tokenizer("org/model") == ("org/model", {"trust_remote_code": False})
    assert load_tokenizer(KIMI) == (
        KIMI,
        {"revision": KIMI_REVISION, "trust_remote_code": True},
    )


def test_error_without_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    set_tokenizer_loader(None)
    with pytest.raises(InvalidInputError, match=r"pip install 'tinkex\[hf\]'"):
        load_tokenizer("org/model")


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("name", ["TML/x", "thinkingmachines/x"])
def test_tokenizers_of_tml_models_come_from_tml_tokenizers(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "tml_tokenizers", None)
    with pytest.raises(InvalidInputError, match="tml_tokenizers"):
        load_tokenizer(name)
    known = {name: "theirs"}
    module = types.ModuleType("tml_tokenizers.tinker_tokenizers")
    module.get_tinker_tokenizer = known.get  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tml_tokenizers", types.ModuleType("tml_tokenizers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert load_tokenizer(name) == "theirs"
    assert load_tokenizer(f"{name}-unknown") == (f"{name}-unknown", {"trust_remote_code": False})


# -- encoding ------------------------------------------------------------------------------------


class Letters:
    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_encode_and_decode_use_the_tokenizer():
    assert encode("ab", Letters()) == [97, 98]
    assert encode("", Letters()) == []
    assert decode([97, 98], Letters()) == "ab"
    assert decode(iter([97]), Letters()) == "a"  # type: ignore[arg-type]
    assert decode(np.array([97]), Letters()) == "a"  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, 7, b"ab", ["a"]])
def test_encode_refuses_values_that_are_not_text(text):
    with pytest.raises(InvalidInputError, match="text"):
        encode(text, Letters())


@pytest.mark.parametrize("ids", [None, 7, "ab", ["a"], [1, 1.5], [True], [None]])
def test_decode_refuses_values_that_are_not_token_ids(ids):
    with pytest.raises(InvalidInputError, match="token_ids"):
        decode(ids, Letters())
