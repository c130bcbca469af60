"""Models in training: their requests run in order, one after another, and survive the engine.

A model's state is what its requests made of it. When the engine forgets the model — it died, or the service was
restarted — its last snapshot is loaded and the requests that changed it since are run again from the journal. A pass
depends on its request alone, so what comes out is the same to the last bit.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tinkex._wire.operations import Operation
from tinkex.engine.values import LoraSpec
from tinkex.errors import (
    InvalidInputError,
    NotFoundError,
    RateLimitError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
)
from tinkex.types import (
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    TensorData,
    UnloadModelRequest,
    UnloadModelResponse,
)

from . import archives
from .checkpoints import Checkpoints, now_utc, tinker_path
from .engine import Supervisor
from .futures import Promise, Promises
from .inputs import adam_step, check_optimizer, check_ttl, lora_of, lora_spec, training_pass
from .losses import Losses
from .samplers import Samplers
from .scheduling import Candidate, Sequencer, choose
from .sessions import Sessions
from .snapshots import Snapshot, Snapshots
from .store import Database, RunRow
from .usage import Usage

__all__ = ["Model", "Models"]

logger = logging.getLogger("tinkex.server")

#: Models whose requests are in the engine's line at one time: with two, it never waits for the next.
IN_LINE: Final = 2
#: Bodies of waiting requests that are kept decoded; others are read from the journal when it is their turn.
KEPT_BYTES: Final = 256 << 20

#: Operations that change a model; running them again brings it back.
_CHANGING: Final = {"create_model", "load_weights", "forward_backward", "optim_step"}


@dataclass(eq=False)
class Model:
    """One model and the line of its requests."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora: LoraSpec | None = None
    line: Sequencer[Promise] = field(default_factory=lambda: Sequencer(next_seq=0))
    history: list[Promise] = field(default_factory=list)  # what changed it since its snapshot
    changes: int = 0
    snapshot: Snapshot | None = None
    unsaved_seconds: float = 0.0  # of work that a crash would cost
    saving: bool = False
    life: int = -1  # the life of the engine that knows this model
    running: bool = False
    waiting_since: float = 0.0
    failure: str | None = None
    made: asyncio.Event = field(default_factory=asyncio.Event)
    last_request_at: Any = None


