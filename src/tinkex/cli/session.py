"""`tinkex session`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .connection import Connection, connected, formatted
from .groups import Group
from .output import Output, plain
from .paging import fetch_all, paged

if TYPE_CHECKING:
    from tinkex.config import Proxy

    from .payloads import SessionList, SessionTrace

__all__ = ["command"]


@click.group("session", cls=Group)
def command() -> None:
    """Sessions: each start of a client opens one."""


@command.command("list")
@paged
@connected
@formatted
def list_sessions(limit: int, offset: int, connection: Connection, output: Output) -> None:
    """List sessions, newest first."""
    with connection.rest() as rest:

        def page(size: int, start: int) -> tuple[list[Any], int | None]:
            return rest.list_sessions(size, start).result().sessions, None

        sessions, _ = fetch_all(page, "sessions", limit=limit, offset=offset, page_size=100)
    payload: SessionList = {"sessions": sessions, "shown": len(sessions)}
    output.table(["Session ID"], [[session] for session in sessions], payload)


@command.command("info")
@click.argument("session_id")
@connected
@formatted
def info(session_id: str, connection: Connection, output: Output) -> None:
    """Show the runs and samplers of one session."""
    with connection.rest() as rest:
        session = rest.get_session(session_id).result()
    facts = {
        "Session ID": session_id,
        "Name": session.display_name or "none",
        "Training runs": ", ".join(session.training_run_ids) or "none",
        "Samplers": ", ".join(session.sampler_ids) or "none",
    }
    output.record(facts, {"session_id": session_id, **plain(session)})


@command.command("export-trace")
@click.argument("session_id")
@click.option(
    "--output",
    "-o",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: SESSION_ID.pftrace]",
)
@click.option("--url-only", is_flag=True, help="Print the URL of the trace and do not download it.")
@connected
@formatted
def export_trace(
    session_id: str, file: Path | None, url_only: bool, connection: Connection, output: Output
) -> None:
    """Download the timeline of a session, for a trace viewer such as ui.perfetto.dev."""
    with connection.rest() as rest:
        url = rest.export_session_trace(session_id).result()
        target = None if url_only else file or Path(f"{session_id}.pftrace")
        if target is not None:
            _fetch(url, target, rest.holder.config.proxy)
    payload: SessionTrace = {
        "session_id": session_id,
        "url": url,
        "destination": None if target is None else str(target),
    }
    if target is not None:
        output.done(f"Written to {target}.", payload)
    elif output.json:
        output.payload(payload)
    else:
        click.echo(url)


def _fetch(url: str, target: Path, proxy: Proxy | None) -> None:
    """Download to `target`, completely or not at all."""
    from tinkex._client.downloads import fetch

    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        fetch(url, scratch, proxy=proxy)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
