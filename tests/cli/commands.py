"""Runs commands: in this process, which is quick, or in a separate process, as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from click.testing import CliRunner

from tinkex.cli.main import cli
from tinkex.cli.wording import worded
from tinkex.errors import TinkerError

KEY = "tml-local"
SCHEMAS = Path(__file__).parents[2] / "docs/reference/cli-output.json"
PROGRAM = [sys.executable, "-m", "tinkex"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run(*arguments: Any, input: str | None = None) -> Outcome:
    """Run a command and report its errors as `main` does; any other exception fails the test."""
    environment = {"TINKER_API_KEY": KEY}
    told_of: dict[str, Any] = {}
    result = CliRunner(env=environment).invoke(
        cli, [str(a) for a in arguments], input=input, obj=told_of
    )
    error = result.exception
    if isinstance(error, TinkerError | OSError):
        told = worded(error, told_of.get("command"))
        return Outcome(1, result.stdout, f"{result.stderr}Error: {told}\n")
    if error is not None and not isinstance(error, SystemExit):
        raise error
    return Outcome(result.exit_code, result.stdout, result.stderr)


def environment(**settings: str) -> dict[str, str]:
    """The environment of a process that uses only loopback."""
    return {**os.environ, "TINKER_API_KEY": KEY, "no_proxy": "*", **settings}


def process(*arguments: Any, input: str | None = None, **settings: str) -> Outcome:
    done = subprocess.run(
        [*PROGRAM, *(str(a) for a in arguments)],
        input="" if input is None else input,
        capture_output=True,
        text=True,
        check=False,
        env=environment(**settings),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def payload(command: str, outcome: Outcome, code: int = 0) -> Any:
    """The JSON that a command printed; checks that stdout has nothing else and that it matches the documented schema."""
    assert outcome.code == code, outcome.err
    printed = json.loads(outcome.out)
    check(command, printed)
    return printed


def check(command: str, printed: Any) -> None:
    schema = closed(json.loads(SCHEMAS.read_text())) | {"$ref": f"#/$defs/{command}"}
    jsonschema.validate(printed, schema, format_checker=jsonschema.FormatChecker())


def closed(schema: Any) -> Any:
    """The same schema, but a field that it does not name is refused."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(part) for name, part in schema.items()}
    return inner | {"additionalProperties": False} if "properties" in schema else inner
