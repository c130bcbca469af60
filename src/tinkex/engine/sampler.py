"""Continuous batching: sequences of many requests, adapters and users in one batch, joining and leaving it freely.

A step is: admit what waits and fits, read its prompts, then draw one token for every sequence under way. The
bookkeeping knows lengths and slots; the decoder knows the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from . import drawing
from .checks import check_job
from .decoder import decoder_for
from .llama import Rows
from .lora import Adapter
from .trainer import LanguageModel
from .values import Array, SampledResult, SampleEvent, SampleJob

__all__ = ["Sampler"]

#: Positions whose logits exist at one time while prompts are scored.
_LOGIT_ROWS: Final = 256
_EMPTY: Final = -99999.0


@dataclass(slots=True)
class _Sequence:
    """One continuation under way."""

    request: _Request
    index: int
    random: np.random.Generator
    length: int = 0  # positions in the cache
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[Array, Array]] = field(default_factory=list)
    stop_reason: Any = None


@dataclass(slots=True)
class _Request:
    job_id: str
    job: SampleJob
    adapter: Adapter | None
    stops: frozenset[int]
    limit: int
    left: int
    sequences: list[_Sequence] = field(default_factory=list)
    prompt: SampledResult | None = None
    cancelled: bool = False

    @property
    def key(self) -> tuple[int, bytes]:
        """Requests with the same key can share the reading of their prompt."""
        return id(self.adapter), self.job.prompt_T.tobytes()


class Sampler:
    """All sampling on one base model."""

    def __init__(
        self,
        base: LanguageModel,
        *,
        end_tokens: Sequence[int],
        detokenize: Callable[[Sequence[int]], str] | None = None,
        max_sequences: int = 64,
        prefill_tokens: int = 2048,
    ) -> None:
        self._base = base
        self._decoder = decoder_for(base)
        self._end_tokens = frozenset(end_tokens)
        self._detokenize = detokenize
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[_Request] = deque()
        self._running: list[_Sequence] = []
        self._groups: tuple[Rows, ...] | None = None
        self._closed: list[Adapter] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def depth(self) -> tuple[int, int]:
        """Requests waiting and sequences under way."""
        return len(self._waiting), len(self._running)

    # -- coming and going --------------------------------------------------------------------

    def add(self, job_id: str, job: SampleJob, adapter: Adapter | None) -> None:
        """Queue a job; a mistake in it is raised here."""
        check_job(
            job,
            vocab_size=self._base.vocab_size,
            context_length=self._base.context_length,
            detokenize=self._detokenize,
        )
        limit = self._base.context_length - len(job.prompt_T)
        if job.max_tokens is not None:
            limit = min(limit, job.max_tokens)
        stops = self._end_tokens if job.stop_tokens is None else frozenset(job.stop_tokens)
        self._waiting.append(_Request(job_id, job, adapter, stops, limit, job.num_samples))

    def cancel(self, job_id: str) -> None:
        self._waiting = deque(request for request in self._waiting if request.job_id != job_id)
        for sequence in self._running:
            if sequence.request.job_id == job_id:
                sequence.request.cancelled = True
        self._forget_closed()

    def forget(self, adapter: Adapter) -> None:
        """Give up what is kept for an adapter; what is under way with it goes on."""
        self._closed.append(adapter)
        self._forget_closed()

    def _forget_closed(self) -> None:
        """Drop what was prepared for adapters that are gone, once nobody samples from them any more."""
        requests = [*self._waiting, *(sequence.request for sequence in self._running)]
        used = {id(request.adapter) for request in requests}
        for adapter in self._closed:
            if id(adapter) not in used:
                self._decoder.forget(adapter)
        self._closed = [adapter for adapter in self._closed if id(adapter) in used]

    # -- one step ----------------------------------------------------------------------------

    def step(self) -> list[SampleEvent]:
        """Admit, read, draw; what is finished or streamed."""
        events: list[SampleEvent] = []
        admitted = self._admit()
        if admitted:
            self._read_prompts(admitted, events)
        if self._running:
            self._draw(list(self._running), self._advance(), events)
        if not self.busy:
            self._decoder.release()
        if self._closed:
            self._forget_closed()
        return events

    def _admit(self) -> list[_Request]:
        """The next requests that fit: by sequences under way, and by positions to read in one step."""
        admitted: list[_Request] = []
        running = len(self._running)
        lengths: dict[int, dict[bytes, int]] = {}  # of different prompts, by adapter
        while self._waiting:
            request = self._waiting[0]
            full = running + request.job.num_samples > self._max_sequences
            adapter, prompt = request.key
            lengths.setdefault(adapter, {})[prompt] = len(request.job.prompt_T)
            if (full and (running or admitted)) or (
                admitted and _padded(lengths) > self._prefill_tokens
            ):
                break
            admitted.append(self._waiting.popleft())
            running += request.job.num_samples
        return admitted

    def _read_prompts(self, admitted: Sequence[_Request], events: list[SampleEvent]) -> None:
        by_adapter: dict[int, dict[tuple[int, bytes], list[_Request]]] = {}
        for request in admitted:
            by_adapter.setdefault(id(request.adapter), {}).setdefault(request.key, []).append(
                request
            )
        for shared in by_adapter.values():
            self._read_for_one_adapter(list(shared.values()), events)

    def _read_for_one_adapter(
        self, shared: Sequence[Sequence[_Request]], events: list[SampleEvent]
    ) -> None:
        """Read each different prompt once, then give every sequence a copy of what was read."""
        adapter = shared[0][0].adapter
        first = len(self._running)
        slots, prompts = [], []
        newcomers: list[list[_Sequence]] = []
        for requests in shared:
            slots.append(first + sum(map(len, newcomers)))
            prompts.append(self._tensor(requests[0].job.prompt_T.astype(np.int64)))
            newcomers.append(
                [
                    _Sequence(request, index, _random(request.job, index))
                    for request in requests
                    for index in range(request.job.num_samples)
                ]
            )
        total = first + sum(map(len, newcomers))
        self._decoder.reserve(total, max(map(len, prompts)) + 1)
        states = self._decoder.prefill(slots, prompts, adapter)
        last = torch.stack([state[-1] for state in states])
        logits = self._decoder.prompt_logits(last, adapter).cpu()
        for slot, requests, sequences, state in zip(slots, shared, newcomers, states, strict=True):
            length = len(state)
            for offset, sequence in enumerate(sequences):
                sequence.length = length
                sequence.request.sequences.append(sequence)
                if offset:
                    self._decoder.copy(slot, slot + offset, length)
            self._running.extend(sequences)
            for request in requests:
                self._score_prompt(request, state)
        self._groups = None
        counts = torch.tensor([len(sequences) for sequences in newcomers])
        self._draw(self._running[first:], logits.repeat_interleave(counts, 0), events)

    def _advance(self) -> Tensor:
        """Read the last token of every sequence; the logits after it."""
        running = self._running
        tokens_B = self._tensor([sequence.tokens[-1] for sequence in running])
        lengths = [sequence.length for sequence in running]
        logits = self._decoder.step(tokens_B, lengths, self._grouped()).cpu()
        for sequence in running:
            sequence.length += 1
        return logits

    def _grouped(self) -> tuple[Rows, ...]:
        if self._groups is None:
            rows: dict[int, tuple[Adapter | None, list[int]]] = {}
            for row, sequence in enumerate(self._running):
                adapter = sequence.request.adapter
                rows.setdefault(id(adapter), (adapter, []))[1].append(row)
            alone = len(rows) == 1
            self._groups = tuple(
                Rows(adapter, None if alone else self._tensor(where))
                for adapter, where in rows.values()
            )
        return self._groups

    def _tensor(self, numbers: Array | Sequence[int]) -> Tensor:
        """Numbers where the model is; logits come back from there, and tokens are drawn on the CPU."""
        return torch.tensor(numbers, device=self._base.device)

    # -- drawing -----------------------------------------------------------------------------

    def _draw(
        self, sequences: Sequence[_Sequence], logits_BV: Tensor, events: list[SampleEvent]
    ) -> None:
        tokens, logprobs = drawing.choose(
            logits_BV,
            [sequence.request.job for sequence in sequences],
            [sequence.random for sequence in sequences],
        )
        for row, sequence in enumerate(sequences):
            request = sequence.request
            if request.limit <= 0:
                sequence.stop_reason = "length"
            elif request.cancelled:
                sequence.stop_reason = "cancelled"
            else:
                self._append(sequence, tokens[row], logprobs[row], logits_BV[row], events)
        finished = [sequence for sequence in sequences if sequence.stop_reason is not None]
        for sequence in finished:
            self._leave(sequence, events)

    def _append(
        self,
        sequence: _Sequence,
        token: int,
        logprob: float,
        logits_V: Tensor,
        events: list[SampleEvent],
    ) -> None:
        request = sequence.request
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if request.job.topk_sample_logprobs:
            normalizer = logits_V[token, None].double() - logprob
            alternatives = request.job.topk_sample_logprobs
            sequence.topk.append(drawing.topk(logits_V, alternatives, normalizer))
        if request.job.stream:
            events.append(
                SampleEvent(request.job_id, index=sequence.index, token=token, logprob=logprob)
            )
        if token in request.stops or self._stop_text(sequence):
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= request.limit:
            sequence.stop_reason = "length"

    def _stop_text(self, sequence: _Sequence) -> bool:
        texts = sequence.request.job.stop_texts
        if not texts or self._detokenize is None:
            return False
        # Every token is at least a byte, so a stop string ends within as many tokens as it has bytes.
        window = max(len(text.encode()) for text in texts) + 4
        tail = self._detokenize(sequence.tokens[-window:])
        return any(text in tail for text in texts)

    def _leave(self, sequence: _Sequence, events: list[SampleEvent]) -> None:
        """Take a finished sequence out; the last of the batch takes its slot."""
        slot = next(index for index, running in enumerate(self._running) if running is sequence)
        last = self._running.pop()
        if last is not sequence:
            self._decoder.copy(len(self._running), slot, last.length)
            self._running[slot] = last
        self._groups = None
        request = sequence.request
        request.left -= 1
        if request.left == 0 and not request.cancelled:
            events.append(SampleEvent(request.job_id, result=_result(request)))

    # -- prompts -----------------------------------------------------------------------------

    def _score_prompt(self, request: _Request, state_TD: Tensor) -> None:
        job = request.job
        wanted = (
            job.prompt_logprobs or job.topk_prompt_logprobs or job.target_prompt_tokens is not None
        )
        if not wanted:
            return
        length = len(state_TD)
        first = (
            1 if job.prompt_logprobs_last_n is None else max(1, length - job.prompt_logprobs_last_n)
        )
        scores = np.full(length, np.nan, np.float32)
        k = job.topk_prompt_logprobs
        ids, values = np.zeros((length, k), np.int32), np.full((length, k), _EMPTY, np.float32)
        targets = job.target_prompt_tokens
        target_scores = None if targets is None else np.zeros(targets.shape, np.float32)
        tokens = torch.from_numpy(job.prompt_T.astype(np.int64))
        for start in range(first, length, _LOGIT_ROWS):
            stop = min(start + _LOGIT_ROWS, length)
            states = state_TD[start - 1 : stop - 1]
            logits = self._decoder.prompt_logits(states, request.adapter).cpu()
            normalizers = logits.logsumexp(-1, keepdim=True)
            found = logits.gather(-1, tokens[start:stop, None]) - normalizers
            scores[start:stop] = found[:, 0].numpy()
            if k:
                ids[start:stop], values[start:stop] = drawing.topk(logits, k, normalizers)
            if targets is not None and target_scores is not None:
                here = torch.from_numpy(targets[start - 1 : stop - 1].astype(np.int64))
                found = logits.gather(-1, here.clamp_min(0)) - normalizers
                target_scores[start - 1 : stop - 1] = torch.where(here < 0, 0.0, found).numpy()
        request.prompt = SampledResult(
            [],
            [],
            [],
            prompt_logprobs_T=scores if job.prompt_logprobs else None,
            topk_prompt=(ids, values) if k else None,
            target_prompt_logprobs=target_scores,
        )


def _random(job: SampleJob, index: int) -> np.random.Generator:
    """Chance for one sequence: its own, and the same again for the same seed."""
    if job.seed is None:
        return np.random.Generator(np.random.Philox())
    key = (job.seed & (2**64 - 1), index)
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))


def _padded(lengths: Mapping[int, Mapping[bytes, int]]) -> int:
    """Positions that are read: prompts are padded to the longest that is read with the same adapter."""
    return sum(max(own.values()) * len(own) for own in lengths.values())


def _result(request: _Request) -> SampledResult:
    result = request.prompt or SampledResult([], [], [])
    sequences = sorted(request.sequences, key=lambda sequence: sequence.index)
    for sequence in sequences:
        result.tokens.append(np.array(sequence.tokens, np.int32))
        result.logprobs.append(np.array(sequence.logprobs, np.float32))
        result.stop_reasons.append(sequence.stop_reason)
    k = request.job.topk_sample_logprobs
    if k:
        result.topk_sampled = [
            (
                np.array([ids for ids, _ in sequence.topk], np.int32).reshape(-1, k),
                np.array([values for _, values in sequence.topk], np.float32).reshape(-1, k),
            )
            for sequence in sequences
        ]
    return result
