"""A class name means one thing across the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import tinkex

PACKAGE = Path(tinkex.__file__).parent


def test_public_class_names_are_not_used_twice() -> None:
    homes = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(f"{file.relative_to(PACKAGE)}:{node.lineno}")

    doubled = {name: places for name, places in homes.items() if len(places) > 1}

    assert homes["TrainingClient"]
    assert doubled == {}, "name each class after what it is, so that no two share a name"
