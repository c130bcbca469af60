"""Deletes a run for good: its metrics and samples, its checkpoints, and its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import ConflictError, TinkerError

from ..tables import AuditRow, RunRow

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["delete_run", "deleted_meanwhile"]

#: How often the checkpoints of a run are listed, because one may be written or replaced while others are deleted.
_TRIES: Final = 10


async def delete_run(service: Service, run: RunRow, *, keep_checkpoints: bool) -> dict[str, Any]:
    """Delete a run whose session has ended; return what was deleted.

    With `keep_checkpoints` only metrics and samples are deleted: a checkpoint needs the row of its run.
    """
    await _check_ended(service, run)
    # The row before the metrics: if it cannot be deleted, they must not be lost.
    deleted = 0 if keep_checkpoints else await _delete_with_checkpoints(service, run)
    await service.captured.flush()
    freed = await service.run_metrics.delete(run.owner, run.run_id)
    return {
        "run": run.run_id,
        "metric_bytes": freed,
        "checkpoints": deleted,
        "kept": keep_checkpoints,
    }


async def deleted_meanwhile(service: Service, owner: str, run_id: str) -> bool:
    """Whether a run was deleted while something was written for it, which is deleted too.

    Asked after the write. A run that is still there then will be deleted, if at all, with what was written.
    """
    database = service.database
    row = await database(database.store.run, run_id)
    if row is not None and row.owner == owner:
        return False
    await service.run_metrics.delete(owner, run_id)
    return True


async def _check_ended(service: Service, run: RunRow) -> None:
    if service.models.live(run.run_id) is None:
        try:
            await service.sessions.check_active(run.session_id, run.owner)
        except TinkerError:
            return
    raise ConflictError(
        "The session of this run is still open, so its client may continue training. Close the client first."
    )


async def _delete_with_checkpoints(service: Service, run: RunRow) -> int:
    """Delete the row of a run and its checkpoints; return how many there were."""
    database, deleted = service.database, 0
    for _ in range(_TRIES):
        for checkpoint in await database(database.store.checkpoints_of_run, run.run_id):
            await service.checkpoints.delete(checkpoint)
            deleted += 1
        entry = AuditRow(service.settings.now(), run.owner, "runs", "run_deleted", {}, run.run_id)
        if await database(_delete_row, service, run, entry):
            return deleted
    raise ConflictError(
        "Checkpoints of this run are still being written. Try again later.", retry_after=1.0
    )


def _delete_row(service: Service, run: RunRow, entry: AuditRow) -> bool:
    """Delete the row of a run, unless a checkpoint still needs it."""
    store = service.database.store
    with store.one_transaction():
        if store.checkpoints_of_run(run.run_id):
            return False
        store.delete_run(run.run_id)
        store.add_audit(entry)
    return True
