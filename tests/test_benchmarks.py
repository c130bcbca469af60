"""Every benchmark loads: a name that it uses has not been renamed or removed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def test_there_are_benchmarks():
    assert len(BENCHMARKS) > 20


@pytest.mark.heavy
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_every_name_it_imports_from_the_package(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinkex"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.heavy
def test_the_stand_in_for_a_service_starts():
    stand_in = next(path for path in BENCHMARKS if path.stem == "stand_in")
    shown = subprocess.run(
        [sys.executable, stand_in, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "immediately" in shown.stdout
