"""Cancelling a sample in an environment with vLLM or its stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import tinkex

SCRIPT = Path(__file__).parent / "data" / "vllm_cancelling" / "cancelling.py"


def cancelled_in(python: Path, model: Path) -> str:
    """What the script prints."""
    source = Path(tinkex.__file__).parents[1]
    asked = [str(python), str(SCRIPT), str(source), str(model)]
    # Its exit code says nothing: the engine ends with an error as soon as vLLM's processes end, also at the end.
    done = subprocess.run(asked, check=False, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]
