"""What commands print: tables for people, JSON for programs on stdout; everything else on stderr.

What the JSON of a command looks like is written down in `payloads`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["Output", "say"]


def say(text: str) -> None:
    """A word to the person at the terminal, out of the way of what is piped."""
    click.echo(text, err=True)


class Output:
    """Prints one result in the form that was asked for."""

    def __init__(self, form: str) -> None:
        self.json = form == "json"

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], payload: Mapping[str, Any]
    ) -> None:
        """Rows for people; `payload` is the same for programs, complete.

        Cells are never cut or wrapped: what is in them is copied into the next command.
        """
        if self.json:
            self.payload(payload)
            return
        if not rows:
            say("Nothing to show.")
            return
        lines = [[str(cell) for cell in row] for row in rows]
        widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
        click.secho(_line(columns, widths), bold=True)
        for line in lines:
            click.echo(_line(line, widths))

    def record(self, facts: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
        """One thing, a fact a line; a fact of more lines stays in its column."""
        if self.json:
            self.payload(payload)
            return
        width = max(map(len, facts), default=0) + 3
        for name, value in facts.items():
            told = str(value).replace("\n", "\n" + " " * width)
            click.echo(f"{name + ':':{width}}{told}")

    def done(self, told: str, payload: Mapping[str, Any]) -> None:
        """Something was done: a word for people, which is nothing to pipe."""
        if self.json:
            self.payload(payload)
        say(told)

    def payload(self, payload: Any) -> None:
        click.echo(json.dumps(plain(payload), indent=2, ensure_ascii=False))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def plain(value: Any) -> Any:
    """A value as JSON has it; models of the protocol keep their field names."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value
