"""`tinkex session`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .connection import Connection, connected, formatted
from .output import Output, say
from .paging import fetch_all

__all__ = ["command"]


@click.group("session")
def command() -> None:
    """Sessions: what belongs to one start of a client."""


@command.command("list")
@click.option("--limit", default=20, show_default=True, help="How many; 0 means all.")
@click.option("--offset", default=0, show_default=True)
@connected
@formatted
def list_sessions(limit: int, offset: int, connection: Connection, output: Output) -> None:
    """Sessions, newest first."""
    with connection.rest() as rest:

        def page(size: int, start: int) -> tuple[list[Any], int | None]:
            return rest.list_sessions(size, start).result().sessions, None

        sessions, _ = fetch_all(page, "sessions", limit=limit, offset=offset, page_size=100)
    payload = {"sessions": sessions, "shown": len(sessions)}
    output.table(["Session ID"], [[session] for session in sessions], payload)


@command.command("info")
@click.argument("session_id")
@connected
@formatted
def info(session_id: str, connection: Connection, output: Output) -> None:
    """The runs and samplers of one session."""
    with connection.rest() as rest:
        session = rest.get_session(session_id).result()
    facts = {
        "Session ID": session_id,
        "Name": session.display_name or "none",
        "Training runs": ", ".join(session.training_run_ids) or "none",
        "Samplers": ", ".join(session.sampler_ids) or "none",
    }
    output.record(facts, {"session_id": session_id, **session.model_dump(mode="json")})


@command.command("export-trace")
@click.argument("session_id")
@click.option("--output", "-o", "file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url-only", is_flag=True, help="Print where the trace is and do not fetch it.")
@connected
def export_trace(
    session_id: str, file: Path | None, url_only: bool, connection: Connection
) -> None:
    """The time line of a session, for a trace viewer such as ui.perfetto.dev."""
    with connection.rest() as rest:
        url = rest.export_session_trace(session_id).result()
        if url_only:
            click.echo(url)
            return
        from tinkex._client.downloads import fetch

        target = file or Path(f"{session_id}.pftrace")
        fetch(url, target)
    say(f"Written to {target}.")