class Models:
    """All models that live."""

    def __init__(
        self,
        database: Database,
        sessions: Sessions,
        checkpoints: Checkpoints,
        samplers: Samplers,
        promises: Promises,
        engine: Supervisor,
        usage: Usage,
        losses: Losses,
        *,
        snapshots: Snapshots,
        snapshot_every: float,
        max_pending: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._store = database, database.store
        self._snapshots = snapshots
        self._snapshot_every = snapshot_every
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._promises = promises
        self._engine = engine
        self._usage = usage
        self._losses = losses
        self._max_pending = max_pending
        self._clock = clock
        self._models: dict[str, Model] = {}
        self._waiting: set[Model] = set()
        self._served: dict[str, float] = {}
        self._running = 0
        self._kept_bytes = 0
        self._began = time.time()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._run_operation: dict[str, Callable[[Model, Any, Promise], Awaitable[Any]]] = {
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "forward": self._forward,
            "forward_backward": self._forward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "save_weights_external": self._save_weights_external,
            "unload_model": self._unload_model,
        }

    # -- accepting -----------------------------------------------------------------------------

    async def create(
        self,
        row: Operation[Any],
        owner: str,
        request: CreateModelRequest | LoadWeightsRequest,
        body: bytes,
    ) -> Promise:
        """Accept a request that makes a model: afresh, or from a checkpoint."""
        assert request.session_id is not None
        await self._sessions.check_active(request.session_id, owner)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        known = self._promises.duplicate(model_id, 0)
        if known is None:
            base_model = await self._base_model(owner, request)
            known = self._promises.duplicate(model_id, 0)  # another may have come meanwhile
            if known is None:
                model = self._models[model_id] = Model(
                    model_id, request.session_id, owner, base_model
                )
                extra = {"seed": secrets.randbits(31)}
                known = self._accept(row, model, 0, request, body, "json", extra)
        await self._promises.flushed()
        return known

    async def _base_model(
        self, owner: str, request: CreateModelRequest | LoadWeightsRequest
    ) -> str:
        """The base model of a new model; a request that cannot work is refused here."""
        check_optimizer(request.optimizer_config)
        if isinstance(request, CreateModelRequest):
            self._engine.check_model(request.base_model, "base_model")
            lora_spec(request.lora_config, 0)
            return request.base_model
        checkpoint, _ = await self._trainable(owner, request.path)
        run = await self._db(self._store.run, checkpoint.run_id)
        assert run is not None
        if request.base_model is not None and request.base_model != run.base_model:
            raise InvalidInputError(
                f"the checkpoint is of {run.base_model}, not of {request.base_model!r:.200}",
                field="base_model",
            )
        self._engine.check_model(run.base_model, "path")
        return run.base_model

    async def _trainable(self, owner: str, path: str) -> Any:
        if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type != "training":
            raise InvalidInputError(
                f"{path!r:.300} is no training checkpoint (…/weights/…)", field="path"
            )
        return await self._checkpoints.readable(owner, path)

    async def submit(
        self,
        row: Operation[Any],
        owner: str,
        model_id: str,
        seq_id: int | None,
        request: Any,
        body: bytes,
        media: str,
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
            if self._promises.pending(owner) >= self._max_pending:
                raise _too_many(self._max_pending)
            extra = {"forward": True} if isinstance(request, ForwardRequest) else {}
            known = self._accept(row, model, seq_id, request, body, media, extra)
        await self._promises.flushed()
        return known

    def refuse(self, owner: str, model_id: str, seq_id: int | None) -> None:
        """A request was turned away at the door; those after it need not wait for it."""
        model = self._models.get(model_id)
        if model is None or model.owner != owner or not seq_id:
            return
        # A number that is taken stays with the request that took it.
        if self._promises.duplicate(model_id, seq_id) is None:
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
        model.last_request_at = now_utc()
        self._enqueue(model, promise)
        return promise

    def _enqueue(self, model: Model, promise: Promise) -> None:
        if not len(model.line):
            model.waiting_since = self._clock()
        settles = promise.operation.name not in {"forward", "forward_backward"}
        model.line.offer(promise.seq_id, promise, settles=settles)
        if model not in self._waiting:
            self._waiting.add(model)
            others = [
                self._served[other.owner] for other in self._waiting if other.owner in self._served
            ]
            # Who was away has not saved up turns.
            self._served[model.owner] = max(
                self._served.get(model.owner, 0.0), min(others, default=0.0)
            )
        self._schedule()

    async def find(self, model_id: str, owner: str) -> Model:
        model = self._models.get(model_id)
        if model is not None and model.owner == owner:
            return model
        run = await self._db(self._store.run, model_id)
        if run is not None and run.owner == owner:
            raise InvalidInputError(
                f"model {model_id!r:.200} has been unloaded; its checkpoints are there to go on from",
                field="model_id",
            )
        raise NotFoundError(f"There is no model {model_id!r:.200}.")

    def __iter__(self) -> Any:
        return iter(list(self._models.values()))

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
        while self._running < IN_LINE:
            ready = [
                Candidate(model.model_id, model.owner, model.waiting_since)
                for model in self._waiting
                if not model.running and model.line.ready(now)
            ]
            chosen = choose(ready, self._served)
            if chosen is None:
                break
            model = self._models[chosen.model_id]
            promise = model.line.take(now)
            assert promise is not None
            model.running = True
            self._running += 1
            self._start_task(self._serve(model, promise))
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

    async def _serve(self, model: Model, promise: Promise) -> None:
        started = self._clock()
        promise.started_at = time.time()
        try:
            await self._run(model, promise)
        finally:
            self._served[model.owner] = self._served.get(model.owner, 0.0) + self._clock() - started
            self._running -= 1
            model.running = False
            model.made.set()  # or never will be: the first request is the one that makes it
            model.waiting_since = self._clock()
            if not len(model.line):
                self._waiting.discard(model)
            self._schedule()

    async def _run(self, model: Model, promise: Promise) -> None:
        if promise.done:  # cancelled before its turn
            return
        if promise.request is not None:
            self._kept_bytes -= promise.place.length

        async def work() -> Any:
            await self._bring_back(model)
            request = self._promises.request_of(promise)
            return await self._run_operation[promise.operation.name](model, request, promise)

        try:
            if model.failure is not None:
                raise RequestFailedError(model.failure, category=RequestErrorCategory.User)
            value = await self._engine.persist(work)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if promise.operation.name in {"create_model", "load_weights"} and not model.changes:
                model.failure = f"The model was never made: {error}"
            self._promises.fail(promise, error)
        else:
            self._applied(model, promise, value)

    def _applied(self, model: Model, promise: Promise, value: Any) -> None:
        if not _changes(promise):
            self._promises.finish(promise, value)
            return
        model.changes += 1
        self._promises.finish(promise, value, model.changes)
        model.history.append(promise)
        if promise.started_at is not None:
            model.unsaved_seconds += time.time() - promise.started_at
        # Between steps there are no gradients that would have to be kept too.
        step = promise.operation.name == "optim_step"
        if step and not model.saving and model.unsaved_seconds >= self._snapshot_every:
            model.saving, model.unsaved_seconds = True, 0.0
            self._start_task(self._take_snapshot(model, model.changes, model.line.next_seq))

    async def _take_snapshot(self, model: Model, changes: int, next_seq: int) -> None:
        """Have a snapshot written beside the work that goes on, then let it count."""
        place = self._snapshots.place(model.model_id, changes)
        try:
            await self._call("snapshot", model.model_id, place)
            if model.failure is not None:
                return
            snapshot = Snapshot(place, changes, next_seq)
            await self._db(self._snapshots.commit, model.model_id, snapshot)
        except Exception as error:  # the journal still has everything
            if model.failure is None:  # else the model is gone, and its directory with it
                logger.warning("No snapshot of %s could be written: %s", model.model_id, error)
            return
        finally:
            model.saving = False
        model.snapshot = snapshot
        covered = [promise for promise in model.history if _change(promise) <= changes]
        model.history = [promise for promise in model.history if _change(promise) > changes]
        await self._drop_loaded(model, covered)

    async def _bring_back(self, model: Model) -> None:
        """Make the engine know a model that it has forgotten."""
        life = self._engine.life
        if model.life == life:
            return
        if model.snapshot is not None:
            await self._engine.model(model.base_model, "base_model")
            await self._call(
                "restore_model",
                model.model_id,
                model.base_model,
                model.snapshot.directory,
                optimizer=True,
            )
        for promise in model.history:
            request = self._promises.request_of(promise)
            await self._run_operation[promise.operation.name](model, request, promise)
        model.life = life

    # -- what requests do ----------------------------------------------------------------------

    async def _create_model(
        self, model: Model, request: CreateModelRequest, promise: Promise
    ) -> CreateModelResponse:
        model.lora = lora_spec(request.lora_config, promise.extra["seed"])
        await self._engine.model(model.base_model, "base_model")
        await self._call("create_model", model.model_id, model.base_model, model.lora)
        await self._add_run(model, request.user_metadata)
        return CreateModelResponse(model_id=model.model_id)

    async def _load_weights(
        self, model: Model, request: LoadWeightsRequest, promise: Promise
    ) -> LoadWeightsResponse:
        # The checkpoint may be replaced or deleted later; what was loaded is needed to do it again.
        kept = self._loaded(model, promise)
        if not kept.is_dir():
            checkpoint, directory = await self._trainable(model.owner, request.path)
            run = await self._db(self._store.run, checkpoint.run_id)
            assert run is not None
            if run.base_model != model.base_model:
                raise InvalidInputError(
                    f"the checkpoint is of {run.base_model}, the model of {model.base_model}",
                    field="path",
                )
            loaded = lora_of(run.lora)
            if model.lora is not None and loaded.rank != model.lora.rank:
                raise InvalidInputError(
                    f"the checkpoint is of rank {loaded.rank}, the model of {model.lora.rank}",
                    field="path",
                )
            await self._db(_copy, directory, kept)
            model.lora = loaded
        await self._engine.model(model.base_model, "path")
        await self._call(
            "restore_model", model.model_id, model.base_model, kept, optimizer=request.optimizer
        )
        await self._add_run(model, request.user_metadata)
        return LoadWeightsResponse(path=request.path, model_id=model.model_id)

    async def _forward(
        self, model: Model, request: ForwardBackwardRequest | ForwardRequest, promise: Promise
    ) -> ForwardBackwardOutput:
        backward = isinstance(request, ForwardBackwardRequest)
        inputs = (
            request.forward_backward_input
            if isinstance(request, ForwardBackwardRequest)
            else request.forward_input
        )
        asked = training_pass(inputs, backward=backward)
        if asked.loss_fn == "custom":
            config = dict(asked.config)
            traced = await self._losses.graph(config.pop("loss_id", None), model.session_id)
            asked = replace(asked, config=config, traced=traced)
        result = await self._call("run_pass", model.model_id, asked)
        tokens = sum(example.length for example in asked.examples)
        if not promise.done:  # else it is being run again
            self._usage.add(model.owner, model.session_id, model.base_model, "training", tokens)
        return ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[
                {"logprobs": TensorData.from_numpy(values)} for values in result.logprobs
            ],
            metrics=result.metrics,
        )

    async def _optim_step(
        self, model: Model, request: OptimStepRequest, _: Promise
    ) -> OptimStepResponse:
        step = adam_step(request.optim_params)
        return OptimStepResponse(metrics=await self._call("optim_step", model.model_id, step))

    async def _save_weights(
        self, model: Model, request: SaveWeightsRequest, promise: Promise
    ) -> SaveWeightsResponse:
        check_ttl(request.ttl_seconds)
        name = request.path or f"{promise.seq_id or 0:06d}"
        place = await self._checkpoints.check_free(
            model.model_id,
            "training",
            name,
            overwrite=request.overwrite,
            request_id=promise.request_id,
        )
        size = await self._call("save_state", model.model_id, place, optimizer=True)
        row = await self._checkpoints.add(
            model.model_id,
            "training",
            name,
            model.owner,
            size,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            request_id=promise.request_id,
        )
        self._count_checkpoint(model)
        return SaveWeightsResponse(path=tinker_path(row))

    async def _save_weights_for_sampler(
        self, model: Model, request: SaveWeightsForSamplerRequest, promise: Promise
    ) -> SaveWeightsForSamplerResponseInternal:
        check_ttl(request.ttl_seconds)
        if request.path is None:
            return await self._unnamed_sampler(model, request.sampling_session_seq_id, promise)
        place = await self._checkpoints.check_free(
            model.model_id, "sampler", request.path, request_id=promise.request_id
        )
        size = await self._call("save_state", model.model_id, place, optimizer=False)
        row = await self._checkpoints.add(
            model.model_id,
            "sampler",
            request.path,
            model.owner,
            size,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            request_id=promise.request_id,
        )
        self._count_checkpoint(model)
        return SaveWeightsForSamplerResponseInternal(path=tinker_path(row))

    async def _unnamed_sampler(
        self, model: Model, number: int | None, promise: Promise
    ) -> SaveWeightsForSamplerResponseInternal:
        """A sampler of the weights as they are now; it is not listed as a checkpoint."""
        if number is None:
            raise InvalidInputError("give a name, or a sampling_session_seq_id", field="path")
        sampler_id = f"{model.session_id}:sample:{number}"
        known = await self._db(self._store.sampler, sampler_id)
        if known is not None and not self._made_by(promise, known.created_at):
            raise InvalidInputError(
                f"this session has a sampler {number} already", field="sampling_session_seq_id"
            )
        place = self._samplers.place(sampler_id)
        await self._call("save_state", model.model_id, place, optimizer=False)
        await self._call("open_sampler", sampler_id, model.base_model, model_id=model.model_id)
        await self._samplers.add(model.owner, model.session_id, sampler_id, model.base_model, None)
        self._samplers.opened(sampler_id)
        return SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id)

    def _made_by(self, promise: Promise, moment: datetime) -> bool:
        """Whether something can be the work of a request that a restart has interrupted."""
        return promise.accepted_at <= moment.timestamp() < self._began

    async def _save_weights_external(
        self, model: Model, request: SaveWeightsExternalRequest, promise: Promise
    ) -> SaveWeightsExternalResponseInternal:
        check_ttl(request.ttl_seconds)
        place = await self._checkpoints.check_free(
            model.model_id, "external", request.path, request_id=promise.request_id
        )
        scratch = place.with_name(f".{promise.request_id}")
        try:
            await self._call("save_state", model.model_id, scratch, optimizer=False)
            recipients = request.age_encryption_recipients or ()
            size = await self._db(archives.export, scratch, place, recipients)
        finally:
            await self._db(shutil.rmtree, scratch, ignore_errors=True)
        row = await self._checkpoints.add(
            model.model_id,
            "external",
            request.path,
            model.owner,
            size,
            ttl_seconds=request.ttl_seconds,
            request_id=promise.request_id,
        )
        self._count_checkpoint(model)
        return SaveWeightsExternalResponseInternal(path=tinker_path(row), size_bytes=size)

    async def _unload_model(
        self, model: Model, _: UnloadModelRequest, promise: Promise
    ) -> UnloadModelResponse:
        await self._call("unload_model", model.model_id)
        await self._forget(model, "was unloaded")
        return UnloadModelResponse(model_id=model.model_id)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return await self._engine.worker.call(method, *args, **options)

    def _count_checkpoint(self, model: Model) -> None:
        self._usage.add(model.owner, model.session_id, model.base_model, "checkpoint", 1)

    async def _add_run(self, model: Model, user_metadata: dict[str, Any] | None) -> None:
        assert model.lora is not None
        now = now_utc()
        await self._db(
            self._store.add_run,
            RunRow(
                model.model_id,
                model.session_id,
                model.owner,
                model.base_model,
                asdict(model.lora),
                user_metadata,
                now,
                now,
            ),
        )

    # -- endings -------------------------------------------------------------------------------

    async def close_session(self, session_id: str) -> None:
        """Let go of the models of a session that has ended."""
        for model in list(self._models.values()):
            if model.session_id == session_id:
                await self._engine.call_now("unload_model", model.model_id)
                await self._forget(model, "was unloaded when its session ended")

    async def _forget(self, model: Model, why: str) -> None:
        self._models.pop(model.model_id, None)
        self._waiting.discard(model)
        model.made.set()
        model.failure = f"The model {why}."
        for promise in model.line.drain():
            if promise.request is not None:
                self._kept_bytes -= promise.place.length
            error = RequestFailedError(model.failure, promise.request_id, RequestErrorCategory.User)
            self._promises.fail(promise, error)
        await self._drop_loaded(model, model.history)
        await self._db(self._snapshots.forget, model.model_id)
        model.history.clear()

    def _loaded(self, model: Model, promise: Promise) -> Path:
        """What a request loaded, for as long as it may have to be run again."""
        return self._snapshots.place(model.model_id, 0).with_name(f"loaded-{promise.request_id}")

    async def _drop_loaded(self, model: Model, promises: Sequence[Promise]) -> None:
        for promise in promises:
            if promise.operation.name == "load_weights":
                kept = self._loaded(model, promise)
                await self._db(shutil.rmtree, kept, ignore_errors=True)

    def needs(self, promise: Promise) -> bool:
        """Whether a request may have to be run again."""
        model = self._models.get(promise.scope)
        if model is None or promise.result is None or promise.result.change is None:
            return False
        return model.snapshot is None or promise.result.change > model.snapshot.changes

    async def write_times(self) -> None:
        """Put down when models were last asked for something."""
        for model in list(self._models.values()):  # others may come meanwhile
            at, model.last_request_at = model.last_request_at, None
            if at is not None:
                await self._db(self._store.update_run, model.model_id, last_request_at=at)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- restart -------------------------------------------------------------------------------

    async def restore(self, promises: list[Promise]) -> None:
        """Take up the models of before a restart; `promises` are in the order in which they were accepted."""
        for model_id in await self._db(lambda: list(self._snapshots.model_ids())):
            await self._revive(model_id)
        unloaded = {
            promise.scope
            for promise in promises
            if promise.operation.name == "unload_model" and _succeeded(promise)
        }
        for promise in promises:
            model = self._models.get(promise.scope)
            if model is None and promise.scope not in unloaded:
                model = await self._revive_from(promise)
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
        for model in self._models.values():
            model.made.set()
            model.history.sort(key=_change)
            model.changes = max([model.changes, *map(_change, model.history)])
        self._schedule()

    async def _revive(self, model_id: str) -> None:
        """A model that has a snapshot, unless its session has ended."""
        run = await self._db(self._store.run, model_id)
        snapshot = await self._db(self._snapshots.current, model_id)
        if run is None or snapshot is None or not await self._is_active(run.session_id, run.owner):
            await self._db(self._snapshots.forget, model_id)
            return
        model = Model(model_id, run.session_id, run.owner, run.base_model, lora_of(run.lora))
        model.line.next_seq = snapshot.next_seq
        model.changes, model.snapshot = snapshot.changes, snapshot
        self._models[model_id] = model

    async def _revive_from(self, promise: Promise) -> Model | None:
        """The model that a request makes, unless that failed or its session has ended."""
        makes = promise.operation.name in {"create_model", "load_weights"}
        if not makes or (promise.done and not _succeeded(promise)):
            return None
        session_id = promise.scope.rpartition(":train:")[0]
        if not await self._is_active(session_id, promise.owner):
            return None
        run = await self._db(self._store.run, promise.scope)
        try:
            base_model = (
                await self._base_model(promise.owner, self._promises.request_of(promise))
                if run is None
                else run.base_model
            )
        except TinkerError as error:
            if not promise.done:
                self._promises.fail(promise, error)
            return None
        lora = None if run is None else lora_of(run.lora)
        model = Model(promise.scope, session_id, promise.owner, base_model, lora)
        self._models[promise.scope] = model
        return model

    async def _is_active(self, session_id: str, owner: str) -> bool:
        try:
            await self._sessions.check_active(session_id, owner)
        except TinkerError:
            return False
        return True


def _succeeded(promise: Promise) -> bool:
    return promise.result is not None and not promise.result.failed


def _change(promise: Promise) -> int:
    assert promise.result is not None
    return promise.result.change or 0


def _changes(promise: Promise) -> bool:
    return promise.operation.name in _CHANGING and not promise.extra.get("forward")


def _too_many(limit: int) -> TinkerError:
    return RateLimitError(
        f"{limit} requests of this key are waiting already; send more when some of them are done.",
        retry_after=1.0,
    )


def _copy(source: Any, target: Any) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.replace(target)
