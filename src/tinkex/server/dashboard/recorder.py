"""Turns finished training requests into metrics: one point per optimizer step.

A step may consist of many passes, because clients accumulate gradients and send large batches in chunks. Their losses
are summed until the optimizer step, which divides by the sum of the weights. The sums are part of the stored state,
so a restart in the middle of a step loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)

from ..futures import Promise
from ..replay import changes_model
from .store import MAX_NAMES, MetricPoint, MetricStore, RunMetrics

__all__ = ["Recorder", "RunProgress"]

#: Metrics of a pass that the recorder sums itself.
_OWN: Final = frozenset({"loss:sum", "tokens:sum"})
#: Most other metrics of a pass that are recorded.
_MAX_OTHERS: Final = 32


@dataclass
class RunProgress:
    """What a run has done so far."""

    steps: int = 0
    tokens: int = 0
    passes: int = 0
    seq: int = -1  # the highest request number that is counted: after a crash some are run again
    stepped_at: float | None = None
    # Since the last optimizer step:
    loss: float = 0.0
    weight: float = 0.0
    step_tokens: int = 0
    others: dict[str, list[float]] = field(default_factory=dict)  # by name: sum, weight
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: dict[str, Any]) -> RunProgress:
        known = {name: value for name, value in state.items() if name in cls.__dataclass_fields__}
        # JSON has no NaN: null stands for a value that was not finite.
        for name in ("loss", "weight"):
            if known.get(name, 0.0) is None:
                known[name] = math.nan
        for joined in known.get("others", {}).values():
            joined[:] = [math.nan if number is None else number for number in joined]
        return cls(**known)

    def state(self) -> dict[str, Any]:
        """A copy. Not `asdict`, which copies every value by itself: this is done for each pass, on the event loop."""
        others = {name: joined.copy() for name, joined in self.others.items()}
        return vars(self) | {"others": others, "config": self.config.copy()}

    def configure(self, found: Mapping[str, Any]) -> None:
        """Note settings; those beyond the number of metrics that a run may have are left out."""
        for name, value in found.items():
            if name in self.config or len(self.config) < MAX_NAMES:
                self.config[name] = value


class Recorder:
    """Watches the finished requests of a service."""

    def __init__(self, store: MetricStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._progress: WeakKeyDictionary[RunMetrics, RunProgress] = WeakKeyDictionary()

    def progress(self, owner: str, run_id: str) -> RunProgress:
        run = self._store.run(owner, run_id)
        found = self._progress.get(run)
        if found is None:
            # Threads of open pages call this too; the first one creates the entry.
            read = RunProgress.of(self._store.state(owner, run_id))
            found = self._progress.setdefault(run, read)
        return found

    def finished(self, promise: Promise, value: Any) -> None:
        """Record a result; called while the promise still has its request."""
        if isinstance(value, ForwardBackwardOutput):
            if changes_model(promise):  # not of a forward pass, which is evaluation
                self._passed(promise, value)
        elif isinstance(value, OptimStepResponse):
            self._stepped(promise, value)

    def _begun(self, promise: Promise) -> RunProgress | None:
        """The progress of the promise's run; None if the request is counted already."""
        progress = self.progress(promise.owner, promise.scope)
        if promise.seq_id is not None:
            if promise.seq_id <= progress.seq:
                return None
            progress.seq = promise.seq_id
        return progress

    def _passed(self, promise: Promise, value: ForwardBackwardOutput) -> None:
        progress = self._begun(promise)
        if progress is None:
            return
        tokens = int(value.metrics.get("tokens:sum", 0))
        weight = float(tokens)
        if isinstance(promise.request, ForwardBackwardRequest):
            asked = promise.request.forward_backward_input
            weight = _weight(asked.data, tokens)
            progress.configure(_pass_config(asked))
        progress.passes += 1
        progress.tokens += tokens
        progress.step_tokens += tokens
        progress.loss += value.metrics.get("loss:sum", math.nan)
        progress.weight += weight
        for name, number in list(value.metrics.items())[:_MAX_OTHERS]:
            if name not in _OWN:
                self._other(progress, name, number, weight)
        self._store.add(promise.owner, promise.scope, (), progress.state())

    def _other(self, progress: RunProgress, name: str, number: float, weight: float) -> None:
        """Combine a metric of several passes by the reduction at the end of its name."""
        plain, _, reduction = name.rpartition(":")
        joined = progress.others.get(plain or name)
        match reduction if plain else "":
            case "sum" if joined:
                joined[0] += number
            case "max" if joined:
                joined[0] = max(joined[0], number)
            case "min" if joined:
                joined[0] = min(joined[0], number)
            case _ if joined:
                joined[0] = (joined[0] * joined[1] + number * weight) / ((joined[1] + weight) or 1)
                joined[1] += weight
            case _ if len(progress.others) < MAX_NAMES:  # more would not be written
                progress.others[plain or name] = [number, weight]

    def _stepped(self, promise: Promise, value: OptimStepResponse) -> None:
        progress = self._begun(promise)
        if progress is None:
            return
        now = self._clock()
        progress.steps += 1
        values: dict[str, float] = {}
        if progress.step_tokens:
            values["loss"] = progress.loss / progress.weight if progress.weight else progress.loss
            since = progress.stepped_at
            if since is not None and now > since:
                values["tokens_per_second"] = progress.step_tokens / (now - since)
        values |= {name: joined[0] for name, joined in progress.others.items()}
        values |= value.metrics or {}
        if isinstance(promise.request, OptimStepRequest):
            progress.configure(_optimizer_config(promise.request))
        points = [
            MetricPoint(name, progress.steps, progress.tokens, now, float(number))
            for name, number in values.items()
        ]
        progress.loss, progress.weight, progress.step_tokens = 0.0, 0.0, 0
        progress.others = {}
        progress.stepped_at = now
        self._store.add(promise.owner, promise.scope, points, progress.state())


def _weight(data: Iterable[Datum], tokens: int) -> float:
    """The sum of the weights of all examples; the number of tokens where there are none."""
    total, found = 0.0, False
    for datum in data:
        weights = datum.loss_fn_inputs.get("weights")
        if weights is not None:
            found = True
            total += float(np.abs(weights.to_numpy()).sum(dtype=np.float64))  # float32 may overflow
    return total if found else float(tokens)


def _pass_config(asked: ForwardBackwardInput) -> dict[str, Any]:
    return {
        "loss": str(asked.loss_fn),
        "examples": len(asked.data),
        **{f"loss.{name}": number for name, number in (asked.loss_fn_config or {}).items()},
    }


def _optimizer_config(request: OptimStepRequest) -> dict[str, Any]:
    chosen = request.optim_params.model_dump(mode="json", exclude_none=True)
    chosen.pop("type", None)
    return {f"optimizer.{name}": number for name, number in chosen.items()}
