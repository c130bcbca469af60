"""`tinkex version`."""

from __future__ import annotations

import click

from .connection import formatted
from .output import Output

__all__ = ["command"]


@click.command("version")
@formatted
def command(output: Output) -> None:
    """The version of tinkex, and of the API it follows."""
    from tinkex._version import PARITY_VERSION, __version__

    if output.json:
        output.payload({"version": __version__, "api_version": PARITY_VERSION})
    else:
        click.echo(f"tinkex {__version__} (API of tinker {PARITY_VERSION})")
