"""`tinkex alias`."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

import click

from .connection import Connection, connected, formatted
from .output import Output, say

__all__ = ["command"]

_PATH: Final = "/local/aliases"


@click.command("alias")
@click.argument("name", required=False)
@click.argument("path", required=False)
@click.option("--delete", is_flag=True, help="Delete the alias NAME.")
@connected
@formatted
def command(
    name: str | None, path: str | None, delete: bool, connection: Connection, output: Output
) -> None:
    """Make NAME an alias of the checkpoint PATH (tinker://…), for programs that ask for a model by name.

    An existing alias is changed to the new checkpoint. Without arguments, lists the aliases.
    """
    if delete and (name is None or path is not None):
        raise click.UsageError("with --delete, give only the NAME of an alias")
    if not delete and (name is None) != (path is None):
        raise click.UsageError("give NAME and PATH, or neither to list the aliases")
    from tinkex.types._aliases import AliasList

    with connection.service(patient=False) as service:
        if delete and name is not None:
            service.http.delete(f"{_PATH}/{quote(name)}").result()
            say(f"The alias {name} is deleted.")
        elif name is not None:
            service.http.put(_PATH, {"name": name, "path": path}).result()
            say(f"{name} is an alias of {path}.")
        found = AliasList.model_validate(service.http.get(_PATH).result())
    rows = [[alias.name, alias.path, alias.created_at] for alias in found.aliases]
    output.table(["Alias", "Checkpoint", "Made at"], rows, found.model_dump())
