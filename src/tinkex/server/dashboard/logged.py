"""Metrics and samples that a training loop reports about its own run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tinkex._wire import json_codec
from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.types import LogEntry, LogRequest, LogResponse

from .deletion import deleted_meanwhile
from .samples import MAX_ALTERNATIVES, SampleLog
from .store import MAX_NAMES, MetricPoint, check_name

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["receive"]

#: Values of metrics in one report: the event loop goes through them.
MAX_POINTS = 50_000
#: Estimated bytes of a point with its share of the buckets.
_POINT_BYTES = 40


async def receive(service: Service, owner: str, run_id: str, request: LogRequest) -> LogResponse:
    """Check a report as a whole, then keep it."""
    store = service.run_metrics
    count = sum(len(entry.metrics) for entry in request.entries)
    if count > MAX_POINTS:
        raise InvalidInputError(
            f"a report has at most {MAX_POINTS} values of metrics, this one has {count}; send several",
            field="entries.metrics",
        )
    await store.make_room(run_id, count)
    now = service.promises.clock()
    tokens = float(service.recorder.progress(owner, run_id).tokens)
    points = [
        MetricPoint(name, entry.step, tokens, now if entry.time is None else entry.time, value)
        for entry in request.entries
        for name, value in entry.metrics.items()
    ]
    names: set[str] = set()
    for number, entry in enumerate(request.entries):
        for name in entry.metrics.keys() - names:
            check_name(name, f"entries.{number}.metrics")
        names |= entry.metrics.keys()
    known = set(store.run(owner, run_id).names)
    if len(names | known) > MAX_NAMES:
        raise InvalidInputError(
            f"a run has at most {MAX_NAMES} different metrics, this one has {len(known)}",
            field="entries.metrics",
        )
    store.check_room(owner, _POINT_BYTES * len(points))
    if points:
        store.add(owner, run_id, points)
    samples = list(_samples(request.entries, now))
    if samples:
        service.captured.leave_to_client(store.run(owner, run_id))
        size = sum(len(str(sample.get("text") or "")) for _, _, sample in samples)
        store.check_room(owner, size)
        log = SampleLog(store.directory(owner, run_id))
        store.samples_stored(owner, run_id, await store.in_thread(log.append, samples))
    if await deleted_meanwhile(service, owner, run_id):
        raise NotFoundError(f"There is no training run {run_id!r:.200}.")
    return LogResponse(metrics=len(points), samples=len(samples))


def _samples(entries: list[LogEntry], now: float) -> Iterator[tuple[float, float, dict[str, Any]]]:
    for number, entry in enumerate(entries):
        for place, sample in enumerate(entry.samples):
            if sample.text is None and sample.tokens is None:
                raise InvalidInputError(
                    "give its text or its tokens", field=f"entries.{number}.samples.{place}.text"
                )
            if sample.logprobs is not None and len(sample.logprobs) != len(sample.tokens or ()):
                raise InvalidInputError(
                    "must have one number for each of tokens",
                    field=f"entries.{number}.samples.{place}.logprobs",
                )
            most = max(map(len, sample.alternatives or ()), default=0)
            if most > MAX_ALTERNATIVES:
                raise InvalidInputError(
                    f"at most {MAX_ALTERNATIVES} of a token are kept, one has {most}",
                    field=f"entries.{number}.samples.{place}.alternatives",
                )
            fields = json_codec.parse(json_codec.encode(sample))
            yield entry.step, now if entry.time is None else entry.time, fields
