"""`tinkex version`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex._version import PARITY_VERSION, __version__

from .connection import formatted
from .output import Output

if TYPE_CHECKING:
    from .payloads import Version

__all__ = ["command"]


@click.command("version")
@formatted
def command(output: Output) -> None:
    """Show the version of tinkex, and of the API it implements."""
    payload: Version = {
        "version": __version__,
        "commit": _commit(),
        "api_version": PARITY_VERSION,
    }
    if output.json:
        output.payload(payload)
        return
    of = f"{payload['commit'][:12]}, " if payload["commit"] else ""
    click.echo(f"tinkex {__version__} ({of}API of tinker {PARITY_VERSION})")


def _commit() -> str | None:
    """The commit that pip recorded at the installation, if any; importlib.metadata would be a slow import."""
    installed = Path(__file__).parents[2] / f"tinkex-{__version__}.dist-info" / "direct_url.json"
    try:
        commit: str = json.loads(installed.read_text())["vcs_info"]["commit_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit
