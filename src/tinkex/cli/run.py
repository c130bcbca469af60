"""`tinkex run`: training runs; with --prompt, sampling, as in the Elixir command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .connection import Connection, connected, formatted
from .groups import DefaultGroup
from .human import ago
from .listing import named_run
from .output import Output, plain
from .paging import fetch_all, paged
from .sample import command as sample

if TYPE_CHECKING:
    from .payloads import RunList

__all__ = ["command"]

_COLUMNS = ("Run ID", "Base Model", "Owner", "LoRA", "Status", "Last Update")
#: Names of the columns for `--columns`, which also accepts their titles.
_SHORT = {
    "id": "Run ID",
    "model": "Base Model",
    "owner": "Owner",
    "lora": "LoRA",
    "status": "Status",
    "updated": "Last Update",
    "checkpoint": "Last Checkpoint",
    "checkpoint_time": "Checkpoint Time",
}
_SCOPE = click.option(
    "--access-scope",
    type=click.Choice(["owned", "accessible"]),
    default="owned",
    show_default=True,
    help="Your own runs, or all that you can read.",
)


@click.group("run", cls=DefaultGroup, default="sample")
def command() -> None:
    """Training runs; `tinkex run --prompt …` samples."""


command.add_command(sample)


@command.command("list")
@paged
@click.option("--columns", "-c", help=f"Columns to show, separated by commas: {', '.join(_SHORT)}.")
@_SCOPE
@connected
@formatted
def list_runs(
    limit: int,
    offset: int,
    columns: str | None,
    access_scope: Any,
    connection: Connection,
    output: Output,
) -> None:
    """List training runs, most recently used first."""
    shown = _COLUMNS if columns is None else _wanted(columns)
    with connection.rest() as rest:

        def page(size: int, start: int) -> tuple[list[Any], int | None]:
            answer = rest.list_training_runs(size, start, access_scope=access_scope).result()
            return answer.training_runs, answer.cursor.total_count

        runs, total = fetch_all(page, "runs", limit=limit, offset=offset, page_size=100)
    payload: RunList = {"runs": runs, "total": total, "shown": len(runs)}
    rows = [[facts[column] for column in shown] for facts in map(_listed, runs)]
    output.table(shown, rows, payload)


def _wanted(columns: str) -> tuple[str, ...]:
    """Columns by name, in the order they were given; case and spaces do not matter."""
    known = {_bare(name): column for short, column in _SHORT.items() for name in (short, column)}
    names = [_bare(name) for name in columns.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no column {unknown[0]!r}; columns are {', '.join(_SHORT)}")
    return tuple(known[name] for name in names)


def _bare(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


@command.command("info")
@click.argument("run_id")
@_SCOPE
@connected
@formatted
def info(run_id: str, access_scope: Any, connection: Connection, output: Output) -> None:
    """Show one training run; RUN_ID may also be the path of one of its checkpoints."""
    with connection.rest() as rest, named_run(run_id):
        if run_id.startswith("tinker://"):
            run = rest.get_training_run_by_tinker_path(run_id, access_scope).result()
        else:
            run = rest.get_training_run(run_id, access_scope).result()
    facts = _facts(run)
    for label, checkpoint in (
        ("Last checkpoint", run.last_checkpoint),
        ("Last sampler", run.last_sampler_checkpoint),
    ):
        facts[label] = "none" if checkpoint is None else checkpoint.tinker_path
    metadata = run.user_metadata or {}
    facts["Metadata"] = ", ".join(f"{name}={value}" for name, value in metadata.items()) or "none"
    output.record(facts, plain(run))


def _listed(run: Any) -> dict[str, Any]:
    last = run.last_checkpoint
    name, saved = ("none", "never") if last is None else (last.checkpoint_id, ago(last.time))
    return _facts(run) | {"Last Checkpoint": name, "Checkpoint Time": saved}


def _facts(run: Any) -> dict[str, Any]:
    lora = "No" if not run.is_lora else f"Yes (rank {run.lora_rank})" if run.lora_rank else "Yes"
    status = "Failed" if run.corrupted else "Active"
    owner, last = run.model_owner, ago(run.last_request_time)
    values = (run.training_run_id, run.base_model, owner, lora, status, last)
    return dict(zip(_COLUMNS, values, strict=True))
