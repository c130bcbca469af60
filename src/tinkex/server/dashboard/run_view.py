"""A run as the dashboard shows it: its facts from the database, its state from the queue, its progress from the metrics.

Events describe the same runs again and again. What the database knows of a loaded run is kept between them, and read again
only after a checkpoint was added or deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import NotFoundError

from ..checkpoints import checkpoint_of
from ..futures import Promise
from ..inputs import lora_of
from ..model import Model
from ..tables import RunRow, SessionRow
from .growth import json_number
from .samples import SampleLog
from .store import RunMetrics
from .thinning import Records

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["RunViews", "series", "short"]

#: A run that did something this many seconds ago is still shown as training: steps have pauses between them.
RECENT: Final = 10.0
_SPARK_WIDTH: Final = 60
_SINGLE: Final = np.finfo(np.float32)
#: Requests of a queue that are listed; the others are only counted.
_SHOWN_REQUESTS: Final = 20


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the database knows of a run."""

    row: RunRow
    session: SessionRow | None
    checkpoints: int
    checkpoint_bytes: int


class RunViews:
    """The runs of a service, for their owners."""

    def __init__(self, service: Service) -> None:
        self._service = service
        #: Of opened runs, and of how many points.
        self._sparks: WeakKeyDictionary[RunMetrics, tuple[int, NDArray[Any]]] = WeakKeyDictionary()
        self._facts: dict[str, _Facts] = {}  # of loaded runs that events described
        self._changes = 0  # of checkpoints
        service.checkpoints.on_change.append(self._checkpoint_changed)

    def _checkpoint_changed(self, run_id: str) -> None:
        self._changes += 1
        self._facts.pop(run_id, None)

    async def owned(self, owner: str, run_id: str) -> RunRow:
        database = self._service.database
        row = await database(database.store.run, run_id)
        if row is None or row.owner != owner:
            raise NotFoundError(f"There is no training run {run_id!r:.200}.")
        return row

    async def page(self, owner: str, limit: int, offset: int) -> dict[str, Any]:
        """Runs of an owner, most recently used first."""
        database = self._service.database
        await self._service.models.write_times()
        rows, total = await database(database.store.runs, owner, limit=limit, offset=offset)
        return {"runs": await self._lines(await self._facts_of(rows)), "total": total}

    async def some(self, owner: str, run_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Those of these runs that exist and belong to the owner, for an event."""
        # Nothing tells when facts of a run that is not loaded change, such as its last request.
        self._facts = {name: each for name, each in self._facts.items() if self._model(name)}
        kept = [self._facts[run_id] for run_id in run_ids if run_id in self._facts]
        facts = [each for each in kept if each.row.owner == owner]
        missing = [run_id for run_id in run_ids if run_id not in self._facts]
        if missing:
            facts += await self._read(owner, missing)
        return await self._lines(facts, rough=True)

    async def _read(self, owner: str, run_ids: Sequence[str]) -> list[_Facts]:
        """Read facts, and keep them unless a checkpoint changed meanwhile."""
        database = self._service.database
        changes = self._changes
        rows = await database(database.store.runs_by_id, owner, run_ids)
        found = await self._facts_of(rows)
        if changes == self._changes:
            self._facts |= {each.row.run_id: each for each in found}
        return found

    async def _facts_of(self, rows: Sequence[RunRow]) -> list[_Facts]:
        database = self._service.database
        sessions, sizes = await asyncio.gather(  # one visit to the database
            database(database.store.sessions_by_id, {row.session_id for row in rows}),
            database(database.store.checkpoint_totals, [row.run_id for row in rows]),
        )
        return [
            _Facts(row, sessions.get(row.session_id), *sizes.get(row.run_id, (0, 0)))
            for row in rows
        ]

    async def _lines(self, facts: Sequence[_Facts], *, rough: bool = False) -> list[dict[str, Any]]:
        moments = [self._moment(each.row) for each in facts]
        if not facts:
            return []

        def lines() -> list[dict[str, Any]]:
            return [
                self._line(each, rough and moment["state"]["kind"] == "training") | moment
                for each, moment in zip(facts, moments, strict=True)
            ]

        return await self._service.reading(facts[0].row.owner, lines)  # all are of one owner

    def _line(self, facts: _Facts, rough: bool) -> dict[str, Any]:
        row, session = facts.row, facts.session
        metrics = self._service.run_metrics.run(row.owner, row.run_id)
        progress = self._service.recorder.progress(row.owner, row.run_id)
        last = metrics.last("loss")
        return {
            "id": row.run_id,
            "name": _name(row, session),
            "base_model": row.base_model,
            "rank": lora_of(row.lora).rank,
            "owner": row.owner,
            "tags": [str(tag) for tag in (session.tags if session else ())],
            "created_at": _seconds(row.created_at),
            "steps": progress.steps,
            "tokens": progress.tokens,
            "loss": None if last is None else json_number(float(last["value"])),
            "spark": self._spark(metrics, last, rough),
            "checkpoints": facts.checkpoints,
            "bytes": facts.checkpoint_bytes + metrics.bytes + SampleLog(metrics.directory).size,
        }

    def _moment(self, row: RunRow) -> dict[str, Any]:
        """What only the event loop may read, because the queues change there."""
        model = self._model(row.run_id)
        asked_at = None if model is None else model.asked_at
        return {
            "state": self.state(row),
            "queued": 0 if model is None else len(model.line),
            "active_at": _seconds(asked_at or row.last_request_at),
        }

    def _spark(self, metrics: RunMetrics, last: Records | None, rough: bool) -> NDArray[Any]:
        """The curve of the loss, a few pixels high.

        A rough one, of a run that goes on, has its last step, but may lack those before that it has no pixel for.
        """
        count = metrics.count("loss")
        known = self._sparks.get(metrics)
        if known is not None:
            before, spark = known
            if before == count:
                return spark
            if rough and last is not None and before < count < before * (1 + 1 / _SPARK_WIDTH):
                return short(np.append(spark[:-1].astype(np.float64), last["value"]))
        found = metrics.read("loss", "step", None, None, _SPARK_WIDTH)
        spark = short(np.empty(0) if found is None else series(found[0], "step")["y"])
        self._sparks[metrics] = count, spark
        return spark

    def forget(self, run_id: str) -> None:
        self._facts.pop(run_id, None)

    # -- one run -------------------------------------------------------------------------------

    async def whole(self, owner: str, run_id: str) -> dict[str, Any]:
        row = await self.owned(owner, run_id)
        lines = await self._lines(await self._facts_of([row]))
        database = self._service.database
        session = await database(database.store.session, row.session_id)
        metrics = self._service.run_metrics.run(owner, run_id)
        return {
            **lines[0],
            "config": self._config(row, session),
            "metrics": metrics.names,
            "queue": self._queue(run_id),
        }

    async def checkpoints(self, owner: str, run_id: str) -> list[dict[str, Any]]:
        await self.owned(owner, run_id)
        database = self._service.database
        rows = await database(database.store.checkpoints_of_run, run_id)
        return [
            {
                "id": shown.checkpoint_id,
                "kind": row.kind,
                "name": row.name,
                "path": shown.tinker_path,
                "bytes": row.size_bytes,
                "public": row.public,
                "created_at": _seconds(row.created_at),
                "expires_at": None if row.expires_at is None else _seconds(row.expires_at),
            }
            for row in reversed(rows)
            for shown in (checkpoint_of(row),)
        ]

    def _config(self, row: RunRow, session: SessionRow | None) -> dict[str, Any]:
        """The settings of a run as they are now, by name."""
        progress = self._service.recorder.progress(row.owner, row.run_id)
        lora = {f"lora.{name}": value for name, value in row.lora.items() if value is not None}
        user = {f"run.{name}": value for name, value in (row.user_metadata or {}).items()}
        known: dict[str, Any] = {"base_model": row.base_model, **lora, **progress.config, **user}
        if session is not None:
            known |= {f"session.{name}": v for name, v in (session.user_metadata or {}).items()}
            known["project"] = session.project_id
            known["sdk_version"] = session.sdk_version
        return {name: _plain(value) for name, value in known.items() if value is not None}

    def _model(self, run_id: str) -> Model | None:
        return self._service.models.live(run_id)

    def state(self, row: RunRow) -> dict[str, Any]:
        """What a run is doing (training, waiting, idle, ended or failed), with a short explanation."""
        model = self._model(row.run_id)
        ending = None if model is None else model.ending
        if row.corrupted or ending is not None:
            return {"kind": "failed", "about": "" if ending is None else ending.message}
        if model is None:
            return {"kind": "ended", "about": "Its session has ended; its checkpoints are kept."}
        if model in self._service.models.running:
            return {"kind": "training", "about": ""}
        if len(model.line):
            return {"kind": "waiting", "about": self._awaited(model)}
        done = self._service.recorder.progress(row.owner, row.run_id).stepped_at
        if done is not None and self._service.promises.clock() - done < RECENT:
            return {"kind": "training", "about": ""}
        return {"kind": "idle", "about": "It waits for requests of its client."}

    def _awaited(self, model: Model) -> str:
        if model.line.missing is not None:
            return f"for request {model.line.missing} of its client, which has not arrived yet"
        others = len(self._service.models.running - {model})
        return f"for the engine, which works on {others} other run{'s' if others != 1 else ''}"

    def _queue(self, run_id: str) -> dict[str, Any]:
        model = self._model(run_id)
        if model is None:
            return {"requests": [], "total": 0}
        waiting = model.line.waiting()
        shown: list[Promise] = waiting[:_SHOWN_REQUESTS]
        return {
            "total": len(waiting),
            "requests": [
                {
                    "operation": promise.operation.name,
                    "number": promise.seq_id,
                    "accepted_at": promise.accepted_at,
                    "bytes": promise.place.length,
                }
                for promise in shown
            ],
        }


def series(buckets: Any, axis: str) -> dict[str, Any]:
    """Buckets as the lists of a plot: x, the mean, the lowest and the highest value."""
    finite = buckets["finite"]
    some = finite > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(some, buckets["total"] / finite, np.nan)
        # A sum of huge values may overflow although their mean does not.
        middle = buckets["low"] / 2 + buckets["high"] / 2
        mean = np.where(np.isfinite(mean) | ~some, mean, middle)
    return {
        "x": buckets[f"{axis}_to"],
        "y": mean,
        "low": np.where(some, buckets["low"], np.nan),
        "high": np.where(some, buckets["high"], np.nan),
    }


def short(values: NDArray[np.float64]) -> NDArray[Any]:
    """In single precision, which is half as long as JSON, unless a value is outside of its range."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    fits = not len(sizes) or (sizes.max() <= _SINGLE.max and sizes.min() >= _SINGLE.tiny)
    return values.astype(np.float32) if fits else np.ascontiguousarray(values)


def _name(row: RunRow, session: SessionRow | None) -> str:
    named = (row.user_metadata or {}).get("name")
    if isinstance(named, str) and named:
        return named[:200]
    return ((session.display_name if session else None) or row.run_id)[:200]


def _seconds(moment: datetime) -> float:
    return moment.timestamp()


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
