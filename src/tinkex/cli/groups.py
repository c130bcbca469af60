"""Groups of commands."""

from __future__ import annotations

from typing import Any, Final

import click

__all__ = ["DefaultGroup", "Group"]

#: Longer than any summary, so that none is truncated.
_NO_LIMIT: Final = 1000


class Group(click.Group):
    """A group whose help shows the full summary of each command, wrapped if needed."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, command.get_short_help_str(_NO_LIMIT))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class DefaultGroup(Group):
    """A group with a default command, which runs if only options are given.

    Compatible with the Elixir command line: `tinkex run --prompt …` samples, `tinkex checkpoint --output …` saves.
    """

    def __init__(self, *args: Any, default: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = [self._default, *args]
        return super().parse_args(ctx, args)
