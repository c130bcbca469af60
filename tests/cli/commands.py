"""Running commands: in this process, which is quick, or in one of their own, which is what users do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from tinkex.cli.main import cli
from tinkex.errors import TinkerError

KEY = "tml-local"
PROGRAM = [sys.executable, "-m", "tinkex"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run(*arguments: Any, input: str | None = None) -> Outcome:
    """A command with its errors told as `main` tells them; any other error is the test's."""
    environment = {"TINKER_API_KEY": KEY}
    result = CliRunner(env=environment).invoke(cli, [str(a) for a in arguments], input=input)
    error = result.exception
    if isinstance(error, TinkerError | OSError):
        return Outcome(1, result.stdout, f"{result.stderr}Error: {error}\n")
    if error is not None and not isinstance(error, SystemExit):
        raise error
    return Outcome(result.exit_code, result.stdout, result.stderr)


def environment(**settings: str) -> dict[str, str]:
    """That of a process which is alone with loopback."""
    return {**os.environ, "TINKER_API_KEY": KEY, "no_proxy": "*", **settings}


def process(*arguments: Any, **settings: str) -> Outcome:
    done = subprocess.run(
        [*PROGRAM, *(str(a) for a in arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**settings),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
