"""`make quick`: the tests that need neither torch, nor an official client, nor a database server.

Files and directories that need one of them are listed here; a single test is marked `heavy`. In a quick run torch and its
friends cannot be imported, so that a test which needs them and is not listed fails and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

__all__ = ["HEAVY", "Quick", "Refusing"]

_TESTS: Final = Path(__file__).parent
HEAVY: Final = frozenset(
    _TESTS / name
    for name in (
        "browser",
        "chaos",
        "cli/test_chat.py",
        "cli/test_checkpoint_files.py",
        "cli/test_demo.py",
        "cli/test_train.py",
        "client/test_training.py",
        "contract",
        "engine",
        "numerics",
        "regularizers",
        "recovery/test_real_run.py",
        "server/test_imports.py",
        "server/test_pool_training.py",
        "serving",
        "telemetry/test_example.py",
        "telemetry/test_joined_traces.py",
        "test_docs.py",
        "test_examples.py",
        "test_local.py",
        "test_objectives.py",
        "test_testing_plugin.py",
        "types/test_inputs.py",
        "types/test_tensors.py",
        "vllm",
        "wheel",
    )
)
#: Fixtures with a service that computes with torch, or with a tokenizer of transformers.
_HEAVY_FIXTURES: Final = frozenset({"here", "tinkex_tiny", "tokenizer"})
#: How the ids of parametrized cases begin that need one.
_HEAVY_CASES: Final = ("[postgres", "[torch", "[tinkex.regularizers")
_FORBIDDEN: Final = frozenset({"torch", "transformers", "peft"})


class Refusing(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _FORBIDDEN:
            raise ModuleNotFoundError(
                f"a quick test may not import {fullname}: mark the test `heavy`, or add its file to tests/quick.py",
                name=fullname,
            )
        return None


class Quick:
    """The plugin behind `pytest --quick`."""

    def __init__(self) -> None:
        sys.meta_path.insert(0, Refusing())

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in HEAVY else None

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        heavy = [item for item in items if _is_heavy(item)]
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if item not in set(heavy)]


def _is_heavy(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return (
        item.get_closest_marker("heavy") is not None
        or not _HEAVY_FIXTURES.isdisjoint(fixtures)
        or any(case in item.name for case in _HEAVY_CASES)
    )
