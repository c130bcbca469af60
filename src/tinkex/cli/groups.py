"""A group with a command of its own."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["DefaultGroup"]


class DefaultGroup(click.Group):
    """A group that, given options and no command, is one of its commands.

    As the Elixir command line has it: `tinkex run --prompt …` samples, `tinkex checkpoint --output …` saves.
    """

    def __init__(self, *args: Any, default: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = [self._default, *args]
        return super().parse_args(ctx, args)
