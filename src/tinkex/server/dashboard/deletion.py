"""Deletes a run for good: its metrics and samples, its checkpoints, and its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.errors import ConflictError, TinkerError

from ..tables import AuditRow, RunRow

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["delete_run", "deleted_meanwhile"]


async def delete_run(service: Service, run: RunRow, *, keep_checkpoints: bool) -> dict[str, Any]:
    """Delete a run whose session has ended; return what was deleted.

    With `keep_checkpoints` only metrics and samples are deleted: a checkpoint needs the row of its run.
    """
    await _check_ended(service, run)
    database = service.database
    checkpoints = await database(database.store.checkpoints_of_run, run.run_id)
    if not keep_checkpoints:
        for checkpoint in checkpoints:
            await service.checkpoints.delete(checkpoint)
    await service.captured.flush()
    freed = await service.run_metrics.delete(run.owner, run.run_id)
    if not keep_checkpoints:
        entry = AuditRow(service.settings.now(), run.owner, "runs", "run_deleted", {}, run.run_id)
        await database(_delete_row, service, run, entry)
        # Again: a report that was on its way may have been written since.
        freed += await service.run_metrics.delete(run.owner, run.run_id)
    return {
        "run": run.run_id,
        "metric_bytes": freed,
        "checkpoints": 0 if keep_checkpoints else len(checkpoints),
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


def _delete_row(service: Service, run: RunRow, entry: AuditRow) -> None:
    store = service.database.store
    with store.one_transaction():
        store.delete_run(run.run_id)
        store.add_audit(entry)
