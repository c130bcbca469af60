"""What commands print: tables for people, JSON for programs on stdout; everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from pydantic import BaseModel

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
        """Rows for people; `payload` is the same for programs, complete."""
        if self.json:
            self.payload(payload)
            return
        if not rows:
            say("Nothing to show.")
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        Console(soft_wrap=True).print(table)

    def record(self, facts: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
        """One thing, a fact a line."""
        if self.json:
            self.payload(payload)
            return
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            click.echo(f"{name + ':':{width + 1}}  {value}")

    def payload(self, payload: Any) -> None:
        click.echo(json.dumps(plain(payload), indent=2, ensure_ascii=False))


def plain(value: Any) -> Any:
    """A value as JSON has it; models of the protocol keep their field names."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value
