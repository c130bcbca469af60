"""`tinkex checkpoint`: list and manage checkpoints."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from .checkpoint_files import export, import_adapter, push_hf, refuse_existing
from .connection import Connection, connected, formatted
from .groups import DefaultGroup
from .housekeeping import delete
from .human import ago, size
from .listing import find, of_run, of_user
from .output import Output, plain, say
from .paging import paged

if TYPE_CHECKING:
    from .payloads import (
        CheckpointDownload,
        CheckpointList,
        CheckpointPublish,
        CheckpointSave,
        CheckpointTTL,
    )

__all__ = ["command"]

_COLUMNS: Final = ("Path", "Type", "Size", "Public", "Created", "Expires")
#: A path takes about 75 columns and contains the type; all six columns are 140 wide.
_NARROW: Final = ("Path", "Size", "Created")


@click.group("checkpoint", cls=DefaultGroup, default="save")
def command() -> None:
    """Checkpoints: list, save, publish, download, export and delete them."""


# -- looking ---------------------------------------------------------------------------------------


@command.command("list")
@click.option("--run-id", help="Only checkpoints of this run; without --limit, all of them.")
@click.option("--wide", is_flag=True, help="Also show type, public and expiry.")
@paged
@connected
@formatted
def list_checkpoints(
    run_id: str | None, wide: bool, limit: int, offset: int, connection: Connection, output: Output
) -> None:
    """List checkpoints and their sizes, newest first."""
    total: int | None
    with connection.rest() as rest:
        if run_id is None:
            checkpoints, total = of_user(rest, limit, offset)
        else:
            found = of_run(rest, run_id)
            most = (
                limit if _was_given("limit") else 0
            )  # one answer holds them all, so the default limit would only hide some
            checkpoints, total = found[offset : offset + most if most else None], len(found)
    taken = sum(checkpoint.size_bytes or 0 for checkpoint in checkpoints)
    payload: CheckpointList = {
        "checkpoints": checkpoints,
        "total": total,
        "shown": len(checkpoints),
        "size_bytes": taken,
    }
    if run_id is not None:
        payload["run_id"] = run_id
    columns = _COLUMNS if wide else _NARROW
    rows = [[_facts(checkpoint)[column] for column in columns] for checkpoint in checkpoints]
    output.table(columns, rows, payload)
    if checkpoints:
        count = f"{len(checkpoints)} of {total}" if total is not None else str(len(checkpoints))
        say(f"{count} shown, {size(taken)}.")


def _was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


@command.command("info")
@click.argument("checkpoint_path")
@connected
@formatted
def info(checkpoint_path: str, connection: Connection, output: Output) -> None:
    """Show one checkpoint, its base model and rank."""
    with connection.rest() as rest:
        checkpoint = find(rest, checkpoint_path)
        weights = rest.get_weights_info_by_tinker_path(checkpoint_path).result()
    facts = _facts(checkpoint) | {
        "Base model": weights.base_model,
        "LoRA rank": weights.lora_rank if weights.is_lora else "no LoRA",
    }
    output.record(facts, plain(checkpoint) | plain(weights))


def _facts(checkpoint: Any) -> dict[str, Any]:
    values = (
        checkpoint.tinker_path,
        checkpoint.checkpoint_type,
        size(checkpoint.size_bytes),
        "yes" if checkpoint.public else "no",
        ago(checkpoint.time),
        ago(checkpoint.expires_at),
    )
    return dict(zip(_COLUMNS, values, strict=True))


# -- saving ----------------------------------------------------------------------------------------


@command.command("save")
@click.option(
    "--output",
    "file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file to write; it names the path of the weights.",
)
@click.option("--base-model", help="Save a new, untrained adapter of this base model.")
@click.option("--model-path", help="Save the weights of this training checkpoint.")
@click.option("--name", help="Name of the checkpoint.  [default: checkpoint-BASE-MODEL]")
@click.option(
    "--rank",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Rank of a new adapter.",
)
@click.option("--seed", type=int, help="Seed of a new adapter.")
@click.option("--train-mlp/--no-train-mlp", default=True, help="Adapt the feed-forward layers.")
@click.option("--train-attn/--no-train-attn", default=True, help="Adapt the attention layers.")
@click.option("--train-unembed/--no-train-unembed", default=True, help="Adapt the unembedding.")
@connected
@formatted
def save(
    file: Path,
    base_model: str | None,
    model_path: str | None,
    name: str | None,
    connection: Connection,
    output: Output,
    **lora: Any,
) -> None:
    """Save weights for sampling, and write their path to a file."""
    if (base_model is None) == (model_path is None):
        raise click.UsageError("give either --base-model or --model-path")
    with connection.service(patient=False) as service:
        if base_model is not None:
            training = service.create_lora_training_client(base_model, **lora)
        else:
            training = service.create_training_client_from_state(str(model_path))
        base = training.get_info().model_data.model_name or str(base_model)
        chosen = name or "checkpoint-" + re.sub("[/:]", "-", base.lower())
        saved = training.save_weights_for_sampler(chosen).result()
        payload: CheckpointSave = {
            "base_model": base,
            "model_id": training.model_id,
            "weights_path": saved.path,
            "saved_at": datetime.now(UTC).replace(microsecond=0).isoformat(),
            "response": saved,
        }
    output.done(f"Saved {saved.path}.", payload)  # first, in case the file cannot be written
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plain(payload), indent=2) + "\n")
    say(f"Written to {file}.")


# -- changing --------------------------------------------------------------------------------------


@command.command("publish")
@click.argument("checkpoint_path")
@connected
@formatted
def publish(checkpoint_path: str, connection: Connection, output: Output) -> None:
    """Let everyone read a checkpoint."""
    with connection.rest() as rest:
        rest.publish_checkpoint_from_tinker_path(checkpoint_path).result()
    payload: CheckpointPublish = {"checkpoint_path": checkpoint_path, "public": True}
    output.done(f"{checkpoint_path} is public.", payload)


@command.command("unpublish")
@click.argument("checkpoint_path")
@connected
@formatted
def unpublish(checkpoint_path: str, connection: Connection, output: Output) -> None:
    """Make a published checkpoint private again."""
    with connection.rest() as rest:
        rest.unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    payload: CheckpointPublish = {"checkpoint_path": checkpoint_path, "public": False}
    output.done(f"{checkpoint_path} is private.", payload)


@command.command("set-ttl")
@click.argument("checkpoint_path")
@click.option(
    "--ttl",
    type=click.IntRange(min=1),
    help="Seconds until the checkpoint is deleted; a service may ask for an hour at least and ten years at most.",
)
@click.option("--remove", is_flag=True, help="Never delete it.")
@connected
@formatted
def set_ttl(
    checkpoint_path: str, ttl: int | None, remove: bool, connection: Connection, output: Output
) -> None:
    """Set when a checkpoint is deleted, or that it never is."""
    if (ttl is None) != remove:
        raise click.UsageError("give either --ttl or --remove")
    with connection.rest() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    payload: CheckpointTTL = {"checkpoint_path": checkpoint_path, "ttl_seconds": ttl}
    when = "never deleted" if ttl is None else f"deleted in {ttl} seconds"
    output.done(f"{checkpoint_path} is {when}.", payload)


# -- fetching --------------------------------------------------------------------------------------


@command.command("download")
@click.argument("checkpoint_path")
@click.option(
    "--output",
    "-o",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Parent of the new directory.  [default: the current directory]",
)
@click.option("--force", is_flag=True, help="Replace an existing directory.")
@connected
@formatted
def download(
    checkpoint_path: str, directory: Path, force: bool, connection: Connection, output: Output
) -> None:
    """Download a checkpoint; broken connections are resumed, checksums verified, nothing is left after a failure."""
    from tinkex._client.downloads import download_checkpoint, target

    from .progress import download_bar

    refuse_existing(target(directory, checkpoint_path), force=force)
    with connection.rest() as rest, download_bar(checkpoint_path) as progress:
        place = download_checkpoint(
            rest, checkpoint_path, directory, force=force, progress=progress
        )
    payload: CheckpointDownload = {"checkpoint_path": checkpoint_path, "destination": str(place)}
    output.record({"Downloaded": checkpoint_path, "To": place}, payload)


for _command in (delete, export, import_adapter, push_hf):
    command.add_command(_command)
