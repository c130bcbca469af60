"""Runs the requests of models on the engine, and restores a model that its engine has lost.

`replay` decides what a restore consists of.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tinkex._wire.pass_parts import PassPart
from tinkex.engine import directories
from tinkex.engine.interface import Engines
from tinkex.errors import (
    DecodeError,
    InvalidInputError,
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

from .checkpoints import Checkpoints, tinker_path
from .database import Database
from .exports import export
from .file_threads import FileThreads
from .futures import Promise, Promises
from .inputs import adam_step, check_optimizer, check_ttl, lora_of, lora_spec, training_pass
from .losses import Losses
from .model import Ending, Model
from .samplers import Samplers
from .snapshots import Snapshot, Snapshots
from .tables import CheckpointRow, RunRow
from .usage import UsageKind, UsageMeter

__all__ = ["ModelWork", "answer_to", "reader_of"]

logger = logging.getLogger("tinkex.server")


class ModelWork:
    """Runs the requests of models; the caller runs at most one per model at a time."""

    def __init__(
        self,
        database: Database,
        files: FileThreads,
        checkpoints: Checkpoints,
        samplers: Samplers,
        promises: Promises,
        engine: Engines,
        usage: UsageMeter,
        losses: Losses,
        snapshots: Snapshots,
        now: Callable[[], datetime],
    ) -> None:
        self._db, self._store = database, database.store
        self._files = files
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._promises = promises
        self._engine, self._trainer = engine, engine.trainer
        self._usage = usage
        self._losses = losses
        self._snapshots = snapshots
        self._now = now
        self._began = now().timestamp()
        #: Requests that run again after a restart; the usage meter has counted them before.
        self.usage_counted: set[Promise] = set()
        self._work_on: dict[type[object], Callable[[Model, Any, Promise], Awaitable[object]]] = {
            CreateModelRequest: self._create_model,
            LoadWeightsRequest: self._load_weights,
            ForwardRequest: self._forward,
            ForwardBackwardRequest: self._forward,
            OptimStepRequest: self._optim_step,
            SaveWeightsRequest: self._save_weights,
            SaveWeightsForSamplerRequest: self._save_weights_for_sampler,
            SaveWeightsExternalRequest: self._save_weights_external,
            UnloadModelRequest: self._unload_model,
        }

    async def do(self, model: Model, promise: Promise) -> object:
        """Run a request; if the engine dies meanwhile, restore the model and run the request again."""

        async def work() -> object:
            await self._restore(model)
            return await self._once(model, promise)

        return await self._engine.persist(work)

    async def _once(self, model: Model, promise: Promise) -> object:
        request = self._promises.request_of(promise)
        return await self._work_on[type(request)](model, request, promise)

    async def base_model(self, owner: str, request: CreateModelRequest | LoadWeightsRequest) -> str:
        """The base model of a new model; refuses a request that cannot succeed."""
        check_optimizer(request.optimizer_config)
        if isinstance(request, CreateModelRequest):
            self._engine.catalog.check(request.base_model, "base_model")
            lora_spec(request.lora_config, 0)
            return request.base_model
        checkpoint = await self._trainable(owner, request.path)
        run = await self._checkpoints.run_of(checkpoint)
        if request.base_model is not None and request.base_model != run.base_model:
            raise InvalidInputError(
                f"the checkpoint is of {run.base_model}, not of {request.base_model!r:.200}",
                field="base_model",
            )
        self._engine.catalog.check(run.base_model, "path")
        return run.base_model

    async def _trainable(self, owner: str, path: str) -> CheckpointRow:
        if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type != "training":
            raise InvalidInputError(
                f"{path!r:.300} is not a training checkpoint (…/weights/…)", field="path"
            )
        return (await self._checkpoints.readable(owner, path))[0]

    # -- snapshots and restoring ----------------------------------------------------------------

    async def take_snapshot(self, model: Model, changes: int, next_seq: int) -> None:
        """Write a snapshot while later requests run, and use it from then on."""
        place = self._snapshots.place(model.model_id, changes)
        try:
            await self._trainer.snapshot(model.model_id, place)
            model.check()
            # The results must be in the journal first. A request whose change is in the snapshot but whose result is
            # not in the journal would run twice.
            await self._promises.settled()
            async with model.restoring:
                snapshot = Snapshot(place, changes, next_seq)
                await self._files(self._snapshots.commit, model.model_id, snapshot)
                covered = model.past.replace_snapshot(snapshot)
        except (
            Exception
        ) as error:  # not fatal: the journal has all requests since the last snapshot
            if model.ending is None:
                logger.warning("No snapshot of %s could be written: %s", model.model_id, error)
            return
        finally:
            model.past.saving = False
            if model.ending is not None and not model.corrupted:
                # The model was unloaded while the snapshot was written: delete the directory that it created again.
                await self._files(self._snapshots.forget, model.model_id)
        await self._drop_loaded(model, covered)

    async def _restore(self, model: Model) -> None:
        """Restore a model that no engine holds."""
        model.check()
        if model.held:
            return
        model.lease = None
        if not model.past.empty:
            # Outside of `try`: a base model that cannot be loaded does not make the run corrupted.
            await self._engine.catalog.model(model.base_model, "base_model")
        try:
            async with model.restoring:
                await self._replay(model)
        except TinkerError as error:
            model.check()  # an unloaded model has no files, and is not corrupted
            await self.mark_corrupted(model, str(error))
            model.check()
        except BaseException:
            model.lease = None  # the engine may hold a partly restored model
            raise

    async def mark_corrupted(self, model: Model, why: str) -> None:
        """Give up a model for good, also in the database."""
        logger.error("%s is corrupted: %s", model.model_id, why)
        model.ending = Ending.by_damage(why)
        await self._db(self._store.update_run, model.model_id, corrupted=True)

    async def _replay(self, model: Model) -> None:
        past = model.past
        if past.missing is not None:
            raise DecodeError(f"the journal lacks change {past.missing} of this model")
        if past.snapshot is not None:
            model.lease = await self._trainer.restore_snapshot(
                model.model_id, model.base_model, past.snapshot.directory
            )
        for promise in past.history:
            await self._once(model, promise)

    async def forget(self, model: Model) -> None:
        """Delete the files from which a model would be restored."""
        await self._drop_loaded(model, model.past.history)
        await self._files(self._snapshots.forget, model.model_id)
        model.past.history.clear()

    def _loaded(self, model: Model, promise: Promise) -> Path:
        """The copy of the checkpoint that a request loads; it is kept while the request may be replayed."""
        return self._snapshots.place(model.model_id, 0).with_name(f"loaded-{promise.request_id}")

    async def _drop_loaded(self, model: Model, promises: Sequence[Promise]) -> None:
        for promise in promises:
            if promise.operation.request is LoadWeightsRequest:
                kept = self._loaded(model, promise)
                await self._files.remove(kept)

    # -- what requests do ----------------------------------------------------------------------

    async def _create_model(
        self, model: Model, request: CreateModelRequest, promise: Promise
    ) -> CreateModelResponse | LoadWeightsResponse:
        model.lora = lora_spec(request.lora_config, promise.extra["seed"])
        await self._engine.catalog.model(model.base_model, "base_model")
        model.lease = await self._trainer.create_model(model.model_id, model.base_model, model.lora)
        await self._add_run(model, request.user_metadata)
        return answer_to(request, model.model_id)

    async def _load_weights(
        self, model: Model, request: LoadWeightsRequest, promise: Promise
    ) -> CreateModelResponse | LoadWeightsResponse:
        # A replay needs the weights, and the checkpoint may be replaced or deleted by then.
        kept = self._loaded(model, promise)
        if not kept.is_dir():
            checkpoint = await self._trainable(reader_of(promise), request.path)
            run = await self._checkpoints.run_of(checkpoint)
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
            await self._checkpoints.take(checkpoint, directories.copy, kept)
        if model.lora is None:
            # Also if the copy exists already: the service may have restarted after it was made.
            source_id = ParsedCheckpointTinkerPath.from_tinker_path(request.path).training_run_id
            source = await self._db(self._store.run, source_id)
            assert source is not None
            model.lora = lora_of(source.lora)
        await self._engine.catalog.model(model.base_model, "path")
        model.lease = await self._trainer.restore_model(
            model.model_id, model.base_model, kept, optimizer=request.optimizer
        )
        await self._add_run(model, request.user_metadata)
        return answer_to(request, model.model_id)

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
        if "part" in promise.extra:
            asked = replace(asked, part=PassPart.parse(promise.extra["part"]))
        result = await self._trainer.run_pass(model.model_id, asked)
        tokens = sum(example.length for example in asked.examples)
        self._count(model, promise, "training", tokens)
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
        return OptimStepResponse(metrics=await self._trainer.optim_step(model.model_id, step))

    async def _save_weights(
        self, model: Model, request: SaveWeightsRequest, promise: Promise
    ) -> SaveWeightsResponse:
        check_ttl(request.ttl_seconds)
        name = request.path or f"{promise.seq_id or 0:06d}"
        place = await self._checkpoints.check_free(
            model.owner,
            model.model_id,
            "training",
            name,
            overwrite=request.overwrite,
            request_id=promise.request_id,
        )
        scratch = place.with_name(f".{promise.request_id}")
        try:
            size = await self._trainer.save_state(model.model_id, scratch, optimizer=True)
            row = await self._checkpoints.add(
                model.model_id,
                "training",
                name,
                model.owner,
                size,
                ttl_seconds=request.ttl_seconds,
                user_metadata=request.user_metadata,
                request_id=promise.request_id,
                written=scratch,
            )
        finally:
            await self._files.remove(scratch)
        self._count(model, promise, "checkpoint", 1)
        return SaveWeightsResponse(path=tinker_path(row))

    async def _save_weights_for_sampler(
        self, model: Model, request: SaveWeightsForSamplerRequest, promise: Promise
    ) -> SaveWeightsForSamplerResponseInternal:
        check_ttl(request.ttl_seconds)
        if request.path is None:
            return await self._unnamed_sampler(model, request, promise)
        place = await self._checkpoints.check_free(
            model.owner, model.model_id, "sampler", request.path, request_id=promise.request_id
        )
        size = await self._trainer.save_state(model.model_id, place, optimizer=False)
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
        self._count(model, promise, "checkpoint", 1)
        return SaveWeightsForSamplerResponseInternal(path=tinker_path(row))

    async def _unnamed_sampler(
        self, model: Model, request: SaveWeightsForSamplerRequest, promise: Promise
    ) -> SaveWeightsForSamplerResponseInternal:
        """A sampler of the weights as they are now; it is not listed as a checkpoint."""
        number = request.sampling_session_seq_id
        if number is None:
            raise InvalidInputError("give a name, or a sampling_session_seq_id", field="path")
        sampler_id = f"{model.session_id}:sample:{number}"
        known = await self._db(self._store.sampler, sampler_id)
        if known is not None and not self._made_by(promise, known.created_at):
            raise InvalidInputError(
                f"this session has a sampler {number} already", field="sampling_session_seq_id"
            )
        # A training loop creates many: expired ones make room.
        await self._samplers.delete_expired()
        if known is None:
            self._samplers.check_room(model.owner)
        place = self._samplers.place(sampler_id)
        await self._trainer.save_state(model.model_id, place, optimizer=False)
        lease = await self._engine.sampler.open_sampler(
            sampler_id, model.base_model, place, trained_as=model.model_id
        )
        await self._samplers.add_unnamed(
            model.owner, model.session_id, sampler_id, model.base_model, request.ttl_seconds, lease
        )
        return SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id)

    def _made_by(self, promise: Promise, moment: datetime) -> bool:
        """Whether something made at `moment` can be the work of this request before the restart that interrupted it."""
        return promise.accepted_at <= moment.timestamp() < self._began

    async def _save_weights_external(
        self, model: Model, request: SaveWeightsExternalRequest, promise: Promise
    ) -> SaveWeightsExternalResponseInternal:
        check_ttl(request.ttl_seconds)
        place = await self._checkpoints.check_free(
            model.owner, model.model_id, "external", request.path, request_id=promise.request_id
        )
        scratch = place.with_name(f".{promise.request_id}")
        try:
            await self._trainer.save_state(model.model_id, scratch, optimizer=False)
            recipients = request.age_encryption_recipients or ()
            size = await self._files(export, scratch, place, recipients)
        finally:
            await self._files.remove(scratch)
        row = await self._checkpoints.add(
            model.model_id,
            "external",
            request.path,
            model.owner,
            size,
            ttl_seconds=request.ttl_seconds,
            request_id=promise.request_id,
        )
        self._count(model, promise, "checkpoint", 1)
        return SaveWeightsExternalResponseInternal(path=tinker_path(row), size_bytes=size)

    async def _unload_model(
        self, model: Model, _: UnloadModelRequest, __: Promise
    ) -> UnloadModelResponse:
        await self._trainer.unload_model(model.model_id)
        return UnloadModelResponse(model_id=model.model_id)

    def _count(self, model: Model, promise: Promise, kind: UsageKind, amount: int) -> None:
        """Count usage, except of a request that runs again."""
        if promise in self.usage_counted:
            self.usage_counted.remove(promise)
        elif not promise.done:
            self._usage.add(model.owner, model.session_id, model.base_model, kind, amount)

    async def _add_run(self, model: Model, user_metadata: dict[str, Any] | None) -> None:
        assert model.lora is not None
        now = self._now()
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


def answer_to(
    request: CreateModelRequest | LoadWeightsRequest, model_id: str
) -> CreateModelResponse | LoadWeightsResponse:
    """The result of a request that created a model."""
    if isinstance(request, CreateModelRequest):
        return CreateModelResponse(model_id=model_id)
    return LoadWeightsResponse(path=request.path, model_id=model_id)


def reader_of(promise: Promise) -> str:
    """The owner who may read the checkpoint that a request loads: its sender, or the owner of the token in it."""
    reader: str = promise.extra.get("reader", promise.owner)
    return reader
