"""`tinkex run`: training runs; and, with a prompt, sampling, as the Elixir command has it."""

from __future__ import annotations

from typing import Any

import click

from .connection import Connection, connected, formatted
from .human import ago
from .output import Output
from .paging import fetch_all
from .sample import sample, sampling_options

__all__ = ["command"]

_SCOPE = click.option(
    "--access-scope", type=click.Choice(["owned", "accessible"]), default="owned", show_default=True
)


@click.group("run", invoke_without_command=True)
@sampling_options
@connected
@formatted
def command(connection: Connection, output: Output, **options: Any) -> None:
    """Training runs; `tinkex run --prompt …` samples."""
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        if options["prompt"] is None and options["prompt_file"] is None:
            click.echo(ctx.get_help())
            return
        sample(connection, output, **options)


@command.command("list")
@click.option("--limit", default=20, show_default=True, help="How many; 0 means all.")
@click.option("--offset", default=0, show_default=True)
@click.option("--columns", "-c", help="Columns to show, separated by commas.")
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
    """Training runs, the last used first."""
    with connection.rest() as rest:

        def page(size: int, start: int) -> tuple[list[Any], int | None]:
            answer = rest.list_training_runs(size, start, access_scope=access_scope).result()
            return answer.training_runs, answer.cursor.total_count

        runs, total = fetch_all(page, "runs", limit=limit, offset=offset, page_size=100)
    facts = [_facts(run) for run in runs]
    shown = list(facts[0]) if facts else []
    if columns:
        wanted = [name.strip().lower() for name in columns.split(",")]
        unknown = [name for name in wanted if name not in {column.lower() for column in shown}]
        if facts and unknown:
            raise click.UsageError(f"no column {unknown[0]!r}; there are {', '.join(shown)}")
        shown = [column for name in wanted for column in shown if column.lower() == name]
    output.table(
        shown,
        [[fact[column] for column in shown] for fact in facts],
        {"runs": runs, "total": total, "shown": len(runs)},
    )


@command.command("info")
@click.argument("run_id")
@_SCOPE
@connected
@formatted
def info(run_id: str, access_scope: Any, connection: Connection, output: Output) -> None:
    """One training run; RUN_ID may also be the path of one of its checkpoints."""
    with connection.rest() as rest:
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
    output.record(facts, run.model_dump(mode="json"))


def _facts(run: Any) -> dict[str, Any]:
    lora = "No" if not run.is_lora else f"Yes (rank {run.lora_rank})" if run.lora_rank else "Yes"
    return {
        "Run ID": run.training_run_id,
        "Base Model": run.base_model,
        "Owner": run.model_owner,
        "LoRA": lora,
        "Status": "Failed" if run.corrupted else "Active",
        "Last Update": ago(run.last_request_time),
    }
