"""`tinkex completion`."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what makes a shell complete the commands and options of tinkex.

    \b
    bash:  eval "$(tinkex completion bash)"         in ~/.bashrc
    zsh:   eval "$(tinkex completion zsh)"          in ~/.zshrc
    fish:  tinkex completion fish | source          in ~/.config/fish/config.fish

    Only the module of the command being typed is loaded, so it is quick.
    """  # noqa: D301 - to click the character means that lines stay lines
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root()
    kind = get_completion_class(shell)
    assert kind is not None
    variables = {**kind(root.command, {}, "tinkex", "_TINKEX_COMPLETE").source_vars()}
    click.echo(kind.source_template % variables)
