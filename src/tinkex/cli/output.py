"""Output of commands: tables for people or JSON for programs on stdout, notes on stderr.

`payloads` defines the JSON of each command.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["Output", "say"]


def say(text: str) -> None:
    """Print a note on stderr, so that it is not piped."""
    click.echo(text, err=True)


class Output:
    """Prints one result in the chosen form."""

    def __init__(self, form: str) -> None:
        self.json = form == "json"

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], payload: Mapping[str, Any]
    ) -> None:
        """Print rows for people, or the complete `payload` for programs.

        Cells are never truncated or wrapped: users copy them into the next command.
        """
        if self.json:
            self.payload(payload)
            return
        if not rows:
            say("Nothing to show.")
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        from tinkex.config import read_env

        cells = [[str(cell) for cell in row] for row in rows]
        head, lines = laid_out(columns, cells, width)
        for line in head:
            click.echo(line if read_env("NO_COLOR") else click.style(line, bold=True))
        for line in lines:
            click.echo(line)

    def record(self, facts: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
        """Print one object, one fact per line; further lines of a fact are indented to its column."""
        if self.json:
            self.payload(payload)
            return
        width = max(map(len, facts), default=0) + 3
        for name, value in facts.items():
            told = str(value).replace("\n", "\n" + " " * width)
            click.echo(f"{name + ':':{width}}{told}")

    def done(self, told: str, payload: Mapping[str, Any]) -> None:
        """Confirm an action: a note on stderr, and for programs the payload."""
        if self.json:
            self.payload(payload)
        say(told)

    def payload(self, payload: Any) -> None:
        text = json.dumps(plain(payload), indent=2, ensure_ascii=False)
        click.echo(
            text.encode(errors="backslashreplace").decode()
        )  # names of files may not be UTF-8


def laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None
) -> tuple[list[str], list[str]]:
    """The title line and the lines of a table.

    A table wider than `width` has no title line: the first cell of a row has its own line, and the other cells follow
    below, indented, each after its title.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    head, *lines = (_line(cells, widths) for cells in (columns, *rows))
    if width is None or max(map(len, (head, *lines))) <= width:
        return [head], lines
    return [], [line for row in rows for line in (row[0], *_below(columns, row, width))]


def _below(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """All cells but the first, as many per line as fit; a cell is never split."""
    lines: list[str] = []
    for column, cell in list(zip(columns, row, strict=True))[1:]:
        if not cell:
            continue
        titled = f"{column}: {cell}"
        if lines and len(lines[-1]) + len(titled) + 2 <= width:
            lines[-1] += f", {titled}"
        else:
            lines.append(f"    {titled}")
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def plain(value: Any) -> Any:
    """A value as plain JSON types; messages of the protocol keep their field names."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value
