"""Generate the reference pages from the code.

python scripts/docs.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinkex._wire.operations import OPERATIONS, Operation, Theme
from tinkex.cli.main import cli
from tinkex.cli.payloads import json_schema
from tinkex.config import settings

ROOT = Path(__file__).resolve().parent.parent


def configuration() -> str:
    rows = [
        f"| {f'`{row.name}`' if row.name else '–'} | {f'`{row.env}`' if row.env else '–'} "
        f"| {_shown(row.default)} | {row.doc} |"
        for row in settings()
    ]
    return "\n".join(
        [
            "# Configuration",
            "",
            "A setting is taken from the arguments of the client (or of `tinkex.Config`), else from",
            "`tinkex.set_defaults(…)`, else from the environment, else from the built-in value. Times are seconds.",
            "The environment is read when a `Config` is made and never later; `tinkex.config.snapshot()` shows what it",
            "says, without secrets.",
            "",
            "| setting | environment | built in | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _shown(value: object) -> str:
    return "–" if value is None or value in ((), {}) else f"`{value}`"


def operations() -> str:
    lines = ["# Operations of the protocol", ""]
    for theme in Theme:
        rows = [row for row in OPERATIONS.values() if row.theme is theme]
        lines += [f"## {theme.title}", "", theme.about, ""]
        lines += ["| operation | what it does | method | path | answered | pool | only with flag |"]
        lines += ["|---|---|---|---|---|---|---|", *map(_operation, rows), ""]
    return "\n".join(lines)


def _operation(row: Operation[Any]) -> str:
    answered = "queued" if row.queued else "at once"
    flag = f"`{row.flag}`" if row.flag else ""
    return (
        f"| `{row.name}` | {row.summary} | {row.method} | `{row.path}` | {answered} "
        f"| {row.pool.value} | {flag} |"
    )


def commands() -> str:
    return "\n".join(
        [
            "# The command line",
            "",
            "Every command takes its service from `--base-url` (a URL, or `local` for a private service on this",
            "machine), else from the environment (`TINKER_BASE_URL`, `TINKER_API_KEY`; see",
            "[configuration](../configuration.md)), else from a stored login. Tables and JSON go to stdout; messages,",
            "progress and questions go to stderr. What `--format json` prints is described for programs in",
            "[cli-output.json](cli-output.json): the JSON Schema of a command is at `#/$defs/` and its name.",
            "",
            "| exit code | meaning |",
            "|---|---|",
            "| 0 | done; also help, a dry run, and a question answered with no |",
            "| 1 | it failed, or a part of it did; stderr says why, `--debug` shows where |",
            "| 2 | an option or argument that the command does not have, or of the wrong kind; nothing was done |",
            "| 130 | Ctrl-C ended it; a running `tinkex serve` then ends with 0 |",
            "",
            "`tinkex completion bash`, `zsh` or `fish` prints the completion script of a shell.",
            "",
            *_help(cli, cli.make_context("tinkex", [], resilient_parsing=True, terminal_width=100)),
        ]
    )


def _help(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """The `--help` output of a command and its subcommands."""
    yield from [f"## {ctx.command_path}", "", "```", command.get_help(ctx), "```", ""]
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            if not below.hidden:
                yield from _help(below, click.Context(below, ctx, name))


def outputs() -> str:
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


PAGES = {
    "docs/configuration.md": configuration,
    "docs/reference/operations.md": operations,
    "docs/reference/cli.md": commands,
    "docs/reference/cli-output.json": outputs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"{name} is out of date: run make docs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
