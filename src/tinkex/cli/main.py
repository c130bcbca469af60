"""The `tinkex` command: what it can do, and how its errors are told."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

import click

from tinkex._version import __version__
from tinkex.errors import TinkerError

__all__ = ["cli", "main"]

#: Commands by name: the module that has them, and a line for the list, so that `--help` loads none.
_COMMANDS: Final = {
    "chat": ("tinkex.cli.chat", "Talk with a base model or a checkpoint."),
    "checkpoint": ("tinkex.cli.checkpoint", "List, keep, share, fetch and delete checkpoints."),
    "demo": ("tinkex.cli.demo", "Fine-tune a small model on the local service, and see it work."),
    "doctor": ("tinkex.cli.doctor", "Check settings, key, service, packages and disk."),
    "model": ("tinkex.cli.model", "Base models of a service."),
    "run": ("tinkex.cli.run", "Training runs; with a prompt, sampling."),
    "sample": ("tinkex.cli.sample", "Sample from a base model or a checkpoint."),
    "serve": ("tinkex.cli.serve", "Run the local service."),
    "session": ("tinkex.cli.session", "Sessions of clients."),
    "status": ("tinkex.cli.status", "What is running where."),
    "train": ("tinkex.cli.train", "Fine-tune a model on a file of conversations."),
    "usage": ("tinkex.cli.usage", "What was used."),
    "version": ("tinkex.cli.version", "The version of tinkex."),
}


class _Lazy(click.Group):
    """Loads a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in sorted(_COMMANDS)])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinkex")
@click.option("--format", "-f", "form", type=click.Choice(["table", "json"]), help="How to print.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, form: str | None, debug: bool) -> None:
    """Fine-tune language models: a client and a local service for the Tinker API."""
    ctx.obj = {"format": form, "debug": debug}


def main(arguments: list[str] | None = None) -> Any:
    """The entry point: a user's mistake is one line on stderr and exit code 1."""
    try:
        cli(arguments, standalone_mode=True)
    except (TinkerError, OSError) as error:
        if "--debug" in (sys.argv if arguments is None else arguments):
            raise
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
