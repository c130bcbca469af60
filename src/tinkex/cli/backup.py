"""`tinkex backup`: a copy of a service's data, taken while the service runs."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command("backup")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Directory of the service's data (TINKEX_DATA_DIR).",
)
def command(target: Path, data_dir: Path | None) -> None:
    """Copy the data of a local service to TARGET, even while it runs.

    To restore, start a service with --data-dir TARGET. A PostgreSQL database is not copied: dump it first.
    """
    from tinkex.server.backup import back_up
    from tinkex.server.service import default_data_dir

    source = data_dir or default_data_dir()
    back_up(source, target)
    click.echo(f"Copied {source} to {target}.")
