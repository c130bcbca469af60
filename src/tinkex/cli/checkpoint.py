"""`tinkex checkpoint`: what runs have saved."""

from __future__ import annotations

import fnmatch
import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from tinkex.errors import InvalidInputError, NotFoundError, TinkerError

from .checkpoint_files import export, import_adapter, push_hf
from .connection import Connection, connected, formatted
from .human import ago, moment, size
from .output import Output, say
from .paging import fetch_all

__all__ = ["command"]

_PARALLEL = 8


@click.group("checkpoint")
def command() -> None:
    """Checkpoints: list, keep, share, fetch and delete them."""


# -- looking ---------------------------------------------------------------------------------------


@command.command("list")
@click.option("--run-id", help="Only those of one run.")
@click.option("--limit", default=20, show_default=True, help="How many; 0 means all.")
@click.option("--offset", default=0, show_default=True)
@connected
@formatted
def list_checkpoints(
    run_id: str | None, limit: int, offset: int, connection: Connection, output: Output
) -> None:
    """Checkpoints, newest first, and what they take in bytes."""
    with connection.rest() as rest:
        if run_id is None:
            checkpoints, total = _all_of_user(rest, limit, offset)
        else:
            found = sorted(
                rest.list_checkpoints(run_id).result().checkpoints, key=_time, reverse=True
            )
            checkpoints, total = found[offset : offset + limit if limit else None], len(found)
    columns = ["Path", "Type", "Size", "Public", "Created", "Expires"]
    rows = [list(_facts(checkpoint).values()) for checkpoint in checkpoints]
    payload = {"checkpoints": checkpoints, "total": total, "shown": len(checkpoints)}
    output.table(columns, rows, payload if run_id is None else payload | {"run_id": run_id})
    if checkpoints:
        taken = sum(checkpoint.size_bytes or 0 for checkpoint in checkpoints)
        count = f"{len(checkpoints)} of {total}" if total is not None else str(len(checkpoints))
        say(f"{count} shown, {size(taken)}.")


@command.command("info")
@click.argument("checkpoint_path")
@connected
@formatted
def info(checkpoint_path: str, connection: Connection, output: Output) -> None:
    """One checkpoint, and what its weights are."""
    with connection.rest() as rest:
        checkpoint = _find(rest, checkpoint_path)
        weights = rest.get_weights_info_by_tinker_path(checkpoint_path).result()
    facts = _facts(checkpoint) | {
        "Base model": weights.base_model,
        "LoRA rank": weights.lora_rank if weights.is_lora else "no LoRA",
    }
    merged = checkpoint.model_dump(mode="json") | weights.model_dump(mode="json")
    output.record(facts, merged)


def _all_of_user(rest: Any, limit: int, offset: int) -> tuple[list[Any], int | None]:
    def page(count: int, start: int) -> tuple[list[Any], int | None]:
        answer = rest.list_user_checkpoints(count, start).result()
        return answer.checkpoints, None if answer.cursor is None else answer.cursor.total_count

    return fetch_all(page, "checkpoints", limit=limit, offset=offset, page_size=1000)


def _find(rest: Any, path: str) -> Any:
    from tinkex.types import ParsedCheckpointTinkerPath

    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    for checkpoint in rest.list_checkpoints(run_id).result().checkpoints:
        if checkpoint.tinker_path == path:
            return checkpoint
    raise NotFoundError(f"There is no checkpoint {path}.")


def _facts(checkpoint: Any) -> dict[str, Any]:
    return {
        "Path": checkpoint.tinker_path,
        "Type": checkpoint.checkpoint_type,
        "Size": size(checkpoint.size_bytes),
        "Public": "yes" if checkpoint.public else "no",
        "Created": ago(checkpoint.time),
        "Expires": ago(checkpoint.expires_at),
    }


def _time(checkpoint: Any) -> datetime:
    return moment(checkpoint.time) or datetime.min.replace(tzinfo=UTC)


# -- saving ----------------------------------------------------------------------------------------


