"""Watches runs: asks the service at intervals whether a run is corrupted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tinkex._client.runtime import APIFuture
from tinkex._retry import NotYetError, Tried, retrying
from tinkex.errors import NotFoundError, TinkerError
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.events import RecoveryDetected, RecoveryPollError
from tinkex.types import TrainingRun

from .executor import RecoveryExecutor, Restored, policy_for, submit_once
from .policy import RecoveryPolicy, checkpoint_path, logger

if TYPE_CHECKING:
    from tinkex._client.service import ServiceClient
    from tinkex._client.training import TrainingClient

__all__ = ["RecoveryMonitor"]


class RecoveryMonitor:
    """Watches runs and lets `executor` restore lost ones; leaving the `with` block stops both."""

    def __init__(self, executor: RecoveryExecutor) -> None:
        self._executor = executor
        self._watched: dict[str, APIFuture[Restored]] = {}

    def monitor_run(
        self,
        run: TrainingClient | str,
        service: ServiceClient,
        *,
        policy: RecoveryPolicy | Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> APIFuture[Restored]:
        """Ask `service` for the state of a run every `poll_interval` seconds; the future gives the restored run.

        `run` is the run's training client or its id. If the run is already watched or being restored, the same
        future is returned. After a run is restored, neither it nor its successor is watched.
        """
        run_id = run if isinstance(run, str) else run.model_id
        chosen = policy_for(run_id, service, policy)
        told = {**service.holder.metadata, **(metadata or {})}
        work = partial(self._watch, run, service, chosen, told)
        return submit_once(self._watched, run_id, service.holder, work)[0]

    def stop_monitoring(self, run_id: str) -> bool:
        """Stop watching or restoring a run. Returns whether it was watched."""
        watched = self._watched.get(run_id)
        return watched is not None and watched.cancel()

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that are watched or being restored."""
        return tuple(self._watched)

    def close(self) -> None:
        for run_id in self.runs:
            self.stop_monitoring(run_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _watch(
        self,
        run: TrainingClient | str,
        service: ServiceClient,
        policy: RecoveryPolicy,
        metadata: Mapping[str, Any],
    ) -> Restored:
        run_id = run if isinstance(run, str) else run.model_id
        found = await _corrupted(run_id, service, policy, metadata)
        logger.warning("Run %s is corrupted; it is being restored.", run_id)
        if wants(RecoveryDetected):
            checkpoint = checkpoint_path(found.last_checkpoint)
            emit(RecoveryDetected(run_id, checkpoint, metadata=metadata))
        return await self._executor.recover(
            run, service, policy=policy, known=found, metadata=metadata
        )


async def _corrupted(
    run_id: str, service: ServiceClient, policy: RecoveryPolicy, metadata: Mapping[str, Any]
) -> TrainingRun:
    """Ask until the service says that the run is corrupted, or several times that it does not exist."""
    rest = service.create_rest_client()

    async def once(_: int) -> TrainingRun:
        try:
            found = await rest.get_training_run(run_id)
        except TinkerError as error:
            if wants(RecoveryPollError):
                emit(RecoveryPollError(run_id, error, metadata=metadata))
            raise
        if not found.corrupted:
            raise NotYetError
        return found

    return await retrying(once, _WatchPolicy(policy.poll_interval), service.holder.clock)


#: Answers in a row that the run does not exist before watching stops; a single one may come from a proxy.
_UNKNOWN_AFTER: Final = 3


@dataclass(slots=True)
class _WatchPolicy:
    """Ask every `interval` seconds, whatever the answer, unless the run does not exist."""

    interval: float
    unknown: int = 0

    def wait_before_retry(self, error: Exception, _: Tried) -> float | None:
        if not isinstance(error, TinkerError | NotYetError):
            return None
        self.unknown = self.unknown + 1 if isinstance(error, NotFoundError) else 0
        return None if self.unknown >= _UNKNOWN_AFTER else self.interval
