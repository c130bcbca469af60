"""`make quick`: the tests that need neither torch, nor an official client, nor a database server, nor seconds each.

Files and directories that need one of them are listed here; a single test is marked `heavy`. Properties are checked with
fewer examples than in a complete run. In a quick run torch and its
friends cannot be imported, so that a test which needs them and is not listed fails and says so. Temporary files are
in memory where the system has room for them there: services sync every acknowledged fact, and tests would wait for the disk.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

import hypothesis
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
        "ray",
        "recovery/test_real_run.py",
        "server/test_grammar_trials.py",
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
#: Fixtures with a service that computes with torch, with a tokenizer of transformers, or with a database server.
_HEAVY_FIXTURES: Final = frozenset({"here", "postgres_url", "tinkex_tiny", "tokenizer"})
#: How the ids of parametrized cases begin that need one.
_HEAVY_CASES: Final = ("[postgres", "[torch", "[tinkex.regularizers")
_SHM: Final = Path("/dev/shm")
#: Bytes that a run may need.
_ROOM: Final = 4 << 30
#: Of a property whose test does not set a number of its own.
_EXAMPLES: Final = 20
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
        hypothesis.settings.register_profile(
            "quick", parent=hypothesis.settings.get_profile("patient"), max_examples=_EXAMPLES
        )
        hypothesis.settings.load_profile("quick")
        self._in_memory = _directory_in_memory()

    def pytest_unconfigure(self) -> None:
        if self._in_memory is not None:
            shutil.rmtree(self._in_memory, ignore_errors=True)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in HEAVY else None

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        heavy = [item for item in items if _is_heavy(item)]
        left_out = set(heavy)
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if item not in left_out]

    def pytest_collection_finish(self) -> None:
        # Tests that collect garbage need not look through thousands of test items.
        gc.collect()
        gc.freeze()


def _directory_in_memory() -> str | None:
    """A new directory in memory for all temporary files; None in a process that inherits one, or has no room for it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not os.access(_SHM, os.W_OK):
        return None
    if shutil.disk_usage(_SHM).free < _ROOM:
        return None
    made = tempfile.mkdtemp(prefix="quick-", dir=_SHM)
    os.environ["TMPDIR"] = tempfile.tempdir = made
    return made


def _is_heavy(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return (
        item.get_closest_marker("heavy") is not None
        or not _HEAVY_FIXTURES.isdisjoint(fixtures)
        or any(case in item.name for case in _HEAVY_CASES)
    )
