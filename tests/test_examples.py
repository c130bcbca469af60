"""Every example runs as it stands against a real service, and asserts its own outcome."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parent.parent.joinpath("examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_does_what_it_says(example, tinkex_tiny):
    done = subprocess.run(
        [sys.executable, example, "--base-url", tinkex_tiny.url],
        env=os.environ | {"TINKER_API_KEY": "tml-local"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
