"""Checkpoints as commands find them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinkex.errors import NotFoundError

from .human import moment
from .paging import fetch_all

__all__ = ["find", "made_at", "of_user"]


def of_user(rest: Any, limit: int, offset: int) -> tuple[list[Any], int | None]:
    """Those of the caller, newest first, and how many there are."""

    def page(count: int, start: int) -> tuple[list[Any], int | None]:
        answer = rest.list_user_checkpoints(count, start).result()
        return answer.checkpoints, None if answer.cursor is None else answer.cursor.total_count

    return fetch_all(page, "checkpoints", limit=limit, offset=offset, page_size=1000)


def find(rest: Any, path: str) -> Any:
    """The one with this path."""
    from tinkex.types import ParsedCheckpointTinkerPath

    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    for checkpoint in rest.list_checkpoints(run_id).result().checkpoints:
        if checkpoint.tinker_path == path:
            return checkpoint
    raise NotFoundError(f"There is no checkpoint {path}.")


def made_at(checkpoint: Any) -> datetime:
    """When it was saved; at the beginning of time if the service says it in a way nobody knows."""
    return moment(checkpoint.time) or datetime.min.replace(tzinfo=UTC)
