"""Watching runs: the service is asked now and then whether one is corrupted."""

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
    """Watches runs and has `executor` restore those that are lost; leaving its `with` block ends both."""

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
        """Ask `service` every `poll_interval` seconds how a run is; the future tells how it was restored.

        `run` is the run's training client or its id. A run that is watched, or being restored, gives the same future
        again; one that was restored is watched no longer, nor is the one that goes on in its place.
        """
        run_id = run if isinstance(run, str) else run.model_id
        chosen = policy_for(run_id, service, policy)
        told = {**service.holder.metadata, **(metadata or {})}
        work = partial(self._watch, run, service, chosen, told)
        return submit_once(self._watched, run_id, service.holder, work)[0]

    def stop_monitoring(self, run_id: str) -> bool:
        """Watch a run no longer, nor restore it; whether it was watched."""
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
    """Ask until the service says that a run is corrupted, or repeatedly that there is no such run."""
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


#: A run is given up after this many answers in a row that it does not exist; one may come from a proxy.
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
