"""Samplers: frozen weights that can be drawn from.

Every sampler with an adapter has a directory of its own, so it stays what it was when the checkpoint it was made
from is replaced or deleted, when the engine has put it away to save memory, and across restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from tinkex._wire.operations import operation
from tinkex.engine.process import Token
from tinkex.engine.values import SampledResult, SampleJob
from tinkex.errors import (
    InternalServerError,
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
)
from tinkex.types import (
    CreateSamplingSessionRequest,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SampleStreamChunk,
    TensorData,
    TopkLogprobs,
)

from .checkpoints import Checkpoints, tinker_path
from .engine import Supervisor
from .futures import Feed, Promise, Promises
from .inputs import sample_job
from .sessions import Sessions
from .store import Database, SamplerRow
from .usage import Usage

__all__ = ["Samplers"]

#: Adapters that the engine keeps at hand for sampling.
OPEN_LIMIT: Final = 32
#: Clients of samplers whose finished requests are kept in order for them; of others they are found anew.
FEED_LIMIT: Final = 1000
#: Clients number their requests from this many times their own number.
CLONE_STRIDE: Final = 1_000_000_000

_ASAMPLE: Final = operation("asample")


@dataclass(eq=False)
class _Sampler:
    row: SamplerRow
    directory: Path | None
    open_in: int = -1  # the life of the engine in which it was opened
    in_use: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class Samplers:
    """All samplers of a service."""

    def __init__(
        self,
        directory: Path,
        database: Database,
        sessions: Sessions,
        checkpoints: Checkpoints,
        promises: Promises,
        engine: Supervisor,
        usage: Usage,
        *,
        max_samples: int,
        now: Callable[[], datetime],
        open_limit: int = OPEN_LIMIT,
    ) -> None:
        self._directory = directory
        self._db, self._store = database, database.store
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._promises = promises
        self._engine = engine
        self._usage = usage
        self._max_samples = max_samples
        self._now = now
        self._open_limit = open_limit
        self._samplers: OrderedDict[str, _Sampler] = OrderedDict()
        self._feeds: OrderedDict[tuple[str, int], Feed] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        promises.on_finish.append(self._tell_feed)

    # -- making --------------------------------------------------------------------------------

    async def create(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """A sampler of a base model or of a checkpoint; the same number gives the same sampler."""
        await self._sessions.check_active(request.session_id, owner)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in self._samplers:
            return sampler_id
        if await self._db(self._store.sampler, sampler_id) is not None:
            return sampler_id
        return await self._make(
            owner, request.session_id, sampler_id, request.base_model, request.model_path
        )

    async def _make(
        self,
        owner: str,
        session_id: str,
        sampler_id: str,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        if model_path is not None:
            checkpoint, source = await self._checkpoints.readable(owner, model_path)
            if checkpoint.kind == "external":
                raise InvalidInputError(
                    "external weights are for use elsewhere; sample from sampler weights",
                    field="model_path",
                )
            run = await self._db(self._store.run, checkpoint.run_id)
            assert run is not None
            if base_model is not None and base_model != run.base_model:
                raise InvalidInputError(
                    f"the checkpoint is of {run.base_model}, not of {base_model!r:.200}",
                    field="base_model",
                )
            await self._engine.model(run.base_model, "model_path")
            await self._db(_link, source, self.place(sampler_id))
            await self.add(owner, session_id, sampler_id, run.base_model, tinker_path(checkpoint))
        elif base_model is not None:
            await self._engine.model(base_model, "base_model")
            await self.add(owner, session_id, sampler_id, base_model, None)
        else:
            raise InvalidInputError("give base_model or model_path", field="base_model")
        return sampler_id

    def place(self, sampler_id: str) -> Path:
        """Where a sampler keeps its weights."""
        return self._directory / sampler_id.replace("/", "_")

    async def add(
        self,
        owner: str,
        session_id: str,
        sampler_id: str,
        base_model: str,
        model_path: str | None,
    ) -> None:
        """List a sampler whose weights are in their place."""
        row = SamplerRow(sampler_id, session_id, owner, base_model, model_path, self._now())
        self._know(await self._db(self._store.add_sampler, row))

    def _know(self, row: SamplerRow) -> _Sampler:
        directory = self.place(row.sampler_id)
        sampler = _Sampler(row, directory if directory.is_dir() else None)
        return self._samplers.setdefault(row.sampler_id, sampler)

    async def get(self, sampler_id: str, owner: str) -> SamplerRow:
        return (await self._find(sampler_id, owner)).row

    async def _find(self, sampler_id: str, owner: str) -> _Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            row = await self._db(self._store.sampler, sampler_id)
            if row is None or row.owner != owner:
                raise NotFoundError(f"There is no sampler {sampler_id!r:.200}.")
            sampler = self._know(row)
        if sampler.row.owner != owner:
            raise NotFoundError(f"There is no sampler {sampler_id!r:.200}.")
        return sampler

    async def join(self, sampler_id: str, owner: str) -> int:
        await self._find(sampler_id, owner)
        number = await self._db(self._store.next_clone, sampler_id)
        assert number is not None
        return number

    async def close_session(self, session_id: str) -> None:
        """Let go of the samplers of a session that has ended."""
        for row in await self._db(self._store.samplers_of_session, session_id):
            sampler = self._samplers.pop(row.sampler_id, None)
            if sampler is not None and sampler.open_in == self._engine.life:
                await self._engine.call_now("close_sampler", row.sampler_id)
            await asyncio.to_thread(shutil.rmtree, self.place(row.sampler_id), ignore_errors=True)
        for key in [key for key in self._feeds if key[0].startswith(f"{session_id}:")]:
            del self._feeds[key]

    # -- drawing -------------------------------------------------------------------------------

    async def sample(self, owner: str, request: SampleRequest, body: bytes) -> Promise:
        """Accept a request to sample."""
        sampler = await self._sampler_of(owner, request)
        sampler_id = sampler.row.sampler_id
        known = self._promises.duplicate(sampler_id, request.seq_id)
        if known is None:
            job = sample_job(request, sampler_id, max_samples=self._max_samples)
            extra = {"num_samples": request.num_samples}
            known = self._promises.accept(
                _ASAMPLE, owner, sampler_id, request.seq_id, request, body, "json", extra
            )
            self._start(known, sampler, job, request)
        await self._promises.flushed()
        return known

    async def resume(self, promise: Promise) -> None:
        """Go on with a request that was accepted before a restart."""
        try:
            request: SampleRequest = self._promises.request_of(promise)
            sampler = await self._find(promise.scope, promise.owner)
            job = sample_job(request, promise.scope, max_samples=self._max_samples)
        except TinkerError as error:
            self._promises.fail(promise, error)
            return
        self._start(promise, sampler, job, request)

    async def stream(self, owner: str, request: SampleRequest) -> AsyncIterator[SampleStreamChunk]:
        """Tokens as they are drawn; what is wrong with the request is raised before the first."""
        sampler = await self._sampler_of(owner, request)
        self._promises.check_room(owner)
        job = sample_job(request, sampler.row.sampler_id, max_samples=self._max_samples)
        return self._stream(sampler, job)

    async def _stream(self, sampler: _Sampler, job: SampleJob) -> AsyncIterator[SampleStreamChunk]:
        queue: asyncio.Queue[Token | None] = asyncio.Queue()
        sampling = asyncio.ensure_future(
            self._drawn(sampler, replace(job, stream=True), on_token=queue.put_nowait)
        )
        sampling.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (token := await queue.get()) is not None:
                yield SampleStreamChunk(
                    token_id=token.token, logprob=token.logprob, index=token.index
                )
            result = await sampling
            for index, reason in enumerate(result.stop_reasons):
                yield SampleStreamChunk(
                    index=index, finish_reason=reason, total_tokens=len(result.tokens[index])
                )
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sampling

    async def _sampler_of(self, owner: str, request: SampleRequest) -> _Sampler:
        if request.sampling_session_id is not None:
            sampler = await self._find(request.sampling_session_id, owner)
            await self._sessions.check_active(sampler.row.session_id, owner)
            return sampler
        raise InvalidInputError(
            "is required; create_sampling_session gives one", field="sampling_session_id"
        )

    def _start(
        self, promise: Promise, sampler: _Sampler, job: SampleJob, request: SampleRequest
    ) -> None:
        task = asyncio.ensure_future(self._run(promise, sampler, job, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        promise.on_cancel = task.cancel

    async def _run(
        self, promise: Promise, sampler: _Sampler, job: SampleJob, request: SampleRequest
    ) -> None:
        try:
            result = await self._drawn(sampler, job)
        except asyncio.CancelledError:
            if not self._engine.stopping:
                cancelled = RequestFailedError(
                    "The request was cancelled.", promise.request_id, RequestErrorCategory.User
                )
                self._promises.fail(promise, cancelled)
            raise
        except Exception as error:
            self._promises.fail(promise, error)
        else:
            self._promises.finish(promise, _response(result, request.target_prompt_logprobs))

    async def _drawn(
        self,
        sampler: _Sampler,
        job: SampleJob,
        on_token: Callable[[Token], None] | None = None,
    ) -> SampledResult:
        """Have a job done by an engine that has the sampler open."""

        async def draw() -> SampledResult:
            await self._open(sampler)
            return await self._engine.worker.sample(job, on_token)

        sampler.in_use += 1
        try:
            result = await self._engine.persist(draw)
        finally:
            sampler.in_use -= 1
        row = sampler.row
        drawn = sum(map(len, result.tokens))
        self._usage.add(
            row.owner, row.session_id, row.base_model, "sampling_prefill", len(job.prompt_T)
        )
        self._usage.add(row.owner, row.session_id, row.base_model, "sampling_sample", drawn)
        return result

    @property
    def under_way(self) -> int:
        """How many requests are waiting for the engine or in its batch."""
        return len(self._tasks)

    # -- open and closed -----------------------------------------------------------------------

    async def _open(self, sampler: _Sampler) -> None:
        row = sampler.row
        if row.sampler_id in self._samplers:
            self._samplers.move_to_end(row.sampler_id)
        if sampler.open_in == self._engine.life:
            return
        async with sampler.opening:
            if sampler.open_in == self._engine.life:
                return
            if sampler.directory is None and row.model_path is not None:
                raise InternalServerError(f"The weights of sampler {row.sampler_id!r} are gone.")
            await self._engine.worker.call_now(
                "open_sampler", row.sampler_id, row.base_model, directory=sampler.directory
            )
            sampler.open_in = self._engine.life
        await self._put_away()

    def opened(self, sampler_id: str) -> None:
        """The engine has a sampler open already, because it made it."""
        self._samplers[sampler_id].open_in = self._engine.life

    async def _put_away(self) -> None:
        """Close the samplers that were not used for longest; they can be opened again."""
        life = self._engine.life
        opened = [sampler for sampler in self._samplers.values() if sampler.open_in == life]
        for sampler in opened[: max(0, len(opened) - self._open_limit)]:
            if not sampler.in_use and sampler.directory is not None:
                sampler.open_in = -1
                await self._engine.worker.call_now("close_sampler", sampler.row.sampler_id)

    # -- waiting for any -----------------------------------------------------------------------

    async def feed(self, sampler_id: str, clone: int, owner: str) -> Feed:
        """What was finished for one client of a sampler."""
        await self._find(sampler_id, owner)
        key = sampler_id, clone
        if key not in self._feeds:
            # The clock, so that the numbers go on where those of before a restart have ended.
            self._feeds[key] = Feed(cursor=time.time_ns() // 1000)
            done = [
                promise for promise in self._promises if promise.result and _feed(promise) == key
            ]
            for promise in sorted(done, key=lambda promise: promise.finished_at):
                self._feeds[key].put(promise)
            if len(self._feeds) > FEED_LIMIT:
                self._feeds.popitem(last=False)
        self._feeds.move_to_end(key)
        return self._feeds[key]

    def trim_feeds(self) -> None:
        """Let go of what nobody can ask for any more."""
        for feed in self._feeds.values():
            feed.keep(lambda promise: self._promises.knows(promise.request_id))

    def _tell_feed(self, promise: Promise) -> None:
        key = _feed(promise)
        if key in self._feeds:
            self._feeds[key].put(promise)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _feed(promise: Promise) -> tuple[str, int]:
    """Which sampler a request is for, and which of its clients sent it."""
    return promise.scope, -1 if promise.seq_id is None else promise.seq_id // CLONE_STRIDE


def _response(result: SampledResult, targets: TensorData | None) -> SampleResponse:
    """What was drawn, as the protocol says it."""
    topk = result.topk_sampled
    sequences = [
        SampledSequence(
            stop_reason,
            tokens_np=tokens.astype(np.int32, copy=False),
            logprobs_np=logprobs.astype(np.float32, copy=False),
            topk_logprobs_np=None if topk is None else TopkLogprobs(*topk[index]),
        )
        for index, (tokens, logprobs, stop_reason) in enumerate(
            zip(result.tokens, result.logprobs, result.stop_reasons, strict=True)
        )
    ]
    found = result.target_prompt_logprobs
    return SampleResponse(
        sequences,
        prompt_logprobs_np=result.prompt_logprobs_T,
        topk_prompt_logprobs_np=(
            None if result.topk_prompt is None else TopkLogprobs(*result.topk_prompt)
        ),
        target_prompt_logprobs=(
            None if found is None or targets is None else _in_layout_of(targets, found)
        ),
    )


def _in_layout_of(targets: TensorData, found: Any) -> TensorData:
    """Logprobs in the form in which they were asked for: dense, or the same entries sparse."""
    if targets.indices is None:
        return TensorData.from_numpy(found)
    crow, col = targets.indices
    rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
    return TensorData(found[rows, col], "float32", targets.shape, crow, col)


def _link(source: Path, target: Path) -> None:
    """Give a sampler its own name for the files of a checkpoint; they are never written to again."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
