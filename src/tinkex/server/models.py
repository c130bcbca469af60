"""Models in training: their requests are accepted, stand in line, and run by number, one after another."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Container, Coroutine
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from tinkex._wire.operations import Operation
from tinkex._wire.pass_parts import PassPart
from tinkex.engine.interface import Engines, Turn
from tinkex.errors import (
    DecodeError,
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
)
from tinkex.types import CreateModelRequest, LoadWeightsRequest

from .damage import Lost
from .futures import Promise, Promises
from .inputs import lora_of
from .model_work import (
    Model,
    ModelWork,
    answer_to,
    change_of,
    changes_model,
    completes_pass,
    forward_mark,
    reader_of,
)
from .quotas import Quota
from .scheduling import Candidate, Shares
from .sessions import Sessions
from .set_aside import SetAside
from .snapshots import Snapshots
from .store import Database

__all__ = ["Model", "Models"]

#: Without an optimizer step, a snapshot is written after so many times the usual interval, with the gradients.
ACCUMULATION_FACTOR: Final = 2
#: Bodies of waiting requests that are kept decoded; others are read from the journal when it is their turn.
KEPT_BYTES: Final = 256 << 20


class Models:
    """All models that live."""

    def __init__(
        self,
        database: Database,
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
        self._waiting: set[Model] = set()
        self._shares = Shares()
        self._kept_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- accepting -----------------------------------------------------------------------------

    async def create(
        self,
        row: Operation[Any],
        owner: str,
        request: CreateModelRequest | LoadWeightsRequest,
        body: bytes,
        reader: str | None = None,
    ) -> Promise:
        """Accept a request that makes a model: afresh, or from a checkpoint that its owner or `reader` may read."""
        assert request.session_id is not None
        await self._sessions.check_active(request.session_id, owner)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        known = self._made_before(row, model_id, request, body)
        if known is None:
            base_model = await self._work.base_model(reader or owner, request)
            run = await self._db(self._store.run, model_id)
            # Another may have come meanwhile.
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
        row: Operation[Any],
        model_id: str,
        request: CreateModelRequest | LoadWeightsRequest,
        body: bytes,
    ) -> Promise | None:
        """The promise of a model that is there; it lives longer than the first one may be kept."""
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
        row: Operation[Any],
        owner: str,
        model_id: str,
        seq_id: int | None,
        request: Any,
        body: bytes,
        media: str,
        *,
        reader: str | None = None,
        part: PassPart | None = None,
    ) -> Promise:
        """Accept a request for a model; repeating a number gives the first promise again."""
        model = await self.find(model_id, owner)
        await self._sessions.check_active(model.session_id, owner)
        if seq_id == 0:  # how protobuf says that there is none
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
        """A request was turned away at the door; those after it need not wait for it."""
        model = self._models.get(model_id)
        if model is None or model.owner != owner or not seq_id:
            return
        # A number that is taken stays with the request that took it.
        if self._promises.duplicate(model_id, seq_id) is None and not model.line.knows(seq_id):
            self._promises.refuse(model_id, seq_id)
            model.line.refuse(seq_id)
            self._schedule()

    def _accept(
        self,
        row: Operation[Any],
        model: Model,
        seq_id: int | None,
        request: Any,
        body: bytes,
        media: str,
        extra: dict[str, Any],
    ) -> Promise:
        promise = self._promises.accept(
            row, model.owner, model.model_id, seq_id, request, body, media, extra
        )
        if self._kept_bytes + len(body) > KEPT_BYTES:
            promise.request = None
        else:
            self._kept_bytes += len(body)
        model.last_request_at = self._now()
        self._enqueue(model, promise)
        if model.corrupted:  # or it would wait for numbers that will never come
            self._fail_waiting(model)
        return promise

    def _enqueue(self, model: Model, promise: Promise) -> None:
        if not len(model.line):
            model.waiting_since = self._clock()
        model.line.offer(promise.seq_id, promise, settles=not promise.operation.in_parts)
        if model not in self._waiting:
            if all(other.owner != model.owner for other in self._waiting):
                self._shares.arrive(model.owner)
            self._waiting.add(model)
        self._schedule()

    async def find(self, model_id: str, owner: str) -> Model:
        model = self._models.get(model_id)
        if model is not None and model.owner == owner:
            return model
        run = await self._db(self._store.run, model_id)
        if run is not None and run.owner == owner:
            raise _unloaded(model_id, "model_id")
        raise NotFoundError(f"There is no model {model_id!r:.200}.")

    def __iter__(self) -> Any:
        return iter(list(self._models.values()))

    def live(self, model_id: str) -> Model | None:
        """A model that is loaded or being made."""
        return self._models.get(model_id)

    @property
    def count(self) -> int:
        return len(self._models)

    @property
    def waiting(self) -> int:
        """How many requests are in line."""
        return sum(len(model.line) for model in self._waiting)

    # -- scheduling ----------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start what can start."""
        if self._engine.stopping:
            return
        now = self._clock()
        while True:
            ready = [
                Candidate(model.model_id, model.owner, model.waiting_since)
                for model in self._waiting
                if not model.running
                and model.line.ready(now)
                and self._engine.trainer.has_room(model.model_id)
            ]
            chosen = self._shares.choose(ready)
            if chosen is None:
                break
            model = self._models[chosen.model_id]
            promise = model.line.take(now)
            assert promise is not None
            model.running = True
            turn = self._engine.trainer.take_turn(model.model_id)
            self._start_task(self._serve(model, promise, turn))
        self._wake_for_gaps(now)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake_for_gaps(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moments = [model.line.wakes_at(now) for model in self._waiting if not model.running]
        soonest = min((moment for moment in moments if moment is not None), default=None)
        if soonest is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, soonest - now) + 0.01, self._schedule)

    async def _serve(self, model: Model, promise: Promise, turn: Turn) -> None:
        started = self._clock()
        promise.started_at = self._promises.clock()
        try:
            await self._run(model, promise)
        finally:
            self._shares.serve(model.owner, self._clock() - started + turn.helped_seconds)
            turn.end()
            model.running = False
            model.made.set()  # or never will be: the first request is the one that makes it
            model.waiting_since = self._clock()
            if model.corrupted:
                self._fail_waiting(model)
            if not len(model.line):
                self._waiting.discard(model)
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
            if promise.operation.makes_model and not model.changes:
                model.failure = f"The model was never made: {error}"
            self._promises.fail(promise, error)
        else:
            self._applied(model, promise, value)

    def _applied(self, model: Model, promise: Promise, value: Any) -> None:
        if not changes_model(promise):
            self._promises.finish(promise, value)
            return
        model.changes += 1
        self._promises.finish(promise, value, model.changes)
        model.history.append(promise)
        if promise.started_at is not None:
            model.unsaved_seconds += self._promises.clock() - promise.started_at
        if self._wants_snapshot(model, promise):
            model.saving, model.unsaved_seconds = True, 0.0
            snapshot = self._work.take_snapshot(model, model.changes, model.line.next_seq)
            self._start_task(snapshot)

    def _wants_snapshot(self, model: Model, done: Promise) -> bool:
        """Whether to write a snapshot now that a request has changed a model.

        The best moment is after an optimizer step, when there are no gradients to write. A client that accumulates
        gradients for long gets one in between, because the journal grows until the next snapshot.
        """
        if model.saving or model.line.goes_back:
            return False
        small = done.operation.uses_gradients
        due = self._snapshot_every * (1 if small else ACCUMULATION_FACTOR)
        return model.unsaved_seconds >= due and (small or completes_pass(done))

    # -- endings -------------------------------------------------------------------------------

    async def close_session(self, session_id: str) -> None:
        """Let go of the models of a session that has ended."""
        for model in list(self._models.values()):
            if model.session_id == session_id:
                await self._engine.trainer.unload_model(model.model_id)
                await self._forget(model, "was unloaded when its session ended")

    def _drop(self, model: Model) -> None:
        if self._models.pop(model.model_id, None) is not None:
            self._quota.release(model.owner)

    def _keep(self, model: Model) -> None:
        """Take up a model of before a restart."""
        self._models[model.model_id] = model
        self._quota.add(model.owner)

    async def _forget(self, model: Model, why: str) -> None:
        self._drop(model)
        model.made.set()
        model.failure = f"The model {why}."
        self._fail_waiting(model)
        await self._work.forget(model)

    def _fail_waiting(self, model: Model) -> None:
        """Answer everything in line of a model that can do nothing any more."""
        self._waiting.discard(model)
        for promise in model.line.drain():
            if promise.request is not None:
                self._kept_bytes -= promise.place.length
            assert model.failure is not None
            error = RequestFailedError(model.failure, promise.request_id, model.whose_failure)
            self._promises.fail(promise, error)

    def needs(self, promise: Promise) -> bool:
        """Whether a request may have to be run again."""
        model = self._models.get(promise.scope)
        if model is None or promise.result is None or promise.result.change is None:
            return False
        return model.snapshot is None or promise.result.change > model.snapshot.changes

    async def write_times(self) -> None:
        """Put down when models were last asked for something."""
        asked = [(model, at) for model in self if (at := model.last_request_at) is not None]
        await self._db(self._store.touch_runs, {model.model_id: at for model, at in asked})
        for model, at in asked:
            if model.last_request_at is at:
                model.last_request_at = None

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- restart -------------------------------------------------------------------------------

    async def restore(
        self, promises: list[Promise], lost: Lost | None = None, undone: Container[str] = ()
    ) -> None:
        """Restore the models that existed before a restart; `promises` are in the order of their acceptance.

        A model that needs a record which is `lost` is corrupted: it is never restored as if the request had not been
        made. `undone` are the ids of lost requests that were accepted and not done.
        """
        lost = lost or Lost()
        unloaded = {
            promise.scope
            for promise in promises
            if promise.operation.ends_model and _succeeded(promise)
        }
        for model_id in await self._db(lambda: list(self._snapshots.model_ids())):
            if model_id not in unloaded:
                await self._revive(model_id)
        for promise in promises:
            model = self._models.get(promise.scope)
            if model is None and promise.scope not in unloaded:
                model = await self._revive_from(promise)
                if model is None and lost.may_concern(promise.scope):
                    model = await self._revive_run(promise.scope)
            if model is None:
                if not promise.done:
                    gone = NotFoundError(f"There is no model {promise.scope!r}.")
                    self._promises.fail(promise, gone)
            elif promise.result is None:
                model.line.offer(promise.seq_id, promise)
                self._waiting.add(model)
            else:
                if promise.seq_id is not None:  # those before it were done or refused too
                    model.line.next_seq = max(model.line.next_seq, promise.seq_id + 1)
                if self.needs(promise):
                    model.history.append(promise)
        await self._revive_concerned(lost, unloaded)
        asked_for = {promise.scope for promise in promises}
        await self._db(
            self._snapshots.forget_others,
            set(self._models),
            lambda model_id: model_id in asked_for or self._store.run(model_id) is not None,
            self._set_aside.move,
        )
        for model in self._models.values():
            model.made.set()
            model.history.sort(key=change_of)
            for promise in self._go_back(model, model.line.drop_done()):
                # Later requests ran, so this one did too; replaying it would run it twice.
                why = "The request was done before the service was restarted; its result is lost."
                over = RequestFailedError(why, promise.request_id, RequestErrorCategory.Server)
                self._promises.fail(promise, over)
            for seq_id in self._promises.refused.get(model.model_id, ()):
                model.line.refuse(seq_id)
            forgotten = self._promises.lost.get(model.model_id, 0)
            model.changes = max([model.changes, forgotten, *map(change_of, model.history)])
            await self._check_is_whole(model, lost, undone)
        self._schedule()

    async def _check_is_whole(self, model: Model, lost: Lost, undone: Container[str]) -> None:
        needed = {promise.request_id for promise in model.history}
        why = lost.reason(model.model_id, lambda name: name in needed or name in undone)
        if why is not None and not model.corrupted:
            await self._work.call_corrupted(model, DecodeError(why))
        if model.corrupted:
            self._fail_waiting(model)

    async def _revive_concerned(self, lost: Lost, unloaded: Container[str]) -> None:
        """Take up runs of which the journal has nothing any more, so that they are not said to be unloaded."""
        concerned = [run.run_id for run in await self._db(self._store.corrupted_runs)]
        if lost:
            for session in await self._db(self._store.active_sessions):
                runs = await self._db(self._store.runs_of_session, session.session_id)
                concerned += [run.run_id for run in runs if lost.names(run.run_id)]
        for model_id in concerned:
            if model_id not in self._models and model_id not in unloaded:
                await self._revive_run(model_id)

    async def _revive_run(self, model_id: str) -> Model | None:
        """A run that the database knows, unless its session has ended; what made it is not there."""
        run = await self._db(self._store.run, model_id)
        if run is None or not await self._is_active(run.session_id, run.owner):
            return None
        model = Model(model_id, run.session_id, run.owner, run.base_model, lora_of(run.lora))
        await self._work.call_corrupted(
            model, DecodeError("the request that made it cannot be read in the journal")
        )
        self._models[model_id] = model
        return model

    def _go_back(self, model: Model, unknown: list[Promise]) -> list[Promise]:
        """Take a model back to before the first change whose result is lost; those that are not done again.

        Results are told before they are on the disk, so the end of the machine can take one and leave later ones.
        Whatever changed the model from there on is done again: in the same order, to the same numbers.
        """
        since = 0 if model.snapshot is None else model.snapshot.next_seq
        changing = [each for each in unknown if changes_model(each) and _number(each) >= since]
        known = set(map(change_of, model.history))
        missing = set(range(model.changes + 1, max(known, default=0) + 1)) - known
        if not changing or len(missing) > len(changing):  # more than these are lost
            return unknown
        first = _number(changing[0])
        undone = [each for each in model.history if _number(each) > first]
        if any(each.seq_id is None for each in undone):  # in which order they ran is not known
            return unknown
        model.history = [each for each in model.history if _number(each) < first]
        for promise in undone:
            self._promises.reopen(promise)
        again = [each for each in unknown if _number(each) >= first] + undone
        self._work.counted.update(again)
        model.line.run_again(sorted(again, key=_number))
        self._waiting.add(model)
        return [each for each in unknown if _number(each) < first]

    async def _revive(self, model_id: str) -> None:
        """A model that has a snapshot, unless its session has ended."""
        run = await self._db(self._store.run, model_id)
        if run is None or not await self._is_active(run.session_id, run.owner):
            return
        model = Model(model_id, run.session_id, run.owner, run.base_model, lora_of(run.lora))
        if run.corrupted:
            model.give_up()
        try:
            model.snapshot = await self._db(self._snapshots.current, model_id)
        except DecodeError as error:
            await self._work.call_corrupted(model, error)
        else:
            model.line.next_seq = model.snapshot.next_seq
            model.changes = model.snapshot.changes
        self._keep(model)

    async def _revive_from(self, promise: Promise) -> Model | None:
        """The model that a request makes, unless the request failed or the session has ended."""
        makes = promise.operation.makes_model
        if not makes or (promise.result is not None and promise.result.change is None):
            return None
        session_id = promise.scope.rpartition(":train:")[0]
        if not await self._is_active(session_id, promise.owner):
            return None
        run = await self._db(self._store.run, promise.scope)
        try:
            base_model = (
                await self._work.base_model(reader_of(promise), self._promises.request_of(promise))
                if run is None
                else run.base_model
            )
        except TinkerError as error:
            if not promise.done:
                self._promises.fail(promise, error)
            return None
        lora = None if run is None else lora_of(run.lora)
        model = Model(promise.scope, session_id, promise.owner, base_model, lora)
        if run is not None and run.corrupted:
            model.give_up()
        self._keep(model)
        return model

    async def _is_active(self, session_id: str, owner: str) -> bool:
        try:
            await self._sessions.check_active(session_id, owner)
        except TinkerError:
            return False
        return True


def _unloaded(model_id: str, field: str) -> InvalidInputError:
    return InvalidInputError(
        f"model {model_id!r:.200} has been unloaded; its checkpoints are there to go on from",
        field=field,
    )


def _read_by(reader: str | None) -> dict[str, Any]:
    return {} if reader is None else {"reader": reader}


def _number(promise: Promise) -> float:
    """Where a request stands in its model's line; without a number behind all that have one."""
    return float("inf") if promise.seq_id is None else promise.seq_id


def _succeeded(promise: Promise) -> bool:
    return promise.result is not None and not promise.result.failed
