"""The `tinkex` command: its subcommands, and how errors are printed."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from tinkex.errors import TinkerError

__all__ = ["cli", "main", "run"]

#: Commands by name: their module and their summary. The summary is here so that `--help` loads no module.
_COMMANDS: Final = {
    "alias": ("tinkex.cli.alias", "Names of checkpoints for programs that ask for a model."),
    "auth": ("tinkex.cli.auth", "The API key for a service: store, delete, show it."),
    "backup": ("tinkex.cli.backup", "Copy the data of a local service, even while it runs."),
    "billing": ("tinkex.cli.billing", "Hourly usage and storage, also as CSV."),
    "chat": ("tinkex.cli.chat", "Talk with a base model or a checkpoint."),
    "checkpoint": (
        "tinkex.cli.checkpoint",
        "List, save, publish, download, export and delete checkpoints.",
    ),
    "completion": ("tinkex.cli.completion", "Shell completion for bash, zsh and fish."),
    "demo": ("tinkex.cli.demo", "Fine-tune a small model on the local service."),
    "doctor": ("tinkex.cli.doctor", "Check settings, key, service, packages and disk."),
    "model": ("tinkex.cli.model", "Base models of a service."),
    "run": ("tinkex.cli.run", "Training runs; with --prompt, sampling."),
    "sample": ("tinkex.cli.sample", "Sample from a base model or a checkpoint."),
    "serve": ("tinkex.cli.serve", "Run the local service."),
    "session": ("tinkex.cli.session", "Sessions of clients."),
    "status": ("tinkex.cli.status", "The service, its models and recent runs."),
    "train": ("tinkex.cli.train", "Fine-tune a model on a file of conversations."),
    "usage": ("tinkex.cli.usage", "Tokens used, and their cost."),
    "version": ("tinkex.cli.version", "The version of tinkex."),
}

_FAILED: Final = 1
_INTERRUPTED: Final = 130  # the exit code that shells expect after Ctrl-C


class _Lazy(click.Group):
    """Loads a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _loaded(cmd_name) if cmd_name in _COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in sorted(_COMMANDS)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        fitting = (name for name in sorted(_COMMANDS) if name.startswith(incomplete))
        items = [CompletionItem(name, help=_COMMANDS[name][1]) for name in fitting]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


@functools.cache
def _loaded(name: str) -> click.Command:
    command: click.Command = importlib.import_module(_COMMANDS[name][0]).command
    _accept_debug(command)
    return command


def _accept_debug(command: click.Command) -> None:
    """Accept `--debug` after the subcommand too: users append it to the command that just failed."""
    if isinstance(command, click.Group):
        for one in command.commands.values():
            _accept_debug(one)
        return
    option = click.Option(
        ["--debug"], is_flag=True, hidden=True, expose_value=False, callback=_remember
    )
    if all(parameter.name != option.name for parameter in command.params):
        command.params.append(option)


def _remember(ctx: click.Context, _: click.Parameter, debug: bool) -> None:
    """Store what the error message needs: the command, and whether to show a traceback."""
    settings = ctx.ensure_object(dict)
    settings["command"] = ctx.command
    if debug:
        settings["debug"] = True


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.invoke(_loaded("version"), form=None, as_json=False)
        ctx.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--format", "-f", "form", type=click.Choice(["table", "json"]), help="Form of the output."
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context, form: str | None, debug: bool) -> None:
    """Fine-tune language models: a client and a local service for the Tinker API."""
    ctx.ensure_object(dict).update(format=form, debug=debug)


def main() -> None:
    """The entry point."""
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, as documented in docs/reference/cli.md.

    An error that the user can fix is one or two lines; only a bug of tinkex is a traceback.
    """
    settings: dict[str, Any] = {}
    try:
        # Not in standalone mode: there click exits with 1 after Ctrl-C.
        code = cli.main(arguments, prog_name="tinkex", obj=settings, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return _INTERRUPTED
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else _FAILED
    except (TinkerError, OSError, ModuleNotFoundError) as error:
        from .wording import worded

        if settings.get("debug") or not (told := worded(error, settings.get("command"))):
            raise
        click.echo(f"Error: {told}", err=True)
        return _FAILED
    return code if isinstance(code, int) else 0
