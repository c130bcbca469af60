"""Automatic checkpoints: the state of a run, saved at intervals during the training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from tinkex._client.checks import check_count, check_name, check_seconds
from tinkex._client.rest import RestClient
from tinkex._client.runtime import APIFuture
from tinkex.errors import TinkerError
from tinkex.types import SaveWeightsResponse

from .policy import logger

if TYPE_CHECKING:
    from tinkex._client.training import TrainingClient

__all__ = ["AutoCheckpoint", "Saved"]

#: Default seconds between checkpoints.
EVERY_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint and the number of steps before it."""

    path: str
    step: int


class AutoCheckpoint:
    """Saves the state of a training client inside its block, at intervals of steps or seconds, or both.

        >>> with AutoCheckpoint(training, every_steps=50, keep=3) as saved:
        ...     train(training)

    Checkpoints are named `auto-000050` after the number of steps, counted from `first_step`. All but the newest
    `keep` of them are deleted. A save is queued right after a step, and training does not wait for it. A failed save
    is logged, and training continues.
    """

    def __init__(
        self,
        training: TrainingClient,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 3,
        name: str = "auto",
        first_step: int = 0,
    ) -> None:
        if every_steps is None and every_seconds is None:
            every_seconds = EVERY_SECONDS
        if every_seconds is not None:
            check_seconds("every_seconds", every_seconds)
        if every_steps is not None:
            check_count("every_steps", every_steps, 1)
        check_name(name)
        self.step = check_count("first_step", first_step)
        self._training = training
        self._every_steps = every_steps or math.inf
        self._every_seconds = every_seconds or math.inf
        self._keep = check_count("keep", keep, 1)
        self._name = name
        self._clock = training.holder.clock
        self._last_step, self._last_time = self.step, self._clock.monotonic()
        self._saving: APIFuture[None] | None = None
        self._saved: deque[Saved] = deque()
        self._end: Callable[[], None] | None = None

    @property
    def last(self) -> Saved | None:
        """The newest checkpoint that is saved completely."""
        return self._saved[-1] if self._saved else None

    def __enter__(self) -> Self:
        self._end = self._training.observe_steps(self._stepped)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; a block that ends without an error waits for the save in flight."""
        if self._end is not None:
            self._end()
        if error is None:
            self.wait()

    def _stepped(self) -> None:
        self.step += 1
        due = self.step - self._last_step >= self._every_steps
        due = due or self._clock.monotonic() - self._last_time >= self._every_seconds
        if due and (self._saving is None or self._saving.done()):
            self.save()

    def save(self) -> APIFuture[None]:
        """Save now, even if no checkpoint is due."""
        step = self._last_step = self.step
        self._last_time = self._clock.monotonic()
        saving = self._training.save_state(f"{self._name}-{step:06d}", overwrite=True)
        self._saving = self._training.holder.submit(self._keep_newest(saving, step))
        return self._saving

    def wait(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self._saving is not None:
            self._saving.result()

    async def _keep_newest(self, saving: APIFuture[SaveWeightsResponse], step: int) -> None:
        run = self._training.model_id
        try:
            path = (await saving).path
        except TinkerError as error:
            logger.warning("%s was not saved after step %d: %s", run, step, error)
            return
        if self.last is None or self.last.path != path:
            self._saved.append(Saved(path, step))
        while len(self._saved) > self._keep:
            oldest = self._saved.popleft()
            try:
                await RestClient(self._training.holder).delete_checkpoint_from_tinker_path(
                    oldest.path
                )
            except TinkerError as error:
                logger.warning("%s could not be deleted: %s", oldest.path, error)
