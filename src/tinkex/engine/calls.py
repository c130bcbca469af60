"""The calls that cross the pipe to an engine's process: one class per call, with its arguments and its result type.

A service writes a `CallFrame`; the engine's loop runs its call and writes a `Reply`, and `Token`s before the reply of a
streamed sample.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from .base_models import PreparedModel
from .parcels import Parcel, PublishedAdapter
from .shards import ShardSums
from .values import (
    AdamStep,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleEvent,
    SampleJob,
    StreamedToken,
    TracedGraph,
)

__all__ = [
    "AddBaseModel",
    "AddSample",
    "CallFrame",
    "CancelSample",
    "CheckTraced",
    "CloseSampler",
    "CreateModel",
    "DirectCall",
    "Engine",
    "EngineCall",
    "FinishPass",
    "HelpPass",
    "MoveOut",
    "OpenSampler",
    "OptimStep",
    "PassCall",
    "Publish",
    "Reply",
    "RestoreModel",
    "RestoreSnapshot",
    "RunPass",
    "RunShards",
    "SaveState",
    "SharedPasses",
    "TakeSnapshot",
    "Token",
    "UnloadModel",
]

R_co = TypeVar("R_co", covariant=True)


class Engine(Protocol):
    """An engine in this process, called from one thread: torch, or the fake."""

    def load(self, model: PreparedModel) -> None: ...
    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None: ...
    def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> None: ...
    def restore_snapshot(self, model_id: str, base_model: str, directory: Path) -> None: ...
    def unload_model(self, model_id: str) -> None: ...
    def run_pass(self, model_id: str, request: PassJob) -> Generator[None, None, PassResult]: ...
    def check_traced(self, graph: TracedGraph) -> None: ...
    def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]: ...
    def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int: ...
    def snapshot(self, model_id: str, directory: Path) -> Callable[[], int]: ...
    def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        *,
        model_id: str | None = None,
        directory: Path | None = None,
    ) -> None: ...
    def close_sampler(self, sampler_id: str) -> None: ...
    def add_sample(self, job_id: str, job: SampleJob) -> None: ...
    def cancel_sample(self, job_id: str) -> None: ...
    @property
    def sampling(self) -> bool: ...
    def sample_step(self) -> list[SampleEvent]: ...
    @property
    def shared_passes(self) -> SharedPasses | None:
        """None if this engine always computes a whole pass."""


class SharedPasses(Protocol):
    """The part of an engine that works on one pass together with other engines of a pool."""

    def publish(self, model_id: str) -> PublishedAdapter: ...
    def run_shards(
        self, model_id: str, request: PassJob, numbers: Sequence[int]
    ) -> Generator[None, None, ShardSums[Parcel]]: ...
    def help_pass(
        self, adapter: PublishedAdapter, request: PassJob, numbers: Sequence[int]
    ) -> Generator[None, None, ShardSums[Parcel]]: ...
    def finish_pass(
        self, model_id: str, request: PassJob, parts: Sequence[ShardSums[Parcel]]
    ) -> PassResult: ...


class EngineCall(Generic[R_co]):
    """A call with a result of a known type.

    Calls in the lane `line` run one after another. A call in `now` is quick and does not wait for training: it runs
    between two micro-batches of a pass. Samples join the sampling batch. Only a `timed` call counts towards the
    engine's deadline.
    """

    __slots__ = ()
    lane: ClassVar[Literal["line", "now"]] = "line"
    timed: ClassVar[bool] = True


class DirectCall(EngineCall[R_co]):
    """A call that is one method of the engine."""

    __slots__ = ()

    def run(self, engine: Engine) -> R_co:
        raise NotImplementedError


class PassCall(EngineCall[R_co]):
    """Runs one micro-batch at a time; the engine samples between them."""

    __slots__ = ()

    def begin(self, engine: Engine) -> Generator[None, None, R_co]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AddBaseModel(EngineCall[PreparedModel]):
    """Prepare a base model, which may download it, and load it."""

    timed = False
    name: str


@dataclass(frozen=True, slots=True)
class CreateModel(DirectCall[None]):
    model_id: str
    base_model: str
    spec: LoraSpec

    def run(self, engine: Engine) -> None:
        engine.create_model(self.model_id, self.base_model, self.spec)


@dataclass(frozen=True, slots=True)
class RestoreModel(DirectCall[None]):
    model_id: str
    base_model: str
    directory: Path
    optimizer: bool

    def run(self, engine: Engine) -> None:
        engine.restore_model(
            self.model_id, self.base_model, self.directory, optimizer=self.optimizer
        )


@dataclass(frozen=True, slots=True)
class RestoreSnapshot(DirectCall[None]):
    model_id: str
    base_model: str
    directory: Path

    def run(self, engine: Engine) -> None:
        engine.restore_snapshot(self.model_id, self.base_model, self.directory)


@dataclass(frozen=True, slots=True)
class UnloadModel(DirectCall[None]):
    lane = "now"
    model_id: str

    def run(self, engine: Engine) -> None:
        engine.unload_model(self.model_id)


@dataclass(frozen=True, slots=True)
class RunPass(PassCall[PassResult]):
    model_id: str
    request: PassJob

    def begin(self, engine: Engine) -> Generator[None, None, PassResult]:
        return engine.run_pass(self.model_id, self.request)


@dataclass(frozen=True, slots=True)
class Publish(DirectCall[PublishedAdapter]):
    model_id: str

    def run(self, engine: Engine) -> PublishedAdapter:
        return _shared(engine).publish(self.model_id)


@dataclass(frozen=True, slots=True)
class RunShards(PassCall[ShardSums[Parcel]]):
    model_id: str
    request: PassJob
    numbers: Sequence[int]

    def begin(self, engine: Engine) -> Generator[None, None, ShardSums[Parcel]]:
        return _shared(engine).run_shards(self.model_id, self.request, self.numbers)


@dataclass(frozen=True, slots=True)
class HelpPass(PassCall[ShardSums[Parcel]]):
    adapter: PublishedAdapter
    request: PassJob
    numbers: Sequence[int]

    def begin(self, engine: Engine) -> Generator[None, None, ShardSums[Parcel]]:
        return _shared(engine).help_pass(self.adapter, self.request, self.numbers)


@dataclass(frozen=True, slots=True)
class FinishPass(DirectCall[PassResult]):
    model_id: str
    request: PassJob
    parts: Sequence[ShardSums[Parcel]]

    def run(self, engine: Engine) -> PassResult:
        return _shared(engine).finish_pass(self.model_id, self.request, self.parts)


def _shared(engine: Engine) -> SharedPasses:
    if engine.shared_passes is None:
        raise TypeError("this engine cannot help with passes of other engines")
    return engine.shared_passes


@dataclass(frozen=True, slots=True)
class CheckTraced(DirectCall[None]):
    lane = "now"
    graph: TracedGraph

    def run(self, engine: Engine) -> None:
        engine.check_traced(self.graph)


@dataclass(frozen=True, slots=True)
class OptimStep(DirectCall[dict[str, float]]):
    model_id: str
    options: AdamStep

    def run(self, engine: Engine) -> dict[str, float]:
        return engine.optim_step(self.model_id, self.options)


@dataclass(frozen=True, slots=True)
class SaveState(DirectCall[int]):
    model_id: str
    directory: Path
    optimizer: bool

    def run(self, engine: Engine) -> int:
        return engine.save_state(self.model_id, self.directory, optimizer=self.optimizer)


@dataclass(frozen=True, slots=True)
class TakeSnapshot(EngineCall[int]):
    """Copies the model when its turn comes; a thread writes the copy while the engine works, and then replies."""

    timed = False
    model_id: str
    directory: Path

    def copy(self, engine: Engine) -> Callable[[], int]:
        return engine.snapshot(self.model_id, self.directory)


@dataclass(frozen=True, slots=True)
class MoveOut(TakeSnapshot):
    """As `TakeSnapshot`, for a model without other calls in flight: it does not wait for calls of other models."""

    lane = "now"


@dataclass(frozen=True, slots=True)
class OpenSampler(DirectCall[None]):
    lane = "now"
    sampler_id: str
    base_model: str
    model_id: str | None = None
    directory: Path | None = None

    def run(self, engine: Engine) -> None:
        engine.open_sampler(
            self.sampler_id, self.base_model, model_id=self.model_id, directory=self.directory
        )


@dataclass(frozen=True, slots=True)
class CloseSampler(DirectCall[None]):
    lane = "now"
    sampler_id: str

    def run(self, engine: Engine) -> None:
        engine.close_sampler(self.sampler_id)


@dataclass(frozen=True, slots=True)
class AddSample(EngineCall[SampledResult]):
    job: SampleJob


@dataclass(frozen=True, slots=True)
class CancelSample(EngineCall[None]):
    """Has no reply."""

    lane = "now"
    call_id: int


class CallFrame(NamedTuple):
    """A tuple, because it is made and pickled for every call."""

    call_id: int
    call: EngineCall[object]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result or error of a call, and the seconds that the engine worked on it."""

    call_id: int
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Token(StreamedToken):
    """A token of the streamed sample `call_id`."""

    call_id: int = field(kw_only=True)
