"""Keeps a few samples of each step of runs whose client logs none, so that the dashboard has samples to show.

A loop that logs its own samples knows more about them, such as rewards; from then on none are captured for its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from tinkex.errors import InvalidPathError
from tinkex.types import ParsedCheckpointTinkerPath, SampledSequence, SampleRequest, SampleResponse

from ..futures import Promise
from .deletion import deleted_meanwhile
from .samples import SHOWN_ALTERNATIVES, SHOWN_TOKENS, SampleLog
from .store import RunMetrics

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["Capture"]

#: Sequences kept of each run between two optimizer steps.
KEPT: Final = 8


class Capture:
    """Watches the finished samples of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        #: Of opened runs: the step, and how many samples of it are kept.
        self._kept: WeakKeyDictionary[RunMetrics, tuple[int, int]] = WeakKeyDictionary()
        #: Opened runs whose clients log samples.
        self._logged: WeakSet[RunMetrics] = WeakSet()
        self._writing: set[asyncio.Task[None]] = set()

    def leave_to_client(self, run: RunMetrics) -> None:
        """Capture no more samples of this run: its client logs them itself."""
        self._logged.add(run)

    def finished(self, promise: Promise, value: Any) -> None:
        """Keep a result if it is one of the first of its step; cheap for all others."""
        if not isinstance(value, SampleResponse) or not isinstance(promise.request, SampleRequest):
            return
        run_id = self._run_of(promise)
        if run_id is None:
            return
        run = self._service.run_metrics.run(promise.owner, run_id)
        if run in self._logged:
            return
        step = self._service.recorder.progress(promise.owner, run_id).steps
        known_step, number = self._kept.get(run, (step, 0))
        room = KEPT - (number if known_step == step else 0)
        if room <= 0:
            return
        sequences = list(value.sequences)[:room]
        self._kept[run] = step, KEPT - room + len(sequences)
        samples = list(_samples(promise.request, sequences, promise.request_id))
        task = asyncio.ensure_future(self._write(promise.owner, run_id, step, samples))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def flush(self) -> None:
        """Wait until everything so far can be read."""
        if self._writing:
            await asyncio.wait(self._writing)

    def _run_of(self, promise: Promise) -> str | None:
        """The run whose weights were sampled; None if that is not known."""
        row = self._service.samplers.known(promise.scope)
        if row is None or not row.has_weights:
            return None
        if row.model_path is not None:
            try:
                return ParsedCheckpointTinkerPath.from_tinker_path(row.model_path).training_run_id
            except InvalidPathError:
                return None
        # Made from a model's current weights: known if its session has one model.
        models = [each for each in self._service.models if each.session_id == row.session_id]
        return models[0].model_id if len(models) == 1 else None

    async def _write(
        self, owner: str, run_id: str, step: int, samples: list[dict[str, Any]]
    ) -> None:
        store, database = self._service.run_metrics, self._service.database
        run = await database(database.store.run, run_id)
        if run is None or run.owner != owner:  # published weights of another key
            return
        now = self._service.promises.clock()
        log = SampleLog(store.directory(owner, run_id))
        entries = [(float(step), now, sample) for sample in samples]
        if store.has_room(owner, sum(8 * len(sample["tokens"]) for sample in samples)):
            store.samples_stored(owner, run_id, await store.in_thread(log.append, entries))
            await deleted_meanwhile(self._service, owner, run_id)


def _samples(
    request: SampleRequest, sequences: list[SampledSequence], request_id: str
) -> Iterator[dict[str, Any]]:
    prompt = request.prompt.to_ints()[:SHOWN_TOKENS]
    for sequence in sequences:
        sample: dict[str, Any] = {
            "prompt_tokens": prompt,
            "tokens": list(sequence.tokens),
            "logprobs": list(sequence.logprobs or ()) or None,
            "stop_reason": sequence.stop_reason,
            "group": request_id[:8] if len(sequences) > 1 else None,
        }
        if sequence.topk_logprobs:
            sample["alternatives"] = [
                list(row or ())[:SHOWN_ALTERNATIVES] for row in sequence.topk_logprobs
            ]
        yield {name: value for name, value in sample.items() if value is not None}
