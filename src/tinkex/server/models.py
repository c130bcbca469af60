"""Models in training: their requests are accepted, queued, and run one after another in the order of their numbers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from tinkex._wire.operations import Operation
from tinkex._wire.pass_parts import PassPart
from tinkex.engine.interface import Engines, Turn
from tinkex.errors import (
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
)
from tinkex.types import CreateModelRequest, LoadWeightsRequest

from .client_errors import client_error
from .damage import Lost
from .database import Database
from .file_threads import FileThreads
from .futures import Promise, Promises
from .inputs import lora_of
from .model import Ending, Model
from .model_work import ModelWork, answer_to, reader_of
from .quotas import Quota
from .replay import (
    DAMAGED_BEFORE,
    Plan,
    Sources,
    changes_model,
    creation_of,
    forward_mark,
    judge,
    plan,
)
from .scheduling import Candidate, Shares
from .sessions import Sessions
from .set_aside import SetAside
from .snapshots import Snapshots
from .tables import RunRow

__all__ = ["Models"]

#: Bytes of waiting requests that stay decoded in memory; others are read from the journal when it is their turn.
KEPT_BYTES: Final = 256 << 20


@dataclass(eq=False)
class _Other:
    """Work on an engine that is not a request of a model."""

    owner: str
    since: float
    #: Its turn, and the seconds that it is expected to use.
    begun: asyncio.Future[tuple[Turn, float]]


class Models:
    """All models that are loaded."""

    def __init__(
        self,
        database: Database,
        files: FileThreads,
        sessions: Sessions,
        promises: Promises,
        engine: Engines,
        work: ModelWork,
        quota: Quota,
        *,
        snapshots: Snapshots,
        set_aside: SetAside,
        snapshot_every: float,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._store = database, database.store
        self._files = files
        self._sessions = sessions
        self._promises = promises
        self._engine = engine
        self._work = work
        self._quota = quota
        self._snapshots = snapshots
        self._set_aside = set_aside
        self._snapshot_every = snapshot_every
        self._now = now
        self._clock = clock
        self._models: dict[str, Model] = {}
        #: Models with requests in their queue, and since when each waits.
        self._waiting: dict[Model, float] = {}
        #: Models with a request that is in the engine.
        self.running: set[Model] = set()
        #: When models were last sent a request, until it is in the database.
        self._asked_at: dict[str, datetime] = {}
        self._shares = Shares()
        #: Other work that waits or runs, by the id of the model that it loads, and the seconds that it last used.
        self._others: dict[str, _Other] = {}
        self._others_last = 0.0
        self._kept_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- accepting -----------------------------------------------------------------------------

    async def create(
        self,
        row: Operation[object],
        owner: str,
        request: CreateModelRequest | LoadWeightsRequest,
        body: bytes,
        reader: str | None = None,
    ) -> Promise:
        """Accept a request that creates a model: a new one, or from a checkpoint that its owner or `reader` may read."""
        assert request.session_id is not None
        await self._sessions.check_active(request.session_id, owner)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        known = self._made_before(row, model_id, request, body)
        if known is None:
            base_model = await self._work.base_model(reader or owner, request)
            run = await self._db(self._store.run, model_id)
            # The same request may have been accepted during these awaits.
            known = self._made_before(row, model_id, request, body)
            if known is None and run is not None:
                raise _unloaded(model_id, "model_seq_id")
            if known is None:
                self._quota.take(owner)
                model = self._models[model_id] = Model(
                    model_id, request.session_id, owner, base_model
                )
                extra = {"seed": secrets.randbits(31)} | _read_by(reader)
                try:
                    known = self._accept(row, model, 0, request, body, "json", extra)
                except Exception:  # a limit is reached, or the disk is full: there is no model
                    self._drop(model)
                    raise
        await self._promises.flushed()
        return known

    def _made_before(
        self,
        row: Operation[object],
        model_id: str,
        request: CreateModelRequest | LoadWeightsRequest,
        body: bytes,
    ) -> Promise | None:
        """The promise of an existing model; a new one if the first was evicted."""
        known = self._promises.duplicate(model_id, 0)
        model = self._models.get(model_id)
        if known is not None or model is None:
            return known
        promise = self._promises.accept(row, model.owner, model_id, 0, request, body, "json")
        try:
            model.check()
        except RequestFailedError as error:
            self._promises.fail(promise, error)
        else:
            self._promises.finish(promise, answer_to(request, model_id))
        return promise

    async def submit(
        self,
        row: Operation[object],
        owner: str,
        model_id: str,
        seq_id: int | None,
        request: object,
        body: bytes,
        media: str,
        *,
        reader: str | None = None,
        part: PassPart | None = None,
    ) -> Promise:
        """Accept a request for a model; a retry with the same number gets the first promise."""
        model = await self.find(model_id, owner)
        await self._sessions.check_active(model.session_id, owner)
        if self._models.get(model_id) is not model:  # unloaded during the awaits above
            raise _unloaded(model_id, "model_id")
        if seq_id == 0:  # in protobuf, zero means that there is none
            seq_id = None
        known = self._promises.duplicate(model_id, seq_id)
        if known is None:
            if seq_id is not None and model.line.knows(seq_id):
                raise InvalidInputError(
                    f"request {seq_id} of this model was done or refused before, and its result is not kept",
                    field="seq_id",
                )
            extra = forward_mark(request) | _read_by(reader)
            if part is not None:
                extra["part"] = str(part)
            known = self._accept(row, model, seq_id, request, body, media, extra)
        await self._promises.flushed()
        return known

    def refuse(self, owner: str, model_id: str, seq_id: int | None) -> None:
        """Note that a request was refused before it was accepted: later ones do not wait for it."""
        model = self._models.get(model_id)
        if model is None or model.owner != owner or not seq_id:
            return
        # A number in use stays with the request that used it first.
        if self._promises.duplicate(model_id, seq_id) is None and not model.line.knows(seq_id):
            self._promises.refuse(model_id, seq_id)
            model.line.refuse(seq_id)
            self._schedule()

    def _accept(
        self,
        row: Operation[object],
        model: Model,
        seq_id: int | None,
        request: object,
        body: bytes,
        media: str,
        extra: dict[str, object],
    ) -> Promise:
        promise = self._promises.accept(
            row, model.owner, model.model_id, seq_id, request, body, media, extra
        )
        if self._kept_bytes + len(body) > KEPT_BYTES:
            promise.request = None
        else:
            self._kept_bytes += len(body)
        self._asked_at[model.model_id] = model.asked_at = self._now()
        self._enqueue(model, promise)
        if model.corrupted:  # otherwise it would wait for numbers that never come
            self._fail_waiting(model)
        return promise

    def _enqueue(self, model: Model, promise: Promise) -> None:
        since = self._waiting.get(model, 0.0) if len(model.line) else self._clock()
        model.line.offer(promise.seq_id, promise, settles=not promise.operation.in_parts)
        self._arrive(model.owner)
        self._waiting[model] = since
        self._schedule()

    def _arrive(self, owner: str) -> None:
        busy = {model.owner for model in (*self._waiting, *self.running)}
        busy |= {other.owner for other in self._others.values()}
        if owner not in busy:
            self._shares.arrive(owner, busy)

    async def find(self, model_id: str, owner: str) -> Model:
        model = self._models.get(model_id)
        if model is not None and model.owner == owner:
            return model
        run = await self._db(self._store.run, model_id)
        if run is not None and run.owner == owner:
            raise _unloaded(model_id, "model_id")
        raise NotFoundError(f"There is no model {model_id!r:.200}.")

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def live(self, model_id: str) -> Model | None:
        """A model that is loaded or being created; None if there is none."""
        return self._models.get(model_id)

    @property
    def count(self) -> int:
        return len(self._models)

    @property
    def waiting(self) -> int:
        """The number of requests in all queues."""
        return sum(len(model.line) for model in self._waiting)

    # -- scheduling ----------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start the next requests, as many as the engine takes at a time."""
        if self._engine.stopping:
            return
        now = self._clock()
        ready: dict[str, tuple[Model | _Other, float]] = {
            model.model_id: (model, since)
            for model, since in self._waiting.items()
            if model not in self.running and model.line.ready(now)
        }
        for model_id, other in self._others.items():
            if not other.begun.done():
                ready[model_id] = (other, other.since)
        while ready:
            spots = self._engine.trainer.spots(list(ready))
            chosen = self._shares.choose(
                Candidate(model_id, work.owner, since, spot)
                for (model_id, (work, since)), spot in zip(ready.items(), spots, strict=True)
                if spot is not None
            )
            if chosen is None:
                break
            work, _ = ready.pop(chosen.model_id)
            if isinstance(work, _Other):
                turn = self._engine.trainer.take_turn(chosen.model_id, chosen.spot)
                self._shares.begin(work.owner, self._others_last)
                work.begun.set_result((turn, self._others_last))
                continue
            promise = work.line.take(now)
            assert promise is not None
            self.running.add(work)
            turn = self._engine.trainer.take_turn(work.model_id, chosen.spot)
            expected = work.usual_seconds.get(promise.operation.name, 0.0)
            self._shares.begin(work.owner, expected)
            self._start_task(self._serve(work, promise, turn, expected))
        self._wake_for_gaps(now)

    @asynccontextmanager
    async def turn(self, owner: str, model_id: str) -> AsyncIterator[None]:
        """Wait for a turn of an engine like a request of a model, for other work that loads a model of this id.

        What it uses counts towards the shares of its owner.
        """
        self._arrive(owner)
        begun = asyncio.get_running_loop().create_future()
        other = self._others[model_id] = _Other(owner, self._clock(), begun)
        try:
            self._schedule()
            await begun
            yield
        finally:
            del self._others[model_id]
            if begun.done() and not begun.cancelled():
                turn, expected = begun.result()
                self._others_last = used = turn.end()
                self._shares.end(other.owner, expected, used)
            self._schedule()

    def _start_task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake_for_gaps(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moments = [model.line.wakes_at(now) for model in self._waiting if model not in self.running]
        soonest = min((moment for moment in moments if moment is not None), default=None)
        if soonest is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, soonest - now) + 0.01, self._schedule)

    async def _serve(self, model: Model, promise: Promise, turn: Turn, expected: float) -> None:
        promise.started_at = self._promises.clock()
        try:
            await self._run(model, promise)
            if self._models.get(model.model_id) is not model and not promise.operation.ends_model:
                # Its session ended while this request ran, which may have loaded it.
                await self._engine.trainer.unload_model(model.model_id)
        finally:
            used = turn.end()
            self._shares.end(model.owner, expected, used)
            model.usual_seconds[promise.operation.name] = used
            self.running.discard(model)
            model.made.set()  # the first request is the one that creates it
            if model.corrupted:
                self._fail_waiting(model)
            if len(model.line):
                self._waiting[model] = self._clock()
            else:
                self._waiting.pop(model, None)
            self._schedule()

    async def _run(self, model: Model, promise: Promise) -> None:
        if promise.done:  # cancelled before its turn
            return
        if promise.request is not None:
            self._kept_bytes -= promise.place.length
        try:
            model.check()
            value = await self._work.do(model, promise)
            # The request must be on the disk before its result: a change without its request could not be replayed.
            # A flush takes about as long as a small step, so both run at once. If the flush fails, the step still
            # counts as done.
            with suppress(OSError):
                await self._promises.flushed(promise)
            if promise.operation.ends_model:
                await self._forget(model, "was unloaded")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            told = client_error(error, promise.operation.name, promise.request_id)
            if promise.operation.makes_model and not model.past.changes:
                model.ending = Ending(f"The model was never made: {told}")
            self._promises.fail(promise, told)
        else:
            self._applied(model, promise, value)

    def _applied(self, model: Model, promise: Promise, value: object) -> None:
        if not changes_model(promise):
            self._promises.finish(promise, value)
            return
        past = model.past
        past.changes += 1
        self._promises.finish(promise, value, past.changes)
        started, now = promise.started_at, self._promises.clock()
        past.add(promise, 0.0 if started is None else now - started)
        if not model.line.goes_back and past.wants_snapshot(promise, self._snapshot_every):
            past.saving, past.unsaved_seconds = True, 0.0
            snapshot = self._work.take_snapshot(model, past.changes, model.line.next_seq)
            self._start_task(snapshot)

    # -- endings -------------------------------------------------------------------------------

    async def close_session(self, session_id: str) -> None:
        """Unload the models of a session that has ended."""
        for model in list(self._models.values()):
            if model.session_id == session_id:
                await self._engine.trainer.unload_model(model.model_id)
                await self._forget(model, "was unloaded when its session ended")

    def _drop(self, model: Model) -> None:
        if self._models.pop(model.model_id, None) is not None:
            self._quota.release(model.owner)

    async def _forget(self, model: Model, why: str) -> None:
        self._drop(model)
        model.made.set()
        model.ending = Ending(f"The model {why}.")
        self._fail_waiting(model)
        await self._work.forget(model)

    def _fail_waiting(self, model: Model) -> None:
        """Fail the queued requests of a model that has ended."""
        self._waiting.pop(model, None)
        for promise in model.line.drain():
            if promise.request is not None:
                self._kept_bytes -= promise.place.length
            assert model.ending is not None
            self._promises.fail(promise, model.ending.error(promise.request_id))

    def needs(self, promise: Promise) -> bool:
        """Whether restoring a model would run this request again."""
        model = self._models.get(promise.scope)
        return model is not None and model.past.needs(promise)

    async def write_times(self) -> None:
        """Write to the database when models were last sent a request."""
        asked = dict(self._asked_at)
        await self._db(self._store.touch_runs, asked)
        for model_id, at in asked.items():
            if self._asked_at.get(model_id) is at:
                del self._asked_at[model_id]

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for other in self._others.values():
            other.begun.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- restart -------------------------------------------------------------------------------

    async def restore(
        self, promises: list[Promise], lost: Lost | None = None, undone: Container[str] = ()
    ) -> None:
        """Restore the models that existed before a restart; `promises` are in the order of their acceptance.

        `lost` are the records that the journal has lost, `undone` the ids of lost requests that were accepted and did
        not run.
        """
        lost = lost or Lost()
        requests: dict[str, list[Promise]] = {}
        for promise in promises:
            requests.setdefault(promise.scope, []).append(promise)
        saved = await self._files(self._snapshots.model_ids)
        damaged = await self._damaged_runs(lost)
        for model_id in dict.fromkeys([*saved, *requests, *damaged]):
            asked = requests.get(model_id, [])
            if not await self._restore_model(model_id, asked, lost, undone):
                for promise in asked:
                    if not promise.done:
                        gone = NotFoundError(f"There is no model {model_id!r}.")
                        self._promises.fail(promise, gone)
        for model_id in await self._files(self._snapshots.all_ids):
            if model_id not in self._models:
                await self._clear_snapshots(model_id, known=model_id in requests)
        self._schedule()

    async def _clear_snapshots(self, model_id: str, *, known: bool) -> None:
        """Delete the snapshots of a model that has ended; keep those of an unknown model in another place."""
        if known or await self._db(self._store.run, model_id) is not None:
            await self._files(self._snapshots.forget, model_id)
        else:
            why = "neither the database nor the journal knows this run"
            await self._files(self._set_aside.move, self._snapshots.of_model(model_id), why)

    async def _damaged_runs(self, lost: Lost) -> list[str]:
        """Corrupted runs, also those without requests in the journal: their clients must get the error."""
        damaged = [run.run_id for run in await self._db(self._store.corrupted_runs)]
        if lost:
            for session in await self._db(self._store.active_sessions):
                runs = await self._db(self._store.runs_of_session, session.session_id)
                damaged += [run.run_id for run in runs if lost.names(run.run_id)]
        return damaged

    async def _restore_model(
        self, model_id: str, requests: list[Promise], lost: Lost, undone: Container[str]
    ) -> bool:
        """Restore one model and its queue; False if it has ended or was never made."""
        run = await self._db(self._store.run, model_id)
        verdict = judge(await self._sources(model_id, run, requests, lost))
        if not verdict.lives:
            return False
        model = await self._model_of(model_id, run, requests)
        if model is None:
            return False
        model.made.set()
        self._models[model_id] = model
        self._quota.add(model.owner)
        decided = plan(
            model_id,
            verdict.snapshot,
            requests,
            forgotten=self._promises.lost.get(model_id, 0),
            lost=lost,
            undone=undone,
        )
        self._follow(model, decided)
        if run is not None and run.corrupted:
            model.ending = Ending.by_damage(verdict.corrupted or DAMAGED_BEFORE)
        elif why := verdict.corrupted or decided.corrupted:
            await self._work.mark_corrupted(model, why)
        if model.corrupted:
            self._fail_waiting(model)
        return True

    async def _sources(
        self, model_id: str, run: RunRow | None, requests: Sequence[Promise], lost: Lost
    ) -> Sources:
        owner = run.owner if run is not None else requests[0].owner if requests else ""
        return Sources(
            requests,
            await self._files(self._snapshots.find, model_id),
            run is not None,
            run is not None and run.corrupted,
            await self._is_active(_session_of(model_id), owner),
            lost.may_concern(model_id) if requests else lost.names(model_id),
        )

    async def _model_of(
        self, model_id: str, run: RunRow | None, requests: Sequence[Promise]
    ) -> Model | None:
        """A model before any of its requests is replayed; None if the request that creates it is now refused."""
        session_id = _session_of(model_id)
        if run is not None:
            return Model(model_id, session_id, run.owner, run.base_model, lora_of(run.lora))
        promise = creation_of(requests)
        assert (
            promise is not None
        )  # a model without a row is restored only if its journal has this request
        try:
            request = self._promises.request_of(promise)
            base_model = await self._work.base_model(reader_of(promise), request)
        except TinkerError as error:
            if not promise.done:
                self._promises.fail(promise, error)
            return None
        return Model(model_id, session_id, promise.owner, base_model)

    def _follow(self, model: Model, decided: Plan) -> None:
        """Put a model into the state that was decided."""
        model.past, model.line.next_seq = decided.past, decided.next_seq
        for promise in decided.again:
            self._promises.reopen(promise)
        self._work.usage_counted.update(decided.again)
        model.line.run_again(decided.again)
        for promise in decided.waiting:
            model.line.offer(promise.seq_id, promise)
        for promise in decided.over:
            why = "The request was done before the service was restarted; its result is lost."
            over = RequestFailedError(why, promise.request_id, RequestErrorCategory.Server)
            self._promises.fail(promise, over)
        for seq_id in self._promises.refused.get(model.model_id, ()):
            model.line.refuse(seq_id)
        if len(model.line):
            self._waiting[model] = 0.0

    async def _is_active(self, session_id: str, owner: str) -> bool:
        try:
            await self._sessions.check_active(session_id, owner)
        except TinkerError:
            return False
        return True


def _session_of(model_id: str) -> str:
    return model_id.rpartition(":train:")[0]


def _unloaded(model_id: str, field: str) -> InvalidInputError:
    return InvalidInputError(
        f"model {model_id!r:.200} has been unloaded; continue from one of its checkpoints",
        field=field,
    )


def _read_by(reader: str | None) -> dict[str, object]:
    return {} if reader is None else {"reader": reader}
