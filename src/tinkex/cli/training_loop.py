"""The loop of `tinkex train`: steps, evaluations and checkpoints in order; one step is submitted ahead."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import InvalidInputError

from .lessons import Lesson
from .run_file import RunState, SavedStep
from .training_plan import is_evaluated, learning_rate

if TYPE_CHECKING:
    from tinkex import TrainingClient

__all__ = ["Trainer"]

#: Examples per request of an evaluation.
_HELD_OUT_AT_ONCE: Final = 16


@dataclass(frozen=True)
class _UnderWay:
    """The futures of a step in flight; its results are awaited after the next step is submitted."""

    step: int
    forward: Any = None
    update: Any = None
    evaluation: list[Any] = field(default_factory=list)
    saving: Any = None


class Trainer:
    """Trains by a plan from the current step of `run`, and records results in `run`.

    `keep` is called after each checkpoint and evaluation, to store `run`. `show` is called after each step with its
    number and its held-out loss, or None. `stopped` is checked between steps.
    """

    def __init__(
        self,
        client: TrainingClient,
        run: RunState,
        lessons: Sequence[Lesson],
        held_out: Sequence[Lesson],
        plan: Sequence[Sequence[int]],
        *,
        save_every: int = 0,
        eval_every: int = 0,
        keep: Callable[[], None] = lambda: None,
        show: Callable[[int, float | None], None] = lambda step, held_out: None,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._run = client, run
        self._lessons, self._held_out, self._plan = lessons, held_out, plan
        self._save_every, self._eval_every = save_every, eval_every
        self._keep, self._show, self._stopped, self._clock = keep, show, stopped, clock
        sizes = (sum(lessons[index].length - 1 for index in batch) for batch in plan)
        self._tokens = list(accumulate(sizes, initial=0))
        self._under_way: deque[_UnderWay] = deque()
        self._started, self._seconds_before = clock(), run.seconds

    @property
    def steps(self) -> int:
        return len(self._plan)

    def tokens(self, start: int = 0, end: int | None = None) -> int:
        """The number of tokens that the model reads in a range of steps."""
        return self._tokens[self.steps if end is None else end] - self._tokens[start]

    def train(self) -> bool:
        """Train to the end or until stopped, then save; whether the end was reached."""
        run = self._run
        self._started, self._seconds_before = self._clock(), run.seconds
        if not run.step and not run.evaluations and self._held_out:
            self._under_way.append(_UnderWay(0, evaluation=self._evaluate()))
        for step in range(run.step, self.steps):
            if self._stopped():
                break
            self._under_way.append(self._begin(step))
            if len(self._under_way) > 1:
                self._settle()
        while self._under_way:
            self._settle()
        ended = run.step == self.steps
        self._save(ended=ended)
        return ended

    # -- submitting ----------------------------------------------------------------------------

    def _begin(self, step: int) -> _UnderWay:
        from tinkex.types import AdamParams

        settings, client = self._run.settings, self._client
        batch = [self._lessons[index] for index in self._plan[step]]
        # The loss is a sum; weights that add up to 1 make it the mean over the learned tokens.
        weight = 1 / sum(lesson.count for lesson in batch)
        forward = client.forward_backward(
            [lesson.datum(weight) for lesson in batch], "cross_entropy"
        )
        rate = learning_rate(
            step,
            self.steps,
            peak=settings.learning_rate,
            schedule=settings.schedule,
            warmup=settings.warmup,
        )
        update = client.optim_step(
            AdamParams(
                learning_rate=rate,
                weight_decay=settings.weight_decay,
                grad_clip_norm=settings.grad_clip,
            )
        )
        done = step + 1
        saving = None
        if self._save_every and done % self._save_every == 0 and done < self.steps:
            saving = self._save_state(done)
        due = is_evaluated(done, self.steps, self._eval_every)
        return _UnderWay(done, forward, update, self._evaluate() if due else [], saving)

    def _evaluate(self) -> list[Any]:
        parts = range(0, len(self._held_out), _HELD_OUT_AT_ONCE)
        return [
            self._client.forward(
                [lesson.datum(1.0) for lesson in self._held_out[start : start + _HELD_OUT_AT_ONCE]],
                "cross_entropy",
            )
            for start in parts
        ]

    def _save_state(self, step: int) -> Any:
        name = f"{self._run.name}-{step:06d}"
        return self._client.save_state(name, user_metadata={"step": str(step)})

    # -- results -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for the oldest step in flight and record its results."""
        sent, run = self._under_way.popleft(), self._run
        if sent.forward is not None:
            sent.update.result()
            loss = float(sent.forward.result().metrics["loss:sum"])
            if not math.isfinite(loss):
                raise InvalidInputError(
                    f"the loss of step {sent.step} is {loss}; try a lower learning rate",
                    field="learning_rate",
                )
            run.losses.append(loss)
        held_out = None
        if sent.evaluation:
            total = math.fsum(one.result().metrics["loss:sum"] for one in sent.evaluation)
            held_out = total / sum(lesson.count for lesson in self._held_out)
            run.evaluations.append((sent.step, held_out))
        if sent.saving is not None:
            run.checkpoints.append(SavedStep(sent.step, sent.saving.result().path))
        run.seconds = self._seconds_before + self._clock() - self._started
        if sent.saving is not None or sent.evaluation:
            self._keep()
        self._show(sent.step, held_out)

    def _save(self, *, ended: bool) -> None:
        """Save the current state unless it is saved already; at the end also for sampling."""
        run = self._run
        if run.step and (run.last is None or run.last.step != run.step):
            run.checkpoints.append(SavedStep(run.step, self._save_state(run.step).result().path))
        if ended:
            run.sampler_path = self._client.save_weights_for_sampler(run.name).result().path
        self._keep()
