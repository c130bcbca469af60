"""Restores lost runs from a checkpoint, a limited number at a time, with retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tinkex._client.budget import Lease, slots
from tinkex._client.checks import check_count
from tinkex._client.runtime import APIFuture, SampleFuture
from tinkex._retry import Tried, retrying
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.events import (
    CheckpointSelected,
    ClientCreated,
    RecoveryCompleted,
    RecoveryExhausted,
    RecoveryFailed,
    RecoveryStarted,
)
from tinkex.types import TrainingRun

from .policy import CheckpointLike, RecoveryError, RecoveryPolicy, checkpoint_path, logger

if TYPE_CHECKING:
    from tinkex._client.service import ServiceClient
    from tinkex._client.session import Session
    from tinkex._client.training import TrainingClient

__all__ = ["RecoveryExecutor", "Restored", "policy_for", "submit_once"]


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored run: `client` continues from `checkpoint`."""

    run_id: str
    client: TrainingClient
    checkpoint: str
    attempt: int


@dataclass(frozen=True, slots=True)
class _Job:
    run_id: str
    service: ServiceClient
    policy: RecoveryPolicy
    metadata: Mapping[str, Any]
    old: TrainingClient | None
    last_checkpoint: CheckpointLike | None
    run: TrainingRun | None

    def tell(self, kind: type[Any], attempt: int, *facts: Any) -> None:
        if wants(kind):
            strategy = self.policy.checkpoint_strategy
            emit(kind(self.run_id, attempt, strategy, *facts, metadata=self.metadata))

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        return self.policy.wait_before_retry(error, tried.attempt + 1)

    def tell_waiting(self, error: Exception, _: Tried, wait: float) -> None:
        logger.warning(
            "Run %s could not be restored, next attempt in %g s: %s", self.run_id, wait, error
        )


class RecoveryExecutor:
    """Restores runs in the order of the calls, at most `max_concurrent` at a time."""

    def __init__(self, *, max_concurrent: int = 1) -> None:
        self._room = slots(check_count("max_concurrent", max_concurrent, 1))
        self._pending: dict[str, APIFuture[Restored]] = {}

    def recover(
        self,
        run: TrainingClient | str,
        service: ServiceClient,
        *,
        policy: RecoveryPolicy | Mapping[str, Any] | None = None,
        last_checkpoint: CheckpointLike | None = None,
        known: TrainingRun | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> APIFuture[Restored]:
        """Create a new training client of `service` from the run's last checkpoint.

        `run` is the lost run's client or its id; `policy` defaults to the setting `recovery` of the service client.
        `last_checkpoint` (a checkpoint or its path) or `known` (the run as the service described it) saves a request
        for the last checkpoint. Cancelling the future stops the recovery.
        """
        run_id = run if isinstance(run, str) else run.model_id
        session = service.holder
        job = _Job(
            run_id,
            service,
            policy_for(run_id, service, policy),
            {**session.metadata, **(metadata or {})},
            None if isinstance(run, str) else run,
            last_checkpoint,
            known,
        )
        future, begun = submit_once(self._pending, run_id, session, partial(self._recover, job))
        if not begun:
            raise RecoveryError(run_id, "already_pending")
        return future

    @property
    def pending(self) -> tuple[str, ...]:
        """The runs that are being restored or wait for their turn."""
        return tuple(self._pending)

    async def _recover(self, job: _Job) -> Restored:
        attempts = 0

        async def once(attempt: int) -> Restored:
            nonlocal attempts
            attempts = attempt + 1
            try:
                with Lease() as lease:
                    await lease.take(self._room)
                    return await _restore(job, attempts)
            except Exception as error:
                job.tell(RecoveryFailed, attempts, error)
                raise

        try:
            restored = await retrying(once, job, job.service.holder.clock, job.tell_waiting)
        except Exception as error:
            job.tell(RecoveryExhausted, attempts, error)
            await _call(job.policy.on_failure, job.run_id, error)
            raise
        job.tell(RecoveryCompleted, attempts, restored.checkpoint, restored.client)
        await _call(job.policy.on_recovery, job.old, restored.client, restored.checkpoint)
        return restored


def submit_once(
    under_way: dict[str, APIFuture[Restored]],
    run_id: str,
    session: Session,
    work: Callable[[], Coroutine[Any, Any, Restored]],
) -> tuple[APIFuture[Restored], bool]:
    """Start `work` for a run unless it is in progress. Returns its future, and whether it was started now."""
    future: SampleFuture[Restored] = SampleFuture()
    known = under_way.setdefault(run_id, future)
    if known is not future:
        return known, False
    future.add_done_callback(lambda _: under_way.pop(run_id, None))
    try:
        return session.submit(work(), future), True
    except BaseException:  # a closed client
        future.cancel()
        raise


def policy_for(
    run_id: str, service: ServiceClient, policy: RecoveryPolicy | Mapping[str, Any] | None
) -> RecoveryPolicy:
    """The given policy, or else that of the settings; it must be enabled."""
    chosen = RecoveryPolicy.of(service.config.recovery if policy is None else policy)
    if not chosen.enabled:
        raise RecoveryError(run_id, "recovery_disabled")
    return chosen


async def _restore(job: _Job, attempt: int) -> Restored:
    job.tell(RecoveryStarted, attempt)
    checkpoint, run = await _choose(job, attempt)
    job.tell(CheckpointSelected, attempt, checkpoint)
    service = job.service
    create = (
        service.create_training_client_from_state_with_optimizer_async
        if job.policy.restore_optimizer
        else service.create_training_client_from_state_async
    )
    client = await create(checkpoint, user_metadata=None if run is None else run.user_metadata)
    job.tell(ClientCreated, attempt, checkpoint, client)
    return Restored(job.run_id, client, checkpoint, attempt)


async def _choose(job: _Job, attempt: int) -> tuple[str, TrainingRun | None]:
    """The checkpoint to continue from, and the run if it is known.

    The known run is used for the first attempt only: its last checkpoint may have been deleted since.
    """
    strategy = job.policy.checkpoint_strategy
    if strategy == "best":
        raise RecoveryError(job.run_id, "unsupported_strategy")
    given = job.last_checkpoint if strategy == "latest" else strategy
    run = job.run
    if given is None and (attempt > 1 or run is None or run.last_checkpoint is None):
        run = await job.service.create_rest_client().get_training_run(job.run_id)
    path = checkpoint_path(given or (None if run is None else run.last_checkpoint))
    if path is None:
        raise RecoveryError(job.run_id, "missing_checkpoint")
    return path, run


async def _call(callback: Callable[..., object] | None, *args: Any) -> None:
    """Call the user's callback on a thread, where it may block; its exceptions are logged and harm no run."""
    if callback is None:
        return
    try:
        await asyncio.to_thread(callback, *args)
    except Exception:
        logger.exception("A recovery callback failed: %r", callback)
