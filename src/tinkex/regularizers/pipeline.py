"""Combines a base loss and regularizers: their values, their gradients, and errors that name the term at fault."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, time
from typing import Any

import torch

from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.calls import current_metadata
from tinkex.telemetry.events import (
    CustomLossException,
    CustomLossStart,
    CustomLossStop,
    Event,
    RegularizerException,
    RegularizerStart,
    RegularizerStop,
)
from tinkex.types import (
    BaseLossOutput,
    CustomLossOutput,
    Datum,
    RegularizerOutput,
    RegularizerSpec,
)

from . import protocol
from .errors import CustomLossError
from .executor import Executor, Outcome
from .gradients import Gradients, norm, weighted_sum
from .protocol import Logprobs, LossFn
from .terms import Point, Term

__all__ = ["Evaluation", "Pipeline", "grad_norm_for_regularizer", "total_grad_norm"]

logger = logging.getLogger("tinkex")


@dataclass(frozen=True)
class Evaluation:
    """A composed loss at one point: as a tensor, by parts, and with its gradient if requested."""

    loss: torch.Tensor
    output: CustomLossOutput
    gradients: list[torch.Tensor] | None


@dataclass(frozen=True)
class Pipeline:
    """`base loss + Σ weight · regularizer`.

    The base loss runs first, then the regularizers in parallel, `max_concurrency` at a time (default: one per processor
    and at least eight), or one after another without `parallel`. Each function may take `timeout` seconds. The first
    error, in the order of the list, is raised as a `CustomLossError`. The thread that waits for the loss emits the
    telemetry events.
    """

    regularizers: Sequence[RegularizerSpec | Mapping[str, Any]] = ()
    track_grad_norms: bool = False
    parallel: bool = True
    timeout: float | None = 30.0
    max_concurrency: int | None = None
    _specs: tuple[RegularizerSpec, ...] = field(init=False, repr=False)
    _executor: Executor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_specs", protocol.checked(self.regularizers))
        executor = Executor(self.parallel, self.timeout, self.max_concurrency)
        object.__setattr__(self, "_executor", executor)

    def compute(
        self, data: Sequence[Datum], logprobs: Logprobs, base_loss_fn: LossFn
    ) -> CustomLossOutput:
        """The composed loss by parts. `logprobs` is one tensor, or a list with one per datum."""
        return self.evaluate(data, logprobs, base_loss_fn).output

    def evaluate(
        self,
        data: Sequence[Datum],
        logprobs: Logprobs,
        base_loss_fn: LossFn,
        *,
        differentiate: bool = False,
    ) -> Evaluation:
        """The same with the loss as a tensor.

        With `differentiate` also its gradient at `logprobs`. Then a term without a gradient is an error unless its
        weight is 0 (it is then only observed), and so is a datum on which no term depends.
        """
        count = len(self._specs)
        began = monotonic()
        _tell(CustomLossStart, time(), count, self.track_grad_norms)
        try:
            protocol.check_loss_fn(base_loss_fn)
            point = Point.of(data, logprobs, track=differentiate or self.track_grad_norms)
            evaluation = self._evaluate(point, base_loss_fn, strict=differentiate)
        except Exception as error:
            _tell(CustomLossException, monotonic() - began, str(error))
            raise
        totals = (evaluation.output.loss_total, evaluation.output.regularizer_total)
        _tell(CustomLossStop, monotonic() - began, *totals, count)
        return evaluation

    def _evaluate(self, point: Point, base_loss_fn: LossFn, *, strict: bool) -> Evaluation:
        (outcome,) = self._executor.run([partial(point.term, base_loss_fn, None, strict=strict)])
        base = self._finished(outcome, None)
        terms, outputs = [(1.0, base)], {}
        for term, output in self._regularized(point, strict=strict):
            terms.append((float(output.weight), term))
            outputs[output.name] = output
        total = torch.stack([weight * term.loss.to(base.loss) for weight, term in terms]).sum()
        if not torch.isfinite(total):
            raise CustomLossError(f"the loss with its regularizers is {float(total.detach())}")
        known = [(weight, term.gradients) for weight, term in terms if term.gradients is not None]
        if strict:
            _check_all_count([parts for weight, parts in known if weight])
        gradient = None if point.leaves is None else weighted_sum(known, point.leaves)
        tracked = self.track_grad_norms
        taken_apart = CustomLossOutput(
            loss_total=float(total.detach()),
            base_loss=BaseLossOutput(
                base.value,
                norm(base.gradients) if tracked and base.gradients is not None else None,
                base.metrics,
            ),
            regularizers=outputs,
            total_grad_norm=norm(gradient) if tracked and gradient and known else None,
        )
        return Evaluation(total, taken_apart, gradient)

    def _regularized(
        self, point: Point, *, strict: bool
    ) -> Iterator[tuple[Term, RegularizerOutput]]:
        outcomes = self._executor.run(
            [
                partial(
                    point.term,
                    partial(protocol.call, spec, self.timeout),
                    spec.name,
                    strict=strict and spec.weight > 0,
                )
                for spec in self._specs
            ]
        )
        if self.parallel:
            for spec in self._specs:
                _tell(RegularizerStart, *_named(spec), time(), spec.is_async)
        for spec in self._specs:
            if not self.parallel:
                _tell(RegularizerStart, *_named(spec), time(), spec.is_async)
            outcome = next(outcomes)
            try:
                term = self._finished(outcome, spec.name)
            except CustomLossError as error:
                outcomes.close()  # do not start the remaining ones
                _tell(RegularizerException, *_named(spec), outcome.seconds, str(error))
                raise
            output = RegularizerOutput.of(
                spec, term.value, term.metrics, self._tracked_norm(spec, term)
            )
            values = (output.value, output.contribution, output.grad_norm)
            _tell(RegularizerStop, *_named(spec), outcome.seconds, *values, spec.is_async)
            yield term, output

    def _finished(self, outcome: Outcome[Term], name: str | None) -> Term:
        if outcome.error is not None:
            raise outcome.error
        if outcome.result is None:
            raise protocol.late(self.timeout, name)
        return outcome.result

    def _tracked_norm(self, spec: RegularizerSpec, term: Term) -> float | None:
        if not self.track_grad_norms:
            return None
        if term.gradients is None:
            logger.warning("The regularizer %r does not depend on the logprobs.", spec.name)
            return 0.0
        return norm(term.gradients)


def total_grad_norm(
    data: Sequence[Datum],
    logprobs: Logprobs,
    base_loss_fn: LossFn,
    regularizers: Sequence[RegularizerSpec | Mapping[str, Any]] = (),
) -> float:
    """‖∂(base + Σ weight · regularizer)/∂logprobs‖; 0 if nothing depends on the logprobs."""
    pipeline = Pipeline(regularizers, track_grad_norms=True, timeout=None)
    return pipeline.compute(data, logprobs, base_loss_fn).total_grad_norm or 0.0


def grad_norm_for_regularizer(
    spec: RegularizerSpec | Mapping[str, Any], data: Sequence[Datum], logprobs: Logprobs
) -> float:
    """‖∂regularizer/∂logprobs‖, without its weight; 0, with a warning, if it does not depend on them."""
    pipeline = Pipeline([spec], track_grad_norms=True, timeout=None)
    (output,) = pipeline.compute(
        data, logprobs, lambda *_: (torch.zeros(()), {})
    ).regularizers.values()
    return output.grad_norm or 0.0


def _check_all_count(terms: Sequence[Gradients]) -> None:
    """Refuse a datum on which no term depends: this is more likely a mistake than intended."""
    for index, parts in enumerate(zip(*terms, strict=True)):
        if all(part is None for part in parts):
            raise CustomLossError(
                f"does not depend on the logprobs of datum {index}, so it would not be trained; leave the datum "
                f"out, or add 0 * logprobs[{index}].sum() to the loss if that is intended"
            )


def _tell(kind: type[Event], *facts: Any) -> None:
    if wants(kind):
        emit(kind(*facts, metadata=current_metadata()))


def _named(spec: RegularizerSpec) -> tuple[str, float]:
    return spec.name, spec.weight
