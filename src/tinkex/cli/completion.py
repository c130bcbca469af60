"""`tinkex completion`."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that lets the shell complete commands and options of tinkex.

    \b
    bash:  eval "$(tinkex completion bash)"         in ~/.bashrc
    zsh:   eval "$(tinkex completion zsh)"          in ~/.zshrc
    fish:  tinkex completion fish | source          in ~/.config/fish/config.fish

    Completion is fast: it loads only the module of the command being typed.
    """  # noqa: D301 - \b tells click to keep these line breaks
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root()
    kind = get_completion_class(shell)
    assert kind is not None
    variables = {**kind(root.command, {}, "tinkex", "_TINKEX_COMPLETE").source_vars()}
    click.echo(kind.source_template % variables)
