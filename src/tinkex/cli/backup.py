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
    """Copy the data of a local service to TARGET, also while it runs.

    Start a service with --data-dir TARGET to restore it. Facts in PostgreSQL are not copied: take a dump of the
    database first.
    """
    from tinkex.server.backup import back_up
    from tinkex.server.service import default_data_dir

    source = data_dir or default_data_dir()
    back_up(source, target)
    click.echo(f"{source} is copied to {target}.")
