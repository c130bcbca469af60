"""The engine: base models, the adapters that are trained on them, and samplers.

Its input is token ids and its output is numbers; it does not use HTTP, a database or a tokenizer. All methods are
called from one thread. A training pass is a generator, so that the caller can sample between micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tinkex.errors import InvalidInputError, NotFoundError

from . import base_models, checkpoint
from .base_models import PreparedModel
from .checks import check_base, check_same_base
from .devices import SMALL_MODEL, choices_for, dtype_for
from .grammars import Grammars
from .helping import Helping
from .kernels import TorchKernels
from .llama import is_llama
from .llama_files import read_llama
from .lora import Adapter, LoraLinear
from .memory import memory_of
from .native import kernels_for
from .parcels import Depot, Parcel, PublishedAdapter
from .sampler import Sampler
from .shards import ShardSums
from .shared_weights import Join, SharedWeights
from .traced import TracedLoss
from .trainer import (
    Gradients,
    LanguageModel,
    TrainedModel,
    begin_pass,
    finish_pass,
    run_pass,
    run_shards,
)
from .values import (
    AdamStep,
    LoraSpec,
    LossLimits,
    PassJob,
    PassResult,
    SampleEvent,
    SampleJob,
    TracedGraph,
)

__all__ = ["TorchEngine"]

logger = logging.getLogger("tinkex.engine")

#: Share of the memory for the samplers' caches of keys and values. Spare capacity can double the actual use.
CACHE_SHARE = 0.25


@dataclass
class _Loaded:
    """A base model in memory and its sampler."""

    language: LanguageModel
    sampler: Sampler
    threads: int


@dataclass(frozen=True)
class _OpenSampler:
    base_model: str
    adapter: Adapter | None


class TorchEngine:
    """All models of one process."""

    def __init__(
        self,
        models: Sequence[PreparedModel],
        *,
        device: str = "cpu",
        dtype: str | torch.dtype = torch.float32,
        native: bool | None = None,
        detokenize: Callable[[PreparedModel, Sequence[int]], str] | None = None,
        token_budget: int | None = None,
        cache_bytes: int | None = None,
        memory_share: float = 1.0,
        loss_limits: LossLimits = LossLimits(),  # noqa: B008 - frozen
        depot: Depot | None = None,
        shared_weights: SharedWeights | None = None,
    ) -> None:
        self._helping = None if depot is None else Helping(depot)
        self._shared_weights = shared_weights
        self._known = {model.name: model for model in models}
        self._device, self._dtype, self._native = device, dtype, native
        self._detokenize = detokenize
        choices = choices_for(torch.device(device))
        self.token_budget = choices.micro_batch_tokens if token_budget is None else token_budget
        self._loss_limits = loss_limits
        memory = memory_of(torch.device(device)) * memory_share
        self._cache_bytes = int(memory * CACHE_SHARE) if cache_bytes is None else cache_bytes
        self._threads = torch.get_num_threads()
        self._loaded: dict[Path, _Loaded] = {}  # by directory: two names can share one model
        self._models: dict[str, tuple[str, TrainedModel]] = {}
        self._samplers: dict[str, _OpenSampler] = {}

    # -- training ----------------------------------------------------------------------------

    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None:
        """Create a new adapter on a base model."""
        language = self._base(base_model).language
        adapter = Adapter.fresh(language.layers, spec, self._device)
        self._models[model_id] = (base_model, TrainedModel(language, adapter))

    def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> None:
        """Create a model from a checkpoint, with the saved optimizer or a new one."""
        self._restore(model_id, base_model, directory, optimizer=optimizer)

    def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> None:
        """Create a model from a snapshot, with optimizer and accumulated gradients."""
        self._restore(model_id, base_model, directory, optimizer=True, gradients=True)

    def _restore(
        self,
        model_id: str,
        base_model: str,
        directory: Path,
        *,
        optimizer: bool,
        gradients: bool = False,
    ) -> None:
        language = self._base(base_model).language
        largest = partial(_adapter_bytes, language.layers)
        saved = checkpoint.load(
            directory, optimizer=optimizer, gradients=gradients, largest=largest
        )
        adapter = self._adapter(saved, language.layers)
        model = TrainedModel(language, adapter)
        if saved.dtype not in {None, model.dtype}:
            logger.warning(
                "%s was trained in %s, and this engine computes %s in %s: training continues, but its numbers differ "
                "in the last digits. For the same numbers, start the service with --dtype %s on a machine that has it.",
                model_id,
                saved.dtype,
                base_model,
                model.dtype,
                saved.dtype,
            )
        elif saved.kernels not in {None, language.kernels.name}:
            logger.warning(
                "%s was trained with %s kernels, and this engine has %s kernels: training continues, but its numbers differ "
                "in the last digits. Native kernels need a C compiler, and TINKEX_KERNELS=torch turns them off.",
                model_id,
                saved.kernels,
                language.kernels.name,
            )
        names = list(adapter.pairs)
        if optimizer:
            saved.restore(model.optimizer, names)
        saved.restore_gradients(model.optimizer, names)
        self._models[model_id] = (base_model, model)

    def unload_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)
        self._retract(model_id)

    def run_pass(self, model_id: str, request: PassJob) -> Generator[None, None, PassResult]:
        """Start a forward or forward-backward pass; the generator yields after each micro-batch."""
        base_model, model = self._named(model_id)
        self._retract(model_id)
        return self._run_pass(self._base(base_model), model, request)

    def _run_pass(
        self, loaded: _Loaded, model: TrainedModel, request: PassJob
    ) -> Generator[None, None, PassResult]:
        pieces = run_pass(model, request, self.token_budget, self._loss_limits)
        while True:
            self._use_threads(loaded)
            try:
                next(pieces)
            except StopIteration as finished:
                return cast("PassResult", finished.value)
            yield

    # -- one pass on several engines ---------------------------------------------------------

    @property
    def shared_passes(self) -> TorchEngine | None:
        return None if self._helping is None else self

    def publish(self, model_id: str) -> PublishedAdapter:
        """Put a model's adapter into the depot, where the other engines find it."""
        return self._in_pool.publish(model_id, *self._named(model_id))

    def run_shards(
        self, model_id: str, request: PassJob, numbers: Sequence[int]
    ) -> Generator[None, None, ShardSums[Parcel]]:
        """Begin a pass on the model's home and compute some of its shards; their gradients stay here."""
        base_model, model = self._named(model_id)
        return self._run_shards(self._base(base_model), model, request, numbers)

    def _run_shards(
        self, loaded: _Loaded, model: TrainedModel, request: PassJob, numbers: Sequence[int]
    ) -> Generator[None, None, ShardSums[Parcel]]:
        begin_pass(model, request)
        try:
            sums = yield from self._shards(loaded, model, request, numbers)
        except BaseException:
            model.opened = None
            raise
        if model.opened is not None:
            model.opened.own = sums
        return ShardSums(sums.losses, sums.logprobs)

    def help_pass(
        self, adapter: PublishedAdapter, request: PassJob, numbers: Sequence[int]
    ) -> Generator[None, None, ShardSums[Parcel]]:
        """Compute some shards of a pass for a model that lives on another engine."""
        loaded = self._base(adapter.base_model)
        model = self._in_pool.helped(loaded.language, adapter)
        sums = yield from self._shards(loaded, model, request, numbers)
        return self._in_pool.packed(sums)

    def finish_pass(
        self, model_id: str, request: PassJob, parts: Sequence[ShardSums[Parcel]]
    ) -> PassResult:
        """Add what all engines have computed of a pass to the model's gradients."""
        base_model, model = self._named(model_id)
        self._retract(model_id)
        self._use_threads(self._base(base_model))
        sums = [self._in_pool.unpacked(model, part) for part in parts]
        if model.opened is not None and model.opened.own is not None:
            sums.append(ShardSums(blocks=model.opened.own.blocks))
        return finish_pass(model, request, sums)

    def _shards(
        self, loaded: _Loaded, model: TrainedModel, request: PassJob, numbers: Sequence[int]
    ) -> Generator[None, None, ShardSums[Gradients]]:
        pieces = run_shards(model, request, numbers, self.token_budget, self._loss_limits)
        while True:
            self._use_threads(loaded)
            try:
                next(pieces)
            except StopIteration as finished:
                return cast("ShardSums[Gradients]", finished.value)
            yield

    def _retract(self, model_id: str) -> None:
        """No other engine reads this model's adapter any more."""
        if self._helping is not None:
            self._helping.retract(model_id)

    @property
    def _in_pool(self) -> Helping:
        if self._helping is None:
            raise NotFoundError("This engine is not part of a pool.")
        return self._helping

    # -- changes of a model ------------------------------------------------------------------

    def check_traced(self, graph: TracedGraph) -> None:
        """Raise if a traced loss contains an operation that is not allowed."""
        TracedLoss(graph)

    def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        base_model, model = self._named(model_id)
        self._retract(model_id)  # of a pass that failed
        self._use_threads(self._base(base_model))
        return model.step(options)

    def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        """Write a checkpoint and return its size in bytes."""
        base_model, model = self._named(model_id)
        kept = model.optimizer if optimizer else None
        return checkpoint.save(
            directory,
            model.adapter,
            base_model,
            kept,
            dtype=model.dtype,
            kernels=model.base.kernels.name,
        )

    def snapshot(self, model_id: str, directory: Path) -> Callable[[], int]:
        """Copy the current model, optimizer and gradients; return a function that writes them, from any thread."""
        base_model, model = self._named(model_id)
        adapter, optimizer = model.adapter.frozen_copy(), model.optimizer.frozen_copy()
        gradients = [
            None if parameter.grad is None else parameter.grad.clone()
            for parameter in model.optimizer.parameters
        ]
        return partial(
            checkpoint.save,
            directory,
            adapter,
            base_model,
            optimizer,
            gradients,
            dtype=model.dtype,
            kernels=model.base.kernels.name,
        )

    # -- sampling ----------------------------------------------------------------------------

    def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        *,
        model_id: str | None = None,
        directory: Path | None = None,
    ) -> None:
        """Open a sampler on frozen weights: those of a model now, of a checkpoint, or of the base model."""
        self._known_model(base_model)
        adapter = None
        if model_id is not None:
            trained_on, model = self._named(model_id)
            check_same_base(base_model, trained_on)
            adapter = model.adapter.frozen_copy()
        elif directory is not None:
            layers = self._base(base_model).language.layers
            saved = checkpoint.load(directory, largest=partial(_adapter_bytes, layers))
            adapter = self._adapter(saved, layers).frozen_copy()
        self.close_sampler(sampler_id)
        self._samplers[sampler_id] = _OpenSampler(base_model, adapter)

    def close_sampler(self, sampler_id: str) -> None:
        closed = self._samplers.pop(sampler_id, None)
        if closed is not None and closed.adapter is not None:
            self._base(closed.base_model).sampler.forget(closed.adapter)

    def add_sample(self, job_id: str, job: SampleJob) -> None:
        """Queue a job for its sampler; raises if the job is invalid."""
        sampler = self._samplers.get(job.sampler_id)
        if sampler is None:
            raise NotFoundError(f"There is no sampler {job.sampler_id!r:.200}.")
        self._base(sampler.base_model).sampler.add(job_id, job, sampler.adapter)

    def cancel_sample(self, job_id: str) -> None:
        for loaded in self._loaded.values():
            loaded.sampler.cancel(job_id)

    @property
    def sampling(self) -> bool:
        """Whether any sample is queued or running."""
        return any(loaded.sampler.busy for loaded in self._loaded.values())

    def sample_step(self) -> list[SampleEvent]:
        """Draw one token for every running sequence of every base model."""
        events: list[SampleEvent] = []
        for loaded in self._loaded.values():
            if loaded.sampler.busy:
                self._use_threads(loaded)
                events += loaded.sampler.step()
        return events

    # -- base models and lookups -------------------------------------------------------------

    def load(self, model: PreparedModel) -> None:
        """Load a base model into memory and add it to the known ones, unless loading fails."""
        self._in_memory(model)
        self._known[model.name] = model

    @property
    def dtypes(self) -> str:
        """The types of the matrix products of the models in memory."""
        found = {str(loaded.language.dtype) for loaded in self._loaded.values()}
        return ", ".join(sorted(name.removeprefix("torch.") for name in found)) or "float32"

    @property
    def kernels(self) -> str:
        """What computes between the matrix products: `native` or `torch`."""
        found = {loaded.language.kernels.name for loaded in self._loaded.values()}
        return ", ".join(sorted(found)) or TorchKernels.name

    def _known_model(self, name: str) -> PreparedModel:
        check_base(name, self._known)
        return self._known[name]

    def _base(self, name: str) -> _Loaded:
        """Return a base model; load it on first use."""
        return self._in_memory(self._known_model(name))

    def _in_memory(self, model: PreparedModel) -> _Loaded:
        if model.directory not in self._loaded:
            count = base_models.parameter_count(model)
            dtype = self._dtype
            if isinstance(dtype, str):
                dtype = dtype_for(dtype, self._device, count)
            kernels = kernels_for(torch.device(self._device), dtype, native=self._native)
            keep_half = dtype == torch.float32 and kernels.products.reads_half
            network: Any = read_llama(model, device=self._device, dtype=dtype, keep_half=keep_half)
            if network is None:
                network = base_models.load(model, device=self._device, dtype=dtype)
            with self._joining(model, network) as join:
                language = LanguageModel(
                    network, context_length=model.context_length, native=self._native, join=join
                )
            sampler = Sampler(
                language,
                end_tokens=model.eos_token_ids,
                detokenize=self._detokenize and partial(self._detokenize, model),
                grammars=Grammars(model.directory, language.vocab_size, model.eos_token_ids),
            )
            # More threads make a small model slower, especially on a busy machine.
            threads = 1 if count < SMALL_MODEL else self._threads
            self._loaded[model.directory] = _Loaded(language, sampler, threads)
            for loaded in self._loaded.values():
                loaded.sampler.cache_bytes = self._cache_bytes / len(self._loaded)
        return self._loaded[model.directory]

    def _joining(self, model: PreparedModel, network: Any) -> AbstractContextManager[Join]:
        """Where the weights of a model are kept: in memory that engines share, or in this process."""
        if self._shared_weights is None or not is_llama(network.config):
            return nullcontext(torch.cat)
        files = sorted(model.directory.glob("*.safetensors"))
        return self._shared_weights.joining(files, list(network.parameters()))

    def _use_threads(self, loaded: _Loaded) -> None:
        """Set the model's number of threads; it is fixed per model, because the last bit of sums depends on it."""
        if torch.get_num_threads() != loaded.threads:
            torch.set_num_threads(loaded.threads)

    def _named(self, model_id: str) -> tuple[str, TrainedModel]:
        if model_id not in self._models:
            raise NotFoundError(f"There is no model {model_id!r:.200}.")
        return self._models[model_id]

    def _model(self, model_id: str) -> TrainedModel:
        return self._named(model_id)[1]

    def _adapter(
        self, saved: checkpoint.LoadedCheckpoint, layers: dict[str, LoraLinear]
    ) -> Adapter:
        for name, (a, b) in saved.tensors.items():
            layer = layers.get(name)
            if layer is None or (layer.in_features, layer.out_features) != (a.shape[1], b.shape[0]):
                raise InvalidInputError(
                    f"does not fit this base model: {name} is missing or of another shape",
                    field="path",
                )
        # Use the order of a new adapter: the last bit of a norm depends on the order of its tensors.
        tensors = {name: saved.tensors[name] for name in layers if name in saved.tensors}
        return Adapter.of_tensors(saved.spec, tensors, self._device)


def _adapter_bytes(layers: Mapping[str, LoraLinear], rank: int) -> int:
    """Upper limit for an adapter's file in bytes: factors of every layer in the widest type, and their names."""
    numbers = sum(layer.in_features + layer.out_features for layer in layers.values())
    return 8 * rank * numbers + 1024 * len(layers) + (1 << 20)
