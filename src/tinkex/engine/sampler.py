"""Continuous batching: sequences of many requests, adapters and users join and leave one batch at any step.

A step admits waiting sequences that fit, reads their prompts, and draws one token for every running sequence. A
sequence can leave the batch at any time and resume later: its prompt and the tokens drawn so far are then read again.
The sampler tracks lengths and slots; the decoder runs the model.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from . import drawing
from .checks import check_job
from .decoder import decoder_for
from .grammars import Grammars
from .llama import Rows
from .lora import Adapter
from .processors import Shaping, shaping_of
from .trainer import LanguageModel
from .values import Array, Constraint, SampledResult, SampleEvent, SampleJob

__all__ = ["Sampler"]

logger = logging.getLogger("tinkex.engine")

#: Prompt scoring computes logits for this many positions at a time, to bound memory.
_LOGIT_ROWS: Final = 256
_EMPTY: Final = -99999.0
_TOKEN_BYTES: Final = 8


@dataclass(slots=True, eq=False)
class _Sequence:
    """One continuation of a prompt."""

    request: _Request
    index: int
    random: np.random.Generator
    length: int = 0  # positions in the cache
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[Array, Array]] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    shaping: Shaping | None = None
    stop_reason: Any = None

    def text(self) -> bytes:
        """Prompt and drawn tokens as int64 bytes: what the decoder must read before the next draw."""
        prompt = self.request.job.prompt_T.astype(np.int64).tobytes()
        return prompt + np.array(self.tokens, np.int64).tobytes() if self.tokens else prompt

    def rewind(self) -> None:
        """Reset the random generator to one number per appended token; undoes the draw of a failed step."""
        self.random = _random(self.request.job, self.index)
        self.random.random(len(self.tokens))


@dataclass(slots=True, eq=False)
class _Request:
    job_id: str
    job: SampleJob
    adapter: Adapter | None
    stops: frozenset[int]
    window: int  # number of last tokens to search for stop strings
    limit: int  # tokens to draw at most
    left: int  # sequences that are not finished
    new_shaping: Callable[[], Shaping | None]
    sequences: list[_Sequence] = field(default_factory=list)  # started sequences
    back: list[_Sequence] = field(default_factory=list)  # started sequences that left the batch
    prompt: SampledResult | None = None
    first_V: Tensor | None = None  # logits after the prompt, for sequences that start later
    failure: RequestFailedError | None = None

    @property
    def waits(self) -> bool:
        return bool(self.back) or len(self.sequences) < self.job.num_samples

    def take(self) -> _Sequence:
        """Return the next sequence to read: one that left the batch, or else a new one."""
        if self.back:
            return self.back.pop()
        index = len(self.sequences)
        random, shaping = _random(self.job, index), self.new_shaping()
        self.sequences.append(_Sequence(self, index, random, shaping=shaping))
        return self.sequences[-1]


class Sampler:
    """All sampling on one base model.

    The cache of the running sequences stays within `cache_bytes`; one sequence always runs, even if it needs more.
    """

    def __init__(
        self,
        base: LanguageModel,
        *,
        end_tokens: Sequence[int],
        detokenize: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
        max_sequences: int = 64,
        prefill_tokens: int = 2048,
        cache_bytes: float = inf,
    ) -> None:
        self._base = base
        self._decoder = decoder_for(base)
        self._end_tokens = frozenset(end_tokens)
        self._detokenize = detokenize
        self._grammars = grammars
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens
        self.cache_bytes = cache_bytes
        self._bytes_that_work = inf  # lowered after a failed step
        self._requests: dict[str, _Request] = {}  # all unfinished requests
        # By owner: the requests with a waiting sequence. The owner to serve next comes first.
        self._lines: OrderedDict[str, OrderedDict[str, _Request]] = OrderedDict()
        self._joining: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._groups: tuple[Rows, ...] | None = None
        self._closed: list[Adapter] = []

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def depth(self) -> tuple[int, int]:
        """Number of waiting requests and of running sequences."""
        return sum(map(len, self._lines.values())), len(self._running)

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
            raise _not_finite(job, adapter)
        limit = self._base.context_length - len(job.prompt_T)
        if job.max_tokens is not None:
            limit = min(limit, job.max_tokens)
        stops = self._end_tokens if job.stop_tokens is None else frozenset(job.stop_tokens)
        # Every token has at least one byte, so a stop string spans at most as many tokens as it has bytes.
        window = max((len(text.encode()) for text in job.stop_texts), default=0) + 4
        matcher = None if self._grammars is None else self._grammars.matcher
        shaping = partial(shaping_of, job, self._base.vocab_size, stops, matcher)
        request = _Request(job_id, job, adapter, stops, window, limit, job.num_samples, shaping)
        self._requests[job_id] = request
        self._line(request)[job_id] = request

    def _check_constraint(self, constraint: Constraint) -> None:
        field = f"sampling_params.{constraint.kind}"
        if self._grammars is None:
            raise InvalidInputError("constraints need a tokenizer", field=field)
        self._grammars.check(constraint)

    def _line(self, request: _Request) -> OrderedDict[str, _Request]:
        return self._lines.setdefault(request.job.owner, OrderedDict())

    def cancel(self, job_id: str) -> None:
        request = self._requests.get(job_id)
        if request is not None:
            self._drop(request)
            if not self.busy:  # no further step will tidy up
                self._tidy()

    def _drop(self, request: _Request) -> None:
        del self._requests[request.job_id]
        self._leave_line(request)
        if request.sequences:
            for sequence in [one for one in self._running if one.request is request]:
                self._vacate(sequence)

    def _leave_line(self, request: _Request) -> None:
        owner = request.job.owner
        line = self._lines.get(owner, OrderedDict())
        if line.pop(request.job_id, None) is not None and not line:
            del self._lines[owner]

    def forget(self, adapter: Adapter) -> None:
        """Drop the tensors prepared for an adapter, once no running request uses it."""
        self._closed.append(adapter)
        self._forget_closed()

    def _forget_closed(self) -> None:
        """Drop the tensors of closed adapters that no request uses."""
        used = {id(request.adapter) for request in self._requests.values()}
        for adapter in self._closed:
            if id(adapter) not in used:
                self._decoder.forget(adapter)
        self._closed = [adapter for adapter in self._closed if id(adapter) in used]

    # -- one step ----------------------------------------------------------------------------

    def step(self) -> list[SampleEvent]:
        """Admit sequences, read prompts, draw tokens; return streamed tokens, results and errors."""
        events: list[SampleEvent] = []
        try:
            if admitted := self._admit():
                self._read_prompts(admitted, events)
            if self._running:
                self._make_room()
                self._draw(list(self._running), self._advance(), events)
        except Exception as error:
            if _device_is_lost(error) or not (self._running or self._joining):
                raise
            self._recover(error, events)
        self._tidy()
        return events

    def _tidy(self) -> None:
        if not self.busy:
            self._decoder.release()
            self._bytes_that_work = inf
        if self._closed:
            self._forget_closed()

    def _admit(self) -> dict[int, dict[bytes, list[_Sequence]]]:
        """Take the next sequences that fit, owners in turn; grouped by adapter and by the text to read.

        Three limits apply: the number of running sequences, the memory of the cache, and the positions to read in
        one step.
        """
        admitted: dict[int, dict[bytes, list[_Sequence]]] = {}
        lengths: dict[int, dict[bytes, int]] = {}  # length of each text to read, by adapter
        longest = self._longest() if self._lines else 0
        while self._lines:
            count = len(self._running) + len(self._joining)
            if count >= self._max_sequences:
                break
            owner, line = next(iter(self._lines.items()))
            request = next(iter(line.values()))
            sequence = request.take()
            self._joining.append(sequence)
            adapter, text = id(request.adapter), sequence.text()
            length = lengths.setdefault(adapter, {})[text] = len(text) // _TOKEN_BYTES
            longest = max(longest, length)
            if (count and not self._fits(count + 1, longest + 1)) or (
                admitted and _padded(lengths) > self._prefill_tokens
            ):
                request.back.append(self._joining.pop())
                break
            admitted.setdefault(adapter, {}).setdefault(text, []).append(sequence)
            self._lines.move_to_end(owner)
            if not request.waits:
                self._leave_line(request)
        return admitted

    def _longest(self) -> int:
        return max((sequence.length for sequence in self._running), default=0)

    def _fits(self, count: int, length: int) -> bool:
        allowed = min(self.cache_bytes, self._bytes_that_work)
        return self._decoder.size(count, length) <= allowed

    def _make_room(self) -> None:
        """Remove the last sequences from the batch until the rest fits: all grow by one token per step."""
        while len(self._running) > 1 and not self._fits(len(self._running), self._longest() + 1):
            self._put_back(self._running.pop())
            self._groups = None

    def _put_back(self, sequence: _Sequence) -> None:
        """Queue a sequence that left the batch, before all other requests of its owner."""
        request = sequence.request
        request.back.append(sequence)
        line = self._line(request)
        line[request.job_id] = request
        line.move_to_end(request.job_id, last=False)

    def _recover(self, error: Exception, events: list[SampleEvent]) -> None:
        """After a failed step, usually out of memory: read every sequence again, in smaller batches.

        Each failure halves the batch. So the sequence that causes it ends up alone, and only its request fails.
        """
        tried = [
            sequence
            for sequence in dict.fromkeys([*self._running, *self._joining])
            if sequence.request.job_id in self._requests
        ]
        longest = max((len(sequence.text()) for sequence in tried), default=0) // _TOKEN_BYTES
        failed = f"A step with {len(tried)} sequences of at most {longest} tokens failed."
        logger.warning(failed, exc_info=error)
        finished = [sequence for sequence in self._running if sequence.stop_reason is not None]
        unfinished = [sequence for sequence in tried if sequence.stop_reason is None]
        self._running, self._joining, self._groups = [], [], None
        self._decoder.release()
        for sequence in finished:
            self._finish(sequence, events)
        if len(tried) > 1:
            self._bytes_that_work = self._decoder.size(len(tried), longest + 1) // 2
            for sequence in reversed(unfinished):
                sequence.rewind()
                self._put_back(sequence)
            return
        self._bytes_that_work = inf
        for sequence in unfinished:
            failure = _too_long(longest) if _lacks_memory(error) else error
            events.append(SampleEvent(sequence.request.job_id, error=failure))
            self._drop(sequence.request)

    def _read_prompts(
        self, admitted: Mapping[int, Mapping[bytes, list[_Sequence]]], events: list[SampleEvent]
    ) -> None:
        lengths = [len(text) // _TOKEN_BYTES for shared in admitted.values() for text in shared]
        count = len(self._running) + len(self._joining)
        self._decoder.reserve(count, max(self._longest(), *lengths) + 1)
        for shared in admitted.values():
            self._read_for_one_adapter(shared, events)
        self._joining = []

    def _read_for_one_adapter(
        self, shared: Mapping[bytes, Sequence[_Sequence]], events: list[SampleEvent]
    ) -> None:
        """Read each distinct text once and copy the result to every sequence that has this text."""
        first, logits = len(self._running), []
        unread = {}
        for text, sequences in shared.items():
            sibling = self._sibling(sequences)
            if sibling is None:
                unread[text] = sequences
                continue
            slot, first_V = sibling
            self._join(sequences, slot, len(sequences[0].request.job.prompt_T))
            logits.append(first_V.expand(len(sequences), -1))
        if unread:
            logits.append(self._read(unread))
        self._groups = None
        self._draw(self._running[first:], torch.cat(logits), events)

    def _read(self, shared: Mapping[bytes, Sequence[_Sequence]]) -> Tensor:
        """Read texts for one adapter; return the next logits of each of their sequences."""
        adapter = next(iter(shared.values()))[0].request.adapter
        counts = [len(sequences) for sequences in shared.values()]
        slots = [len(self._running) + sum(counts[:index]) for index in range(len(counts))]
        texts = [self._tensor(np.frombuffer(text, np.int64)) for text in shared]
        states = self._decoder.prefill(slots, texts, adapter)
        last = torch.stack([state[-1] for state in states])
        logits = self._decoder.prompt_logits(last, adapter).cpu()
        for slot, sequences, state, logits_V in zip(
            slots, shared.values(), states, logits, strict=True
        ):
            self._join(sequences, slot, len(state))
            for request in dict.fromkeys(sequence.request for sequence in sequences):
                if request.prompt is None:
                    self._score_prompt(request, state[: len(request.job.prompt_T)])
                if request.waits and not sequences[0].tokens:
                    request.first_V = logits_V.clone()
        return logits.repeat_interleave(torch.tensor(counts), 0)

    def _sibling(self, sequences: Sequence[_Sequence]) -> tuple[int, Tensor] | None:
        """Find a running sequence of the same request: its slot holds the prompt, so new ones need not read it.

        Returns the slot and the logits after the prompt.
        """
        request = sequences[0].request
        first_V = request.first_V
        if not request.waits:
            request.first_V = None
        if first_V is None or any(one.request is not request or one.tokens for one in sequences):
            return None
        slots = (slot for slot, one in enumerate(self._running) if one.request is request)
        slot = next(slots, None)
        return None if slot is None else (slot, first_V)

    def _join(self, sequences: Sequence[_Sequence], source: int, length: int) -> None:
        for sequence in sequences:
            slot = len(self._running)
            if slot != source:
                self._decoder.copy(source, slot, length)
            sequence.length = length
            self._running.append(sequence)

    def _advance(self) -> Tensor:
        """Read the last token of every running sequence; return the next logits."""
        running = self._running
        tokens_B = self._tensor([sequence.tokens[-1] for sequence in running])
        lengths = [sequence.length for sequence in running]
        self._decoder.reserve(len(running), max(lengths) + 1)
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
        """A tensor on the model's device."""
        return torch.tensor(numbers, device=self._base.device)

    # -- drawing -----------------------------------------------------------------------------

    def _draw(
        self, sequences: Sequence[_Sequence], logits_BV: Tensor, events: list[SampleEvent]
    ) -> None:
        tokens, logprobs, kept_mass = drawing.choose(
            logits_BV,
            [sequence.request.job for sequence in sequences],
            [sequence.random for sequence in sequences],
            [sequence.shaping for sequence in sequences],
        )
        for row, sequence in enumerate(sequences):
            if sequence.request.limit <= 0:
                sequence.stop_reason = "length"
            elif not isfinite(logprobs[row]):
                request = sequence.request
                request.failure = _not_finite(request.job, request.adapter)
            else:
                self._append(sequence, tokens[row], logprobs[row], logits_BV[row], events)
                sequence.kept_mass.append(kept_mass[row])
        failed = []
        for sequence in sequences:
            if sequence.request.failure is not None:
                self._vacate(sequence)
                failed.append(sequence.request)
            elif sequence.stop_reason is not None:
                self._vacate(sequence)
                self._finish(sequence, events)
        for request in dict.fromkeys(failed):
            events.append(SampleEvent(request.job_id, error=request.failure))
            self._drop(request)

    def _append(
        self,
        sequence: _Sequence,
        token: int,
        logprob: float,
        logits_V: Tensor,
        events: list[SampleEvent],
    ) -> None:
        request = sequence.request
        stopped = token in request.stops or self._stop_text(sequence, token)
        if sequence.shaping is not None:
            stopped = sequence.shaping.take(token) or stopped
            request.failure = request.failure or sequence.shaping.failure
        if request.job.topk_sample_logprobs:
            normalizer = logits_V[token, None].double() - logprob
            alternatives = request.job.topk_sample_logprobs
            sequence.topk.append(drawing.topk(logits_V, alternatives, normalizer))
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if request.job.stream:
            topk = sequence.topk[-1] if sequence.topk else None
            drawn = SampleEvent(request.job_id, None, None, sequence.index, token, logprob, topk)
            events.append(drawn)
        if stopped:
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= request.limit:
            sequence.stop_reason = "length"

    def _stop_text(self, sequence: _Sequence, token: int) -> bool:
        texts = sequence.request.job.stop_texts
        if not texts or self._detokenize is None:
            return False
        tail = self._detokenize([*sequence.tokens[1 - sequence.request.window :], token])
        return any(text in tail for text in texts)

    def _vacate(self, sequence: _Sequence) -> None:
        """Remove a sequence from the batch; the last one moves into its slot."""
        slot, last = self._running.index(sequence), self._running[-1]
        if last is not sequence:
            self._decoder.copy(len(self._running) - 1, slot, last.length)
            self._running[slot] = last
        self._running.pop()
        self._groups = None

    def _finish(self, sequence: _Sequence, events: list[SampleEvent]) -> None:
        request = sequence.request
        request.left -= 1
        if request.left == 0:
            del self._requests[request.job_id]
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
        first = job.first_scored if job.target_prompt_tokens is None else 1
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
            if not normalizers.isfinite().all():
                request.failure = _not_finite(job, request.adapter)
                return
            found = logits.gather(-1, tokens[start:stop, None]) - normalizers
            scores[start:stop] = found[:, 0].numpy()
            if k:
                ids[start:stop], values[start:stop] = drawing.topk(logits, k, normalizers)
            if targets is not None and target_scores is not None:
                here = torch.from_numpy(targets[start - 1 : stop - 1].astype(np.int64))
                found = logits.gather(-1, here.clamp_min(0)) - normalizers
                target_scores[start - 1 : stop - 1] = torch.where(here < 0, 0.0, found).numpy()
        unasked = slice(job.first_scored)  # computed only for the targets
        scores[unasked], ids[unasked], values[unasked] = np.nan, 0, _EMPTY
        request.prompt = SampledResult(
            [],
            [],
            [],
            prompt_logprobs_T=scores if job.prompt_logprobs else None,
            topk_prompt=(ids, values) if k else None,
            target_prompt_logprobs=target_scores,
        )


