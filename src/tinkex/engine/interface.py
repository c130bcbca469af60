"""What a service asks of its engines: an interface of typed async methods.

The service knows nothing else of engines: not how many there are, nor in which process or on which machine they run.
`docs/architecture.md` names the implementations.

An engine keeps everything in memory and may die at any time. A caller that has loaded something into an engine holds an
`EngineLease` of it. When the engine dies, the lease is lost and the caller loads it again. Work inside `Engines.persist`
is retried after a death.

A `Path` is a directory of the service's own disk. An engine on another machine has to send the files' content: only
`restore_model`, `restore_snapshot`, `save_state`, `snapshot` and `open_sampler` read or write files. A directory that
a sampler was opened from never changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

from .catalog import Catalog
from .values import (
    AdamStep,
    LoraSpec,
    PassJob,
    PassResult,
    SampledResult,
    SampleJob,
    StreamedToken,
    TracedGraph,
)

__all__ = [
    "HOME",
    "IN_LINE",
    "EngineDiedError",
    "EngineFailedError",
    "EngineLease",
    "EngineState",
    "EngineStatus",
    "EngineStuckError",
    "Engines",
    "OnToken",
    "SamplingEngine",
    "Spot",
    "TrainingEngine",
    "Turn",
]

T = TypeVar("T")
EngineState = Literal["idle", "working"]
#: Requests in the queue of one engine at a time: with two, the engine never waits for the next one.
IN_LINE: Final = 2
OnToken = Callable[[StreamedToken], None]


class EngineDiedError(Exception):
    """An engine ended during a call, or has lost what the call names.

    `engine` and `life` say which death it was. `cause_known` says that this call is not the cause.
    """

    def __init__(
        self, message: str, *, engine: str = "", life: int = 0, cause_known: bool = False
    ) -> None:
        super().__init__(message)
        self.engine, self.life, self.cause_known = engine, life, cause_known


class EngineFailedError(RuntimeError):
    """An error in an engine that is not one of tinkex; `kind` is the name of its class, its traceback is a note."""

    def __init__(self, message: str, kind: str = "RuntimeError") -> None:
        super().__init__(message)
        self.kind = kind


class EngineStuckError(EngineDiedError):
    """The engine was killed because it made no progress on this call for `deadline` seconds."""

    def __init__(self, message: str, *, engine: str = "", life: int = 0, deadline: float) -> None:
        super().__init__(message, engine=engine, life=life)
        self.deadline = deadline


class EngineLease(Protocol):
    """Something that was loaded into an engine."""

    @property
    def lost(self) -> bool:
        """Whether its engine has died since; then it has to be loaded again."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A free place in the queue of an engine."""

    engine: str
    #: Whether the model is on another engine and would move to this one.
    moves: bool = False
    #: Whether the engine has nothing else to do.
    idle: bool = False
    #: Seconds that the model's key must be behind others to be moved to an engine that they use.
    price: float = 0.0


#: A place in the queue of the engine that holds the model.
HOME: Final = Spot("")


class Turn(Protocol):
    """A place in the queue of an engine, held while a request of a model runs."""

    def end(self) -> float:
        """Leave the queue; return the seconds that engines have worked on the request."""


class TrainingEngine(Protocol):
    """Trains adapters. The calls of one model run in the order in which they were made.

    A call for a model whose lease is lost raises `EngineDiedError`; for a model that was never loaded, `NotFoundError`.
    """

    def spots(self, model_ids: Sequence[str]) -> Sequence[Spot | None]:
        """Where the next request of each of these models would run soon; None where all queues are long.

        No call of these models may be in flight.
        """

    def take_turn(self, model_id: str, spot: Spot) -> Turn:
        """Join the queue of an engine. A new model is created there; another moves there with its next call."""

    async def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> EngineLease:
        """Create a new adapter; one of this name is replaced."""

    async def restore_model(
        self, model_id: str, base_model: str, directory: Path, *, optimizer: bool
    ) -> EngineLease:
        """Create a model from a checkpoint, with the saved optimizer or a new one."""

    async def restore_snapshot(
        self, model_id: str, base_model: str, directory: Path
    ) -> EngineLease:
        """Create a model from a snapshot, with optimizer and accumulated gradients."""

    async def unload_model(self, model_id: str) -> None:
        """Free a model at once, even while a pass runs. No error if no engine has it."""

    async def run_pass(self, model_id: str, request: PassJob) -> PassResult:
        """Run a forward or forward-backward pass; gradients are added only if the whole pass succeeds."""

    async def optim_step(self, model_id: str, options: AdamStep) -> dict[str, float]:
        """Apply the accumulated gradients; return the metrics of the step."""

    async def save_state(self, model_id: str, directory: Path, *, optimizer: bool) -> int:
        """Write a checkpoint and return its size in bytes."""

    async def snapshot(self, model_id: str, directory: Path) -> int:
        """Write the model as it is now, with optimizer and gradients, while later calls already run."""

    async def check_traced(self, graph: TracedGraph) -> None:
        """Raise if a traced loss contains an operation that is not allowed."""


class SamplingEngine(Protocol):
    """Samples from frozen weights. Samples have no order; they share the engine's batch."""

    async def open_sampler(
        self,
        sampler_id: str,
        base_model: str,
        directory: Path | None,
        *,
        trained_as: str | None = None,
    ) -> EngineLease:
        """Open a sampler on the weights in `directory`, or on the base model.

        `trained_as` names a model with the same weights at this moment: an engine that has it need not read the files.
        """

    async def close_sampler(self, sampler_id: str) -> None:
        """Free a sampler at once. No error if no engine has it open."""

    async def sample(self, job: SampleJob, on_token: OnToken | None = None) -> SampledResult:
        """Wait for all sequences of a job; cancelling this call cancels the job.

        If `job.stream` is set, `on_token` gets each token when it is drawn.
        """


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine, for people and metrics."""

    name: str
    #: Times that it was started, and whether it can work now.
    starts: int
    up: bool
    #: Seconds that it worked on training.
    busy_seconds: float
    #: Its process, if that is on this machine, and the machine otherwise.
    pid: int | None = None
    node: str = ""
    #: Bytes of memory, if its process is on another machine.
    memory: int | None = None
    #: Why it could not be started the last time, or that it makes no progress.
    trouble: str = ""
    kind: str = "torch"
    device: str = ""
    base_models: tuple[str, ...] = ()
    #: Models that it holds, training requests in its queue, samples in flight.
    models: int = 0
    in_line: int = 0
    samples: int = 0
    #: Differences between its logprobs and the trainer's: the number of compared tokens, the sum and the largest.
    drift_tokens: int = 0
    drift_sum: float = 0.0
    drift_max: float = 0.0

    @property
    def works(self) -> bool:
        """Whether it is up and not stuck."""
        return self.up and not self.trouble


class Engines(Protocol):
    """All engines of a service: the only way to reach them."""

    #: Whether the service is stopping: then no call is retried.
    stopping: bool

    @property
    def trainer(self) -> TrainingEngine: ...

    @property
    def sampler(self) -> SamplingEngine: ...

    @property
    def catalog(self) -> Catalog:
        """The base models."""

    async def start(self) -> None:
        """Start the engines and wait until the configured base models are in memory."""

    async def stop(self) -> None: ...

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which calls engines; retry it if an engine dies, until it is found to be the cause.

        `work` must load again what its leases say is lost.
        """

    def check_health(self) -> EngineState:
        """The state of the engines; raises a 503 if they cannot serve."""

    def status(self) -> Sequence[EngineStatus]: ...
