"""`tinkex checkpoint delete`: lists the chosen checkpoints, asks, then deletes them."""

from __future__ import annotations

import re
import sys
from collections import deque
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import click

from tinkex.errors import InvalidInputError, TinkerError

from .connection import Connection, connected, formatted
from .human import ago, moment, size
from .listing import made_at, of_run, of_user
from .output import Output, say

if TYPE_CHECKING:
    from .payloads import CheckpointDelete

__all__ = ["delete"]

_PARALLEL: Final = 32
#: Names of the types in paths, and in lists.
_TYPES: Final = {"weights": "training", "sampler_weights": "sampler"}
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@click.command("delete")
@click.argument("checkpoint_paths", nargs=-1)
@click.option("--run-id", help="Only checkpoints of this run.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["training", "sampler", "external", *_TYPES]),
    callback=lambda _context, _option, value: _TYPES.get(value, value),
    help="Only this type; both the names in lists and those in paths work.",
)
@click.option("--before", help="Only older than this date, or this age such as 7d or 12h.")
@click.option("--after", help="Only newer than this date, or this age.")
@click.option("--pattern", help="Only names that match, e.g. 'step-*'.")
@click.option(
    "--keep-newest",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the newest N of each run and type, whatever their age.",
)
@click.option("--all", "everything", is_flag=True, help="All your checkpoints.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
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
    """Delete checkpoints by path or by filters, after listing them."""
    choose = _by_path(checkpoint_paths, **filters) or _by_filter(**filters)
    with connection.rest() as rest:
        preview, taken = choose(rest)
        paths = list(preview)
        for path, told in preview.items():
            say(f"  {path}{told}")
        of = "" if taken is None else f", {size(taken)}"
        say(f"{len(paths)} checkpoint{'' if len(paths) == 1 else 's'} to delete{of}.")
        cancelled = bool(paths) and not dry_run and not yes and not _confirmed()
        going = [] if cancelled or dry_run else paths
        failures = _delete(rest, going)
    payload: CheckpointDelete = {
        "paths": paths,
        "size_bytes": taken,
        "deleted": len(going) - len(failures),
        "failed": len(failures),
        "failures": [{"path": path, "error": error} for path, error in failures.items()],
        "cancelled": cancelled,
        "dry_run": dry_run,
    }
    for path, error in failures.items():
        say(f"{path}: {error}")
    told = f"Deleted {payload['deleted']} of {len(paths)}." if going else "Nothing was deleted."
    output.done(told, payload)
    if failures:
        raise click.exceptions.Exit(1)


def _confirmed() -> bool:
    click.echo("Delete them? [y/N] ", nl=False, err=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


# -- which -----------------------------------------------------------------------------------------


def _by_path(paths: tuple[str, ...], **filters: Any) -> Any:
    """A function that chooses the named paths; all paths are checked before any is deleted."""
    from tinkex.types import ParsedCheckpointTinkerPath

    if not paths:
        return None
    if any(value not in {None, False} for value in filters.values()):
        raise click.UsageError("give paths or filters, not both")
    for path in paths:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
    return lambda _rest: (dict.fromkeys(paths, ""), None)


def _by_filter(
    *,
    run_id: str | None,
    kind: str | None,
    before: str | None,
    after: str | None,
    pattern: str | None,
    keep_newest: int | None,
    everything: bool,
) -> Any:
    """A function that chooses by filters: a description of each checkpoint, and their bytes in total."""
    if not (run_id or everything or pattern or before or after or keep_newest is not None):
        raise click.UsageError(
            "choose what to delete: paths, --run-id, --pattern, --before, --after, --keep-newest or --all"
        )
    earliest, latest = _time("after", after), _time("before", before)

    def choose(rest: Any) -> tuple[dict[str, str], int]:
        found = of_user(rest, 0, 0)[0] if run_id is None else of_run(rest, run_id)
        found = [
            checkpoint
            for checkpoint in sorted(found, key=made_at, reverse=True)
            if (kind is None or checkpoint.checkpoint_type == kind)
            and (pattern is None or fnmatchcase(_name(checkpoint), pattern))
        ]
        fitting = [
            checkpoint
            for checkpoint in _but_newest(found, keep_newest or 0)
            if (latest is None or made_at(checkpoint) < latest)
            and (earliest is None or made_at(checkpoint) > earliest)
        ]
        told = {one.tinker_path: f"  {size(one.size_bytes)}, {ago(one.time)}" for one in fitting}
        return told, sum(checkpoint.size_bytes or 0 for checkpoint in fitting)

    return choose


def _name(checkpoint: Any) -> str:
    name: str = checkpoint.checkpoint_id.rpartition("/")[2]
    return name


def _but_newest(newest_first: list[Any], count: int) -> list[Any]:
    kept: dict[tuple[str, str], int] = {}
    rest = []
    for checkpoint in newest_first:
        group = (checkpoint.training_run_id, checkpoint.checkpoint_type)
        kept[group] = kept.get(group, 0) + 1
        if kept[group] > count:
            rest.append(checkpoint)
    return rest


def _time(option: str, text: str | None) -> datetime | None:
    """A date, or an age such as `7d`."""
    if text is None:
        return None
    if found := re.fullmatch(r"(\d+)([smhdw])", text.strip()):
        try:
            return datetime.now(UTC) - timedelta(**{_UNITS[found[2]]: int(found[1])})
        except OverflowError:
            raise InvalidInputError(f"{text!r} is too long ago", field=option) from None
    when = moment(text)
    if when is None:
        raise InvalidInputError(f"{text!r} is neither a date nor an age such as 7d", field=option)
    return when


# -- deleting --------------------------------------------------------------------------------------


def _delete(rest: Any, paths: list[str]) -> dict[str, str]:
    """Delete in parallel and continue after failures; the paths that failed, and why.

    Ctrl-C stops and prints how many are deleted. Progress is one line that is overwritten, only on a terminal: the
    paths are already listed.
    """
    failures: dict[str, str] = {}
    under_way: deque[tuple[str, Any]] = deque()
    deleted = 0
    shown = sys.stderr.isatty()

    def settle() -> None:
        nonlocal deleted
        path, answer = under_way[0]
        try:
            answer.result()
            deleted += 1
        except TinkerError as error:
            failures[path] = str(error)
        under_way.popleft()

    try:
        for number, path in enumerate(paths, 1):
            if len(under_way) == _PARALLEL:
                settle()
            if shown:
                click.echo(f"\rDeleting {number}/{len(paths)}", nl=False, err=True)
            under_way.append((path, rest.delete_checkpoint_from_tinker_path(path)))
        while under_way:
            settle()
        if shown and paths:
            say("")
    except KeyboardInterrupt:
        unsure = f"; {len(under_way)} more may be deleted too" if under_way else ""
        say(f"\nDeleted {deleted} of {len(paths)}{unsure}.")
        raise
    return failures
