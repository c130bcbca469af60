"""Finding checkpoints, for several commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tinkex._wire.failures import lacks_route
from tinkex.errors import NotFoundError

from .human import moment
from .paging import fetch_all

__all__ = ["find", "made_at", "named_run", "of_run", "of_user"]


def of_user(rest: Any, limit: int, offset: int) -> tuple[list[Any], int | None]:
    """The user's checkpoints, newest first, and their total number if known."""

    def page(count: int, start: int) -> tuple[list[Any], int | None]:
        answer = rest.list_user_checkpoints(count, start).result()
        return answer.checkpoints, None if answer.cursor is None else answer.cursor.total_count

    try:
        return fetch_all(page, "checkpoints", limit=limit, offset=offset, page_size=1000)
    except NotFoundError as error:
        if not lacks_route(error):
            raise
    found = sorted(_of_all_runs(rest), key=made_at, reverse=True)
    return found[offset : offset + limit if limit else None], len(found)


def _of_all_runs(rest: Any) -> list[Any]:
    """The checkpoints of every run, for services that only list those of one run."""

    def page(count: int, start: int) -> tuple[list[Any], int | None]:
        answer = rest.list_training_runs(count, start).result()
        return answer.training_runs, answer.cursor.total_count

    runs, _ = fetch_all(page, "runs", limit=0, offset=0, page_size=100)
    return [
        checkpoint
        for run in runs
        for checkpoint in rest.list_checkpoints(run.training_run_id).result().checkpoints
    ]


def of_run(rest: Any, run_id: str) -> list[Any]:
    """The checkpoints of one run, newest first."""
    with named_run(run_id):
        found = rest.list_checkpoints(run_id).result().checkpoints
    return sorted(found, key=made_at, reverse=True)


@contextmanager
def named_run(run_id: str) -> Iterator[None]:
    """Name the missing run in a 404: each service words it differently."""
    try:
        yield
    except NotFoundError as error:
        if lacks_route(error):  # the service lacks the operation; its error says so
            raise
        raise NotFoundError(f"There is no training run {run_id}.", error.response) from error


def find(rest: Any, path: str) -> Any:
    """The checkpoint with this path."""
    from tinkex.types import ParsedCheckpointTinkerPath

    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    for checkpoint in of_run(rest, run_id):
        if checkpoint.tinker_path == path:
            return checkpoint
    raise NotFoundError(f"There is no checkpoint {path}.")


def made_at(checkpoint: Any) -> datetime:
    """When the checkpoint was saved; the earliest possible time if its date is unreadable."""
    return moment(checkpoint.time) or datetime.min.replace(tzinfo=UTC)