@command.command("save")
@click.option("--output", "file", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--base-model", help="Save a fresh adapter on this base model.")
@click.option("--model-path", help="Save the weights of this training checkpoint.")
@click.option("--name", help="Name of the checkpoint.  [default: made of the base model's]")
@click.option("--rank", default=32, show_default=True)
@click.option("--seed", type=int)
@click.option("--train-mlp/--no-train-mlp", default=True)
@click.option("--train-attn/--no-train-attn", default=True)
@click.option("--train-unembed/--no-train-unembed", default=True)
@connected
def save(
    file: Path,
    base_model: str | None,
    model_path: str | None,
    name: str | None,
    connection: Connection,
    **lora: Any,
) -> None:
    """Save weights for sampling, and write down where they are."""
    if (base_model is None) == (model_path is None):
        raise click.UsageError("give either --base-model or --model-path")
    with connection.service() as service:
        if base_model is not None:
            training = service.create_lora_training_client(base_model, **lora)
        else:
            training = service.create_training_client_from_state(str(model_path))
        base = training.get_info().model_data.model_name or str(base_model)
        chosen = name or "checkpoint-" + re.sub("[/:]", "-", base.lower())
        saved = training.save_weights_for_sampler(chosen).result()
        written = {
            "base_model": base,
            "model_id": training.model_id,
            "weights_path": saved.path,
            "saved_at": datetime.now(UTC).replace(microsecond=0).isoformat(),
            "response": saved.model_dump(mode="json"),
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(written, indent=2) + "\n")
    say(f"Saved {saved.path}; written to {file}.")


# -- changing --------------------------------------------------------------------------------------


@command.command("publish")
@click.argument("checkpoint_path")
@connected
def publish(checkpoint_path: str, connection: Connection) -> None:
    """Let everybody read a checkpoint."""
    with connection.rest() as rest:
        rest.publish_checkpoint_from_tinker_path(checkpoint_path).result()
    say(f"{checkpoint_path} is public.")


@command.command("unpublish")
@click.argument("checkpoint_path")
@connected
def unpublish(checkpoint_path: str, connection: Connection) -> None:
    """Keep a checkpoint to yourself again."""
    with connection.rest() as rest:
        rest.unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    say(f"{checkpoint_path} is private.")


@command.command("set-ttl")
@click.argument("checkpoint_path")
@click.option("--ttl", type=click.IntRange(min=1), help="Seconds from now until it is deleted.")
@click.option("--remove", is_flag=True, help="Keep it for good.")
@connected
def set_ttl(checkpoint_path: str, ttl: int | None, remove: bool, connection: Connection) -> None:
    """When a checkpoint is deleted."""
    if (ttl is None) != remove:
        raise click.UsageError("give either --ttl or --remove")
    with connection.rest() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    kept = "for good" if ttl is None else f"for {ttl} seconds"
    say(f"{checkpoint_path} is kept {kept}.")


# -- deleting --------------------------------------------------------------------------------------


@command.command("delete")
@click.argument("checkpoint_paths", nargs=-1)
@click.option("--run-id", help="Those of one run.")
@click.option("--type", "kind", type=click.Choice(["training", "sampler", "external"]))
@click.option("--before", help="Older than: a date, or an age such as 7d, 12h.")
@click.option("--after", help="Younger than: a date, or an age.")
@click.option("--pattern", help="Whose name fits, e.g. 'step-*'.")
@click.option("--keep-newest", type=click.IntRange(min=0), help="All but the newest N of each run.")
@click.option("--all", "everything", is_flag=True, help="All of yours.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@connected
@formatted
def delete(
    checkpoint_paths: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    connection: Connection,
    output: Output,
    **filters: Any,
) -> None:
    """Delete checkpoints by path, or those that fit, after showing them."""
    with connection.rest() as rest:
        paths, taken = _chosen(rest, checkpoint_paths, **filters)
        if not paths:
            say("Nothing to delete.")
            if output.json:
                output.payload({"paths": [], "deleted": 0, "failed": 0, "failures": []})
            return
        for path in paths:
            say(f"  {path}")
        say(f"{len(paths)} checkpoints{f', {size(taken)}' if taken else ''}.")
        if dry_run:
            return
        if not yes and not _confirmed():
            say("Nothing was deleted.")
            return
        failures = _delete(rest, paths)
    result = {
        "paths": paths,
        "deleted": len(paths) - len(failures),
        "failed": len(failures),
        "failures": [{"path": path, "error": error} for path, error in failures.items()],
    }
    if output.json:
        output.payload(result)
    for path, error in failures.items():
        say(f"{path}: {error}")
    say(f"Deleted {result['deleted']} of {len(paths)}.")
    if failures:
        raise click.exceptions.Exit(1)


def _confirmed() -> bool:
    try:
        answer = input("Delete them? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in {"y", "yes"}


def _chosen(
    rest: Any,
    paths: tuple[str, ...],
    *,
    run_id: str | None,
    kind: str | None,
    before: str | None,
    after: str | None,
    pattern: str | None,
    keep_newest: int | None,
    everything: bool,
) -> tuple[list[str], int]:
    """The paths to delete, all checked before any goes, and their bytes where known."""
    from tinkex.types import ParsedCheckpointTinkerPath

    filtered = run_id or everything or pattern or before or after or keep_newest is not None
    if paths:
        if filtered or kind:
            raise click.UsageError("give paths, or what to look for, not both")
        for path in paths:
            ParsedCheckpointTinkerPath.from_tinker_path(path)
        return list(dict.fromkeys(paths)), 0
    if not filtered:
        raise click.UsageError(
            "say which: paths, --run-id, --pattern, --before, --keep-newest or --all"
        )
    if run_id is not None:
        found = rest.list_checkpoints(run_id).result().checkpoints
    else:
        found = _all_of_user(rest, 0, 0)[0]
    if keep_newest is not None:
        found = _but_newest(found, keep_newest)
    earliest, latest = _parsed(after), _parsed(before)
    fitting = [
        checkpoint
        for checkpoint in found
        if (kind is None or checkpoint.checkpoint_type == kind)
        and (
            pattern is None or fnmatch.fnmatch(checkpoint.checkpoint_id.partition("/")[2], pattern)
        )
        and (latest is None or _time(checkpoint) < latest)
        and (earliest is None or _time(checkpoint) > earliest)
    ]
    taken = sum(checkpoint.size_bytes or 0 for checkpoint in fitting)
    return [checkpoint.tinker_path for checkpoint in fitting], taken


def _but_newest(checkpoints: list[Any], count: int) -> list[Any]:
    kept: dict[tuple[str, str], int] = {}
    rest = []
    for checkpoint in sorted(checkpoints, key=_time, reverse=True):
        group = (checkpoint.training_run_id, checkpoint.checkpoint_type)
        kept[group] = kept.get(group, 0) + 1
        if kept[group] > count:
            rest.append(checkpoint)
    return rest


def _parsed(text: str | None) -> datetime | None:
    """A date, or an age such as `7d`."""
    if text is None:
        return None
    if found := re.fullmatch(r"(\d+)([smhdw])", text.strip()):
        unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[found[2]]
        return datetime.now(UTC) - timedelta(**{unit: int(found[1])})
    when = moment(text)
    if when is None:
        raise InvalidInputError(f"{text!r} is no date and no age such as 7d", field="before/after")
    return when


def _delete(rest: Any, paths: list[str]) -> dict[str, str]:
    failures: dict[str, str] = {}

    def one(numbered: tuple[int, str]) -> None:
        number, path = numbered
        say(f"Deleting {number}/{len(paths)}")
        try:
            rest.delete_checkpoint_from_tinker_path(path).result()
        except TinkerError as error:
            failures[path] = str(error)

    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(one, enumerate(paths, 1)))
    return failures


# -- fetching --------------------------------------------------------------------------------------


@command.command("download")
@click.argument("checkpoint_path")
@click.option(
    "--output",
    "-o",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where its directory is made.  [default: here]",
)
@click.option("--force", is_flag=True, help="Replace one that is there.")
@connected
@formatted
def download(
    checkpoint_path: str, directory: Path, force: bool, connection: Connection, output: Output
) -> None:
    """Fetch a checkpoint: streamed, resumed when the connection breaks, checked, all or nothing."""
    from tinkex._client.downloads import download_checkpoint

    with connection.rest() as rest, _bar(checkpoint_path) as progress:
        place = download_checkpoint(
            rest, checkpoint_path, directory, force=force, progress=progress
        )
    result = {"destination": str(place), "checkpoint_path": checkpoint_path}
    output.record({"Downloaded": checkpoint_path, "To": place}, result)


def _bar(title: str) -> Any:
    from .progress import download_bar

    return download_bar(title)


for _command in (export, import_adapter, push_hf):
    command.add_command(_command)
