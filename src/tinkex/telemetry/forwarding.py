"""Training metrics for other tools: Weights & Biases, trackio, MLflow, TensorBoard, or a function of yours.

    with tinkex.telemetry.to_tensorboard("runs/cat"):
        train(client)

Events occur on the client's event loop, and a tool may make requests or write files. So metrics wait in a queue, and
a thread gives them to the tool. A tool that fails or is slow never delays or fails training.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from os import PathLike, fspath
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from tinkex.errors import ConfigError

from .bus import Handler, Subscriber
from .events import (
    Event,
    MetricsLogged,
    OperationException,
    OperationStart,
    TrainingPass,
    TrainingStep,
)
from .exceptions import without_keys

__all__ = ["Forwarder", "Sink", "to_mlflow", "to_sink", "to_tensorboard", "to_trackio", "to_wandb"]

_logger = logging.getLogger("tinkex")

#: Called with a step and the new metrics of that step.
Sink: TypeAlias = Callable[[int, Mapping[str, float]], object]
_Point: TypeAlias = tuple[int, dict[str, float]]

#: Most points that wait for the tool; further ones are dropped.
_MOST_WAITING: Final = 100_000
#: Seconds that the end of the block waits for the tool.
_FLUSH_TIMEOUT: Final = 60.0
_PASSES: Final = frozenset({"forward", "forward_backward", "forward_backward_custom"})


def to_sink(sink: Sink, *, done: int = 0) -> Forwarder:
    """Call `sink(step, metrics)` for the metrics of every training pass and step, and of `TrainingClient.log`.

    `done` is the number of steps that an earlier run of the loop has completed.
    """
    return Forwarder(lambda: nullcontext(sink), "the sink", done=done)


def to_wandb(project: str | None = None, *, done: int = 0, **settings: Any) -> Forwarder:
    """Forward training metrics to Weights & Biases; `settings` go to `wandb.init`.

    If a run is active, it is used and stays open.
    """
    wandb = _library("wandb")

    @contextmanager
    def opened() -> Iterator[Sink]:
        active = wandb.run
        run = nullcontext(active) if active else wandb.init(project=project, **settings)
        with run as writer:
            # With `log(step=…)`, wandb drops points whose step is lower than the last one.
            writer.define_metric("*", step_metric="step")
            yield lambda step, metrics: writer.log({**metrics, "step": step})

    return Forwarder(opened, "wandb", done=done)


def to_trackio(project: str, *, done: int = 0, **settings: Any) -> Forwarder:
    """Forward training metrics to trackio; `settings` go to `trackio.init`."""
    trackio = _library("trackio")

    @contextmanager
    def opened() -> Iterator[Sink]:
        run = trackio.init(project=project, **settings)
        try:
            yield lambda step, metrics: run.log(dict(metrics), step=step)
        finally:
            run.finish()

    return Forwarder(opened, "trackio", done=done)


def to_mlflow(experiment: str | None = None, *, done: int = 0, **settings: Any) -> Forwarder:
    """Forward training metrics to MLflow; `settings` go to `mlflow.start_run`.

    If a run is active, it is used and stays open. MLflow allows few characters in names; others become `_`.
    """
    mlflow = _library("mlflow")

    @contextmanager
    def opened() -> Iterator[Sink]:
        active = mlflow.active_run()
        if active is None and experiment is not None:
            mlflow.set_experiment(experiment)
        with nullcontext(active) if active else mlflow.start_run(**settings) as run:
            run_id = run.info.run_id  # the active run is known only to the thread that started it

            def write(step: int, metrics: Mapping[str, float]) -> None:
                named = {re.sub(r"[^\w./ -]", "_", name): each for name, each in metrics.items()}
                mlflow.log_metrics(named, step=step, run_id=run_id)

            yield write

    return Forwarder(opened, "mlflow", done=done)


def to_tensorboard(directory: str | PathLike[str], *, done: int = 0) -> Forwarder:
    """Write training metrics to `directory`, for `tensorboard --logdir`."""
    summary = _library("tensorboard.summary")

    @contextmanager
    def opened() -> Iterator[Sink]:
        writer = summary.Writer(fspath(directory))

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        try:
            yield write
        finally:
            writer.close()

    return Forwarder(opened, "tensorboard", done=done)


def _library(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ConfigError(f"{name} cannot be imported ({error}): pip install {name}") from error


class Forwarder(Subscriber):
    """Gives training metrics to a tool from `attach` to `detach`, or inside a `with` block.

    Calls made in that time count. Each model counts its own optimizer steps. The metrics of the first model have
    their own names; those of other models begin with the model's id. Those of `forward` begin with `forward/`.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Sink]],
        name: str,
        *,
        done: int = 0,
        flush_timeout: float = _FLUSH_TIMEOUT,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self._opened = opened
        self._name = name
        self._done = done
        self._flush_timeout = flush_timeout
        self._most_waiting = most_waiting
        self._steps: dict[str, int] = {}  # by model
        self._prefixes: dict[str, str] = {}  # by model
        self._calls: dict[int, int] = {}  # the step of each call in flight
        self._warned: set[str] = set()
        # None ends the thread. `put` of a SimpleQueue never blocks.
        self._waiting: SimpleQueue[_Point | None] = SimpleQueue()
        self._tool: AbstractContextManager[Sink] | None = None
        self._thread: threading.Thread | None = None

    # -- from attach to detach ---------------------------------------------------------------

    def attach(self) -> Self:
        if self._thread is None:
            self._tool = self._opened()
            sink = self._tool.__enter__()
            self._waiting = SimpleQueue()
            self._thread = threading.Thread(
                target=self._run, args=(sink, self._waiting), name="tinkex-forwarding", daemon=True
            )
            self._thread.start()
        return super().attach()

    def detach(self) -> None:
        self._end(None, None, None)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(type(error) if error else None, error, trace)

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until the tool has everything, then close it; it gets the exception of the block, if any."""
        super().detach()
        thread, tool, self._thread, self._tool = self._thread, self._tool, None, None
        if thread is None or tool is None:
            return
        self._waiting.put(None)
        thread.join(self._flush_timeout)
        if thread.is_alive():
            self._warn("is too slow: %d points were not forwarded", self._waiting.qsize())
            return
        try:
            tool.__exit__(kind, error, trace)
        except Exception as problem:
            if problem is not error:
                self._warn("could not be closed: %s", _told(problem))

    # -- on the thread -----------------------------------------------------------------------

    def _run(self, sink: Sink, waiting: SimpleQueue[_Point | None]) -> None:
        while (point := waiting.get()) is not None:
            try:
                sink(*point)
            except Exception as error:
                self._warn("does not accept metrics: %s", _told(error))

    def _warn(self, message: str, *args: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _logger.warning(f"Metrics for {self._name} (logged once): it {message}", *args)

    # -- on the client's event loop ----------------------------------------------------------

    def handlers(self) -> Mapping[type[Event], Handler]:
        return {
            OperationStart: self._started,
            OperationException: self._failed,
            TrainingPass: self._finished,
            TrainingStep: self._finished,
            MetricsLogged: lambda event: self._put(event, event.step, event.metrics),
        }

    def _started(self, event: OperationStart) -> None:
        """Calls of a model start in order; their results may come in another order."""
        if event.operation not in _PASSES | {"optim_step"}:
            return
        model = _model(event)
        self._prefix(model)
        steps = self._steps.setdefault(model, self._done)
        if event.operation == "optim_step":
            self._steps[model] = steps + 1
        self._calls[event.id] = steps if event.operation == "forward" else steps + 1

    def _failed(self, event: OperationException) -> None:
        self._calls.pop(event.id, None)

    def _finished(self, event: TrainingPass | TrainingStep) -> None:
        step = self._calls.pop(event.id, None)
        if step is not None:  # None: called before `attach`
            self._put(event, step, event.metrics, "forward/" * (event.operation == "forward"))

    def _put(self, event: Event, step: int, metrics: Mapping[str, float], kind: str = "") -> None:
        prefix = self._prefix(_model(event)) + kind
        named = {prefix + name: value for name, value in metrics.items()}
        if self._waiting.qsize() >= self._most_waiting:
            self._warn("is too slow: metrics are dropped while %d points wait", self._most_waiting)
        elif named:
            self._waiting.put((step, named))

    def _prefix(self, model: str) -> str:
        return self._prefixes.setdefault(model, f"{model}/" if self._prefixes else "")


def _model(event: Event) -> str:
    return str(event.metadata.get("model_id", ""))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {without_keys(str(error))}"
