"""Continuous batching: continuations of many requests, adapters and users join and leave one batch at any step.

A step is scheduled, run and postprocessed: the scheduler decides what is read and keeps track of the pages, the
runner computes logits, and the sampler draws tokens and reports them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from . import drawing
from .batch_scheduler import BatchScheduler, Fork, Step
from .checks import can_overflow, check_job, lacks_memory, not_finite, overflowing
from .continuations import Continuation, SamplingRequest
from .decoder import decoder_for
from .grammars import Effort, Grammars
from .lora import Adapter
from .pages import PagePool
from .processors import shaping_of
from .runner import Runner
from .trainer import LanguageModel
from .values import Constraint, SampledResult, SampleEvent, SampleJob

__all__ = ["Sampler"]

logger = logging.getLogger("tinkex.engine")


class Sampler:
    """All sampling on one base model.

    The cache stays within `cache_bytes`; one continuation always runs, even if it needs more.
    """

    def __init__(
        self,
        base: LanguageModel,
        *,
        end_tokens: Sequence[int],
        detokenize: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
        max_sequences: int = 64,
        prefill_tokens: int | None = None,
        page_tokens: int | None = None,
        cache_bytes: float = inf,
    ) -> None:
        choices = base.choices
        self._base = base
        self._page = page_tokens or choices.page_tokens
        self._runner = Runner(decoder_for(base, self._page), choices.logit_positions)
        self._end_tokens = frozenset(end_tokens)
        self._detokenize = detokenize
        self._grammars = grammars
        self._cache_bytes = cache_bytes
        self._scheduler = BatchScheduler(
            self._pool(),
            max_sequences=max_sequences,
            prefill_tokens=prefill_tokens or choices.prefill_tokens,
            share_prefixes=self._runner.decoder.shares_prefixes,
        )
        self._closed: list[Adapter] = []

    @property
    def cache_bytes(self) -> float:
        return self._cache_bytes

    @cache_bytes.setter
    def cache_bytes(self, value: float) -> None:
        self._cache_bytes = value
        self._scheduler.pool.budget = value / self._runner.decoder.page_bytes

    def _pool(self) -> PagePool:
        return PagePool(self._page, self._cache_bytes / self._runner.decoder.page_bytes)

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def depth(self) -> tuple[int, int]:
        """Number of waiting requests and of continuations in the batch."""
        return self._scheduler.depth

    # -- queue -------------------------------------------------------------------------------

    def add(self, job_id: str, job: SampleJob, adapter: Adapter | None) -> None:
        """Queue a job; raises if the job is invalid."""
        check_job(
            job,
            vocab_size=self._base.vocab_size,
            context_length=self._base.context_length,
            detokenize=self._detokenize,
        )
        if job.constraint is not None:
            self._check_constraint(job.constraint)
        if adapter is not None and not adapter.is_finite:
            raise not_finite(job, adapter)
        limit = self._base.context_length - len(job.prompt_T)
        if job.max_tokens is not None:
            limit = min(limit, job.max_tokens)
        stops = self._end_tokens if job.stop_tokens is None else frozenset(job.stop_tokens)
        # Every token has at least one byte, so a stop string spans at most as many tokens as it has bytes.
        window = max((len(text.encode()) for text in job.stop_texts), default=0) + 4
        matcher = None
        if self._grammars is not None:
            matcher = partial(self._grammars.matcher, effort=Effort())
        shaping = partial(shaping_of, job, self._base.vocab_size, stops, matcher)
        self._scheduler.add(
            SamplingRequest(job_id, job, adapter, stops, window, limit, job.num_samples, shaping)
        )

    def _check_constraint(self, constraint: Constraint) -> None:
        field = f"sampling_params.{constraint.kind}"
        if self._grammars is None:
            raise InvalidInputError("constraints need a tokenizer", field=field)
        self._grammars.check(constraint)

    def cancel(self, job_id: str) -> None:
        request = self._scheduler.get(job_id)
        if request is not None:
            self._scheduler.drop(request)
            if not self.busy:  # no further step will do this
                self._tidy()

    def forget(self, adapter: Adapter) -> None:
        """Drop the tensors prepared for an adapter, once no running request uses it."""
        self._closed.append(adapter)
        self._forget_closed()

    def _forget_closed(self) -> None:
        """Drop the tensors of closed adapters that no request uses."""
        used = {id(request.adapter) for request in self._scheduler.requests()}
        for adapter in self._closed:
            if id(adapter) not in used:
                self._runner.decoder.forget(adapter)
        self._closed = [adapter for adapter in self._closed if id(adapter) in used]

    # -- one step ----------------------------------------------------------------------------

    def step(self) -> list[SampleEvent]:
        """Admit continuations, read prompts, draw tokens; return streamed tokens, results and errors."""
        events: list[SampleEvent] = []
        try:
            step = self._scheduler.schedule()
            if step.chunks:
                logits_BV, failed = self._runner.run(step)
                self._postprocess(step, logits_BV, failed, events)
        except Exception as error:
            if _device_is_lost(error) or not self._scheduler.running:
                raise
            self._recover(error, events)
        self._tidy()
        return events

    def _tidy(self) -> None:
        self._runner.leave(self._scheduler.departed)
        if not self.busy:
            self._scheduler.lift_limit()
            if self._scheduler.pool.held > self._scheduler.pool.budget:
                self._empty_cache()
        if self._closed:
            self._forget_closed()

    def _empty_cache(self) -> None:
        self._runner.decoder.release()
        self._scheduler.pool = self._pool()

    def _postprocess(
        self,
        step: Step,
        logits_BV: Tensor,
        failed: Iterable[SamplingRequest],
        events: list[SampleEvent],
    ) -> None:
        for request in failed:
            request.failure = not_finite(request.job, request.adapter)
        forks = self._scheduler.advance(step.chunks)
        self._runner.fork(forks)
        drawing_for = [chunk.continuation for chunk in step.chunks if chunk.completes]
        if forks:
            drawing_for, logits_BV = _with_forks(drawing_for, logits_BV, forks)
        if drawing_for:
            self._draw(drawing_for, logits_BV, events)
        self._end(drawing_for, events)
        for chunk in step.chunks:
            if chunk.continuation.request.failure is not None:
                self._fail(chunk.continuation.request, events)

    def _draw(
        self, drawing_for: Sequence[Continuation], logits_BV: Tensor, events: list[SampleEvent]
    ) -> None:
        # Drawing changes the logits: whether the model or the parameters of a request spoil them is only known before.
        sound = {
            row
            for row, one in enumerate(drawing_for)
            if can_overflow(one.request.job) and bool(logits_BV[row].isfinite().all())
        }
        drawn = drawing.choose(
            logits_BV,
            [one.request.job for one in drawing_for],
            [one.random for one in drawing_for],
            [one.shaping for one in drawing_for],
        )
        for row, one in enumerate(drawing_for):
            if one.request.limit <= 0:
                one.stop_reason = "length"
            elif not isfinite(drawn.logprobs[row]):
                job, adapter = one.request.job, one.request.adapter
                one.request.failure = overflowing(job) if row in sound else not_finite(job, adapter)
            else:
                self._append(one, drawn.tokens[row], drawn.logprobs[row], logits_BV[row], events)
                one.kept_mass.append(drawn.kept_mass[row])

    def _append(
        self,
        one: Continuation,
        token: int,
        logprob: float,
        logits_V: Tensor,
        events: list[SampleEvent],
    ) -> None:
        request = one.request
        stopped = token in request.stops or self._stop_text(one, token)
        if one.shaping is not None:
            stopped = one.shaping.take(token) or stopped
            request.failure = request.failure or one.shaping.failure
        if request.job.topk_sample_logprobs:
            normalizer = logits_V[token, None].double() - logprob
            alternatives = request.job.topk_sample_logprobs
            one.topk.append(drawing.topk(logits_V, alternatives, normalizer))
        one.tokens.append(token)
        one.logprobs.append(logprob)
        if request.job.stream:
            topk = one.topk[-1] if one.topk else None
            drawn = SampleEvent(request.job_id, None, None, one.index, token, logprob, topk)
            events.append(drawn)
        if stopped:
            one.stop_reason = "stop"
        elif len(one.tokens) >= request.limit:
            one.stop_reason = "length"

    def _stop_text(self, one: Continuation, token: int) -> bool:
        texts = one.request.job.stop_texts
        if not texts or self._detokenize is None:
            return False
        tail = self._detokenize([*one.tokens[1 - one.request.window :], token])
        return any(text in tail for text in texts)

    def _end(self, drawing_for: Iterable[Continuation], events: list[SampleEvent]) -> None:
        """Report continuations that are complete and requests that failed."""
        for one in drawing_for:
            if one.request.failure is not None:
                self._fail(one.request, events)
            elif one.stop_reason is not None:
                self._finish(one, events)

    def _finish(self, one: Continuation, events: list[SampleEvent]) -> None:
        if self._scheduler.finish(one):
            events.append(SampleEvent(one.request.job_id, result=_result(one.request)))

    def _fail(self, request: SamplingRequest, events: list[SampleEvent]) -> None:
        if self._scheduler.get(request.job_id) is request:
            events.append(SampleEvent(request.job_id, error=request.failure))
            self._scheduler.drop(request)

    def _recover(self, error: Exception, events: list[SampleEvent]) -> None:
        """After a failed step, usually out of memory: read every continuation again, in smaller batches.

        Each failure halves the batch. So the continuation that causes it ends up alone, and only its request fails.
        """
        tried = self._scheduler.empty()
        longest = max((one.text_length for one in tried), default=0)
        failed = f"A step with {len(tried)} sequences of at most {longest} tokens failed."
        logger.warning(failed, exc_info=error)
        self._empty_cache()
        unfinished = [one for one in tried if one.stop_reason is None]
        for one in tried:
            if one.stop_reason is not None:
                self._finish(one, events)
        if len(tried) > 1:
            self._scheduler.retry_smaller(unfinished)
            return
        self._scheduler.lift_limit()
        for one in unfinished:
            failure = _too_long(longest) if lacks_memory(error) else error
            events.append(SampleEvent(one.request.job_id, error=failure))
            self._scheduler.drop(one.request)


def _with_forks(
    drawing_for: Sequence[Continuation], logits_BV: Tensor, forks: Iterable[Fork]
) -> tuple[list[Continuation], Tensor]:
    """Add the continuations that start with the text of another one: they draw from the same logits."""
    row_of = {one: row for row, one in enumerate(drawing_for)}
    order = [(row_of[one], one) for one in drawing_for]
    order += [(row_of[fork.source], fork.target) for fork in forks]
    order.sort(key=lambda each: each[0])  # stable: the source comes first
    rows = torch.tensor([row for row, _ in order])
    return [one for _, one in order], logits_BV.index_select(0, rows)


def _device_is_lost(error: Exception) -> bool:
    """Whether the device is unusable until the process restarts."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def _too_long(length: int) -> RequestFailedError:
    return RequestFailedError(
        f"There is too little memory to sample after {length} tokens, even one sequence alone; "
        "send a shorter prompt.",
        category=RequestErrorCategory.Server,
    )


def _result(request: SamplingRequest) -> SampledResult:
    result = request.prompt or SampledResult([], [], [])
    result.cached_tokens = request.cached_tokens
    ordered = sorted(request.started, key=lambda one: one.index)
    for one in ordered:
        assert one.stop_reason is not None
        result.tokens.append(np.array(one.tokens, np.int32))
        result.logprobs.append(np.array(one.logprobs, np.float32))
        result.stop_reasons.append(one.stop_reason)
    k = request.job.topk_sample_logprobs
    if k:
        result.topk_sampled = [
            (
                np.array([ids for ids, _ in one.topk], np.int32).reshape(-1, k),
                np.array([values for _, values in one.topk], np.float32).reshape(-1, k),
            )
            for one in ordered
        ]
    if request.job.kept_mass:
        result.kept_mass = [np.array(one.kept_mass, np.float32) for one in ordered]
    return result