def _device_is_lost(error: Exception) -> bool:
    """Whether the device is unusable until the process restarts."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def _lacks_memory(error: Exception) -> bool:
    # On the CPU, torch raises a plain RuntimeError when memory runs out.
    typed = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    return typed or "you tried to allocate" in str(error)


def _too_long(length: int) -> RequestFailedError:
    return RequestFailedError(
        f"There is too little memory to sample after {length} tokens, even one sequence alone; "
        "send a shorter prompt.",
        category=RequestErrorCategory.Server,
    )


def _not_finite(job: SampleJob, adapter: Adapter | None) -> RequestFailedError:
    whose = "base model" if adapter is None else "adapter"
    return RequestFailedError(
        f"The {whose} of sampler {job.sampler_id!r:.200} does not give finite logits: its weights are NaN, "
        "infinite or far too large, usually because the learning rate was too high. "
        "Sample from an earlier checkpoint, or train again with a smaller learning rate.",
        category=RequestErrorCategory.User,
    )


def _random(job: SampleJob, index: int) -> np.random.Generator:
    """Random generator of one sequence; the same seed and index give the same numbers."""
    if job.seed is None:
        return np.random.Generator(np.random.Philox())
    key = (job.seed & (2**64 - 1), index)
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))


def _padded(lengths: Mapping[int, Mapping[bytes, int]]) -> int:
    """Positions to read, with padding: prompts are padded to the longest one with the same adapter."""
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
    if request.job.kept_mass:
        result.kept_mass = [np.array(each.kept_mass, np.float32) for each in sequences]
    return result
