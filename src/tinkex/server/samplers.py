"""Samplers: frozen weights to sample from.

Every sampler with an adapter has its own directory. So its weights stay the same when the checkpoint it was made from
is replaced or deleted, when the engine closes the sampler to save memory, and across restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np

from tinkex._wire.operations import Operation
from tinkex.engine import directories
from tinkex.engine.interface import EngineDiedError, EngineLease, Engines, OnToken
from tinkex.engine.values import Array, SampledResult, SampleJob, StreamedToken
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
    CreateSessionRequest,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SampleStreamChunk,
    TensorData,
    TopkLogprobs,
)

from .checkpoints import Checkpoints, check_samplable, tinker_path
from .database import Database
from .file_threads import FileThreads
from .futures import Client, Feed, Promise, Promises
from .grammar_trials import GrammarTrials
from .inputs import SampleLimits, sample_job
from .kept_open import KEPT_BYTES, KEPT_OPEN, surplus
from .quotas import Quota
from .sessions import Sessions
from .tables import SamplerRow
from .usage import UsageMeter

__all__ = ["UNNAMED_LIMIT", "Samplers"]

#: Unnamed samplers that a session keeps.
UNNAMED_LIMIT: Final = 100
#: Samplers kept per owner for requests without a sampling session.
PASSING_LIMIT: Final = 32
#: Feeds kept per owner, one for each client of a sampler; an evicted feed is rebuilt from the promises.
FEED_LIMIT: Final = 1000
#: Seconds for which an incomplete directory may be unchanged while it is still written; a save takes less.
_WRITING: Final = 3600.0


@dataclass(eq=False)
class _Sampler:
    row: SamplerRow
    directory: Path | None
    lease: EngineLease | None = None  # of the engine that has it open
    size: int = 0  # of its files, known once it was open
    closed: bool = False  # for good: its session has ended, or it has expired
    drawing: set[asyncio.Task[object]] = field(default_factory=set)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_open(self) -> bool:
        return self.lease is not None and not self.lease.lost


@dataclass(eq=False)
class _Passing:
    """The samplers of one owner for requests without a sampling session, by model and checkpoint."""

    session_id: str = ""
    made: OrderedDict[tuple[object, ...], str] = field(default_factory=OrderedDict)
    count: int = 0
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class Samplers:
    """All samplers of a service."""

    def __init__(
        self,
        directory: Path,
        database: Database,
        files: FileThreads,
        sessions: Sessions,
        checkpoints: Checkpoints,
        promises: Promises,
        engine: Engines,
        usage: UsageMeter,
        quota: Quota,
        *,
        limits: SampleLimits,
        trials: GrammarTrials | None,
        now: Callable[[], datetime],
        expiry: Callable[[], datetime] | None = None,
        open_limit: int = KEPT_OPEN,
        open_bytes: int = KEPT_BYTES,
        unnamed_limit: int = UNNAMED_LIMIT,
    ) -> None:
        self._directory = directory
        self._db, self._store = database, database.store
        self._files = files
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._promises = promises
        self._engine = engine
        self._usage = usage
        self._quota = quota
        self._limits = limits
        self._trials = trials
        self._now = now
        self._expiry = expiry or now  # samplers that expire up to this time are expired
        self._open_limit = open_limit
        self._open_bytes = open_bytes
        self._unnamed_limit = unnamed_limit
        self._samplers: OrderedDict[str, _Sampler] = OrderedDict()
        self._of_session: Counter[str] = Counter()  # samplers that count towards the quota
        self._passing: dict[str, _Passing] = {}
        self._feeds: dict[str, OrderedDict[Client, Feed]] = {}  # by owner
        self._tasks: set[asyncio.Task[object]] = set()
        promises.on_finish.append(self._put_in_feed)

    async def restore(self) -> None:
        """Count the samplers of active sessions."""
        for session_id, owner in await self._db(self._store.active_samplers):
            self._count(owner, session_id)

    def _count(self, owner: str, session_id: str) -> None:
        self._quota.add(owner)
        self._of_session[session_id] += 1

    def _uncount(self, row: SamplerRow) -> None:
        if self._of_session[row.session_id]:  # otherwise its session has ended
            self._of_session[row.session_id] -= 1
            self._quota.release(row.owner)

    def check_room(self, owner: str) -> None:
        self._quota.check(owner)

    # -- creating ------------------------------------------------------------------------------

    async def create(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """Create a sampler of a base model or a checkpoint; a retry with the same number returns the same one."""
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
        self._quota.take(owner)  # before the first await: many requests may arrive at once
        try:
            row = await self._prepared(owner, session_id, sampler_id, base_model, model_path)
            added = await self._add(row)
        finally:
            self._quota.release(owner)  # `_add` counts it permanently
        return added.row.sampler_id

    async def _prepared(
        self,
        owner: str,
        session_id: str,
        sampler_id: str,
        base_model: str | None,
        model_path: str | None,
    ) -> SamplerRow:
        """Put the weights of a new sampler into place and return its row."""
        if model_path is not None:
            checkpoint, _ = await self._checkpoints.readable(owner, model_path)
            check_samplable(checkpoint, "model_path")
            run = await self._checkpoints.run_of(checkpoint)
            if base_model is not None and base_model != run.base_model:
                raise InvalidInputError(
                    f"the base model of the checkpoint is {run.base_model}, not {base_model!r:.200}",
                    field="base_model",
                )
            await self._engine.catalog.model(run.base_model, "model_path")
            await self._checkpoints.take(checkpoint, directories.link, self.place(sampler_id))
            path = tinker_path(checkpoint)
            return SamplerRow(sampler_id, session_id, owner, run.base_model, path, self._now())
        if base_model is None:
            raise InvalidInputError("give base_model or model_path", field="base_model")
        await self._engine.catalog.model(base_model, "base_model")
        return SamplerRow(sampler_id, session_id, owner, base_model, None, self._now())

    def place(self, sampler_id: str) -> Path:
        """The directory of a sampler's weights."""
        return self._directory / sampler_id.replace("/", "_")

    async def add_unnamed(
        self,
        owner: str,
        session_id: str,
        sampler_id: str,
        base_model: str,
        ttl_seconds: int | None,
        lease: EngineLease,
    ) -> None:
        """Add a sampler whose weights are in place and which an engine has open."""
        now = self._now()
        row = SamplerRow(
            sampler_id,
            session_id,
            owner,
            base_model,
            None,
            now,
            unnamed=True,
            expires_at=None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds),
        )
        await self._opened(await self._add(row), lease)
        await self._close_unused()
        await self._thin_out_unnamed(session_id)

    async def _thin_out_unnamed(self, session_id: str) -> None:
        """Delete the least recently used unnamed samplers of a session: a training loop makes one per step."""
        rows = await self._db(self._store.samplers_of_session, session_id)
        unnamed = [row for row in rows if row.unnamed]
        used = {sampler_id: place for place, sampler_id in enumerate(self._samplers)}
        unnamed.sort(
            key=lambda row: used.get(row.sampler_id, -1)
        )  # those not in memory come first, by age
        for row in unnamed[: max(0, len(unnamed) - self._unnamed_limit)]:
            sampler = self._samplers.get(row.sampler_id)
            if sampler is None or not sampler.drawing:
                await self._delete(row)

    async def _add(self, row: SamplerRow) -> _Sampler:
        kept = await self._db(self._store.add_sampler, row)
        if kept is row:  # otherwise it existed before
            self._count(row.owner, row.session_id)
        return self._know(kept)

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
                raise NotFoundError(
                    f"There is no sampler {sampler_id!r:.200}. A session keeps only the {self._unnamed_limit} unnamed "
                    "samplers that were used last (setting max_unnamed_samplers); weights saved under a "
                    "name are kept."
                )
            sampler = self._know(row)
        if sampler.row.owner != owner:
            raise NotFoundError(f"There is no sampler {sampler_id!r:.200}.")
        return sampler

    def known(self, sampler_id: str) -> SamplerRow | None:
        """The row of a sampler that is in memory."""
        sampler = self._samplers.get(sampler_id)
        return None if sampler is None else sampler.row

    async def join(self, sampler_id: str, owner: str) -> int:
        await self._find(sampler_id, owner)
        number = await self._db(self._store.next_clone, sampler_id)
        assert number is not None
        return number

    def clear_scratch(self, seconds: float = 0.0) -> None:
        """Remove incomplete directories that did not change for some seconds: a crash of the service or an engine left them."""
        for leftover in self._directory.glob(".*"):
            with contextlib.suppress(OSError):  # it has got its name meanwhile
                if leftover.stat().st_ctime <= time.time() - seconds:
                    shutil.rmtree(leftover, ignore_errors=True)

    async def close_session(self, session_id: str) -> None:
        """Close the samplers of an ended session and cancel their requests."""
        for row in await self._db(self._store.samplers_of_session, session_id):
            self._uncount(row)
            await self._close(row.sampler_id)
            feeds = self._feeds.get(row.owner, OrderedDict())
            for key in [key for key in feeds if key[0] == row.sampler_id]:
                del feeds[key]
        del self._of_session[session_id]

    async def delete_expired(self) -> None:
        """Delete expired samplers that no request uses, and what engines that died left of others."""
        await self._files(lambda: self.clear_scratch(_WRITING))
        for row in await self._db(self._store.expired_samplers, self._expiry()):
            sampler = self._samplers.get(row.sampler_id)
            if sampler is None or not sampler.drawing:
                await self._delete(row)

    async def _delete(self, row: SamplerRow) -> None:
        await self._close(row.sampler_id)
        await self._db(self._store.delete_sampler, row.sampler_id)
        self._uncount(row)

    async def _close(self, sampler_id: str) -> None:
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is not None:
            sampler.closed = True
            for task in list(sampler.drawing):
                task.cancel()
            # Even if it is not marked as open: a call that opens it may be in flight.
            await self._engine.sampler.close_sampler(sampler_id)
        await self._files.remove(self.place(sampler_id))

    # -- without a session ---------------------------------------------------------------------

    async def _passing_sampler(self, owner: str, request: SampleRequest) -> _Sampler:
        """The sampler for requests that name a model or a checkpoint instead of a sampling session.

        The first such request creates it, in a session that expires like any other.
        """
        passing = self._passing.setdefault(owner, _Passing())
        async with passing.making:
            await self._passing_session(owner, passing)
            base_model, path = request.base_model, request.model_path
            # The checkpoint at this path may have been replaced or deleted since.
            written = None
            if path is not None:
                written = (await self._checkpoints.readable(owner, path))[0].created_at
            key = base_model, path, written
            sampler_id = passing.made.get(key)
            if sampler_id is None:
                sampler_id = f"{passing.session_id}:sample:{passing.count}"
                passing.count += 1
                await self._make(owner, passing.session_id, sampler_id, base_model, path)
                passing.made[key] = sampler_id
            passing.made.move_to_end(key)
            await self._thin_out(passing)
            return await self._find(sampler_id, owner)

    async def _passing_session(self, owner: str, passing: _Passing) -> None:
        if passing.session_id:
            with contextlib.suppress(
                TinkerError
            ):  # the session has ended, and its samplers are closed
                return await self._sessions.check_active(passing.session_id, owner)
        request = CreateSessionRequest(tags=["sampling"], sdk_version="")
        passing.session_id = await self._sessions.create(owner, request, None)
        passing.made.clear()
        return None

    async def _thin_out(self, passing: _Passing) -> None:
        """Delete the least recently used samplers: a training loop samples from one new checkpoint after another."""
        for key, sampler_id in list(passing.made.items())[:-PASSING_LIMIT]:
            sampler = self._samplers.get(sampler_id)
            if sampler is None or not sampler.drawing:
                del passing.made[key]
                row = await self._db(self._store.sampler, sampler_id)
                await self._close(sampler_id)
                await self._db(self._store.delete_sampler, sampler_id)
                if row is not None:
                    self._uncount(row)

    # -- sampling ------------------------------------------------------------------------------

    async def sample(
        self, row: Operation[object], owner: str, request: SampleRequest, body: bytes
    ) -> Promise:
        """Accept a sampling request."""
        sampler = await self._sampler_of(owner, request)
        sampler_id = sampler.row.sampler_id
        # Sequence numbers are unique within a sampling session. Without one, several clients use the same numbers.
        number = None if request.sampling_session_id is None else request.seq_id
        known = self._promises.duplicate(sampler_id, number)
        if known is None:
            job = self._job(sampler, request)
            extra = {"num_samples": request.num_samples}
            known = self._promises.accept(
                row, owner, sampler_id, number, request, body, "json", extra
            )
            self._start(known, sampler, job, request)
        await self._promises.flushed()
        return known

    def _job(self, sampler: _Sampler, request: SampleRequest) -> SampleJob:
        return sample_job(
            request,
            sampler.row.sampler_id,
            limits=self._limits,
            context_length=self._engine.catalog.context_length(sampler.row.base_model),
        )

    async def resume(self, promise: Promise) -> None:
        """Run a request that was accepted before a restart."""
        try:
            request: SampleRequest = self._promises.request_of(promise)
            sampler = await self._find(promise.scope, promise.owner)
            await self._sessions.check_active(sampler.row.session_id, promise.owner)
            job = self._job(sampler, request)
        except TinkerError as error:
            self._promises.fail(promise, error)
            return
        self._start(promise, sampler, job, request)

    async def stream(
        self, owner: str, request: SampleRequest
    ) -> tuple[AsyncIterator[SampleStreamChunk], Callable[[], object]]:
        """The tokens as they are sampled, and what ends that early; an invalid request is refused before the first."""
        queue: asyncio.Queue[StreamedToken | None] = asyncio.Queue()
        drawing = await self.draw(owner, request, queue.put_nowait)
        drawing.add_done_callback(lambda _: queue.put_nowait(None))
        return _chunks(drawing, queue), drawing.cancel

    async def draw(
        self,
        owner: str,
        request: SampleRequest,
        on_token: OnToken | None = None,
        end_tokens: tuple[int, ...] | None = None,
    ) -> asyncio.Task[SampledResult]:
        """Start sampling without a promise; an invalid request is refused before that.

        `on_token` is called for every token. Stop strings of the request are in addition to `end_tokens`.
        """
        listeners = None if on_token is None else [on_token]
        (drawing,) = await self.draw_all(owner, [request], listeners, end_tokens)
        return drawing

    def check_draws(self, owner: str, count: int) -> None:
        """Refuse as many draws as a request wants, before they are made."""
        self._promises.check_room(owner, count)

    async def draw_all(
        self,
        owner: str,
        requests: Sequence[SampleRequest],
        listeners: Sequence[OnToken] | None = None,
        end_tokens: tuple[int, ...] | None = None,
    ) -> list[asyncio.Task[SampledResult]]:
        """Start requests to one sampler whose results make one answer, or refuse all of them.

        As `draw`, with a listener for each request.
        """
        sampler = await self._sampler_of(owner, requests[0])
        jobs = [
            replace(self._job(sampler, request), stream=listeners is not None)
            for request in requests
        ]
        if end_tokens is not None:
            jobs = [replace(job, stop_tokens=end_tokens) for job in jobs]
        context_length = self._engine.catalog.context_length(sampler.row.base_model)
        self._limits.check_together(jobs, context_length)
        self._promises.take_room(owner, len(jobs))
        return [
            self._begin(sampler, job, None if listeners is None else listeners[place])
            for place, job in enumerate(jobs)
        ]

    def _begin(
        self, sampler: _Sampler, job: SampleJob, on_token: OnToken | None
    ) -> asyncio.Task[SampledResult]:
        """Start a request that is counted as pending until it is done."""

        def ended(drawing: asyncio.Task[SampledResult]) -> None:
            self._tasks.discard(drawing)
            self._promises.give_room_back(sampler.row.owner)

        drawing = asyncio.ensure_future(self._drawn(sampler, job, on_token=on_token))
        self._tasks.add(drawing)
        drawing.add_done_callback(ended)
        return drawing

    async def _sampler_of(self, owner: str, request: SampleRequest) -> _Sampler:
        if request.sampling_session_id is not None:
            sampler = await self._find(request.sampling_session_id, owner)
            await self._sessions.check_active(sampler.row.session_id, owner)
            expires_at = sampler.row.expires_at
            if expires_at is not None and expires_at <= self._expiry():
                raise NotFoundError(f"The sampler {sampler.row.sampler_id!r:.200} has expired.")
            return sampler
        if request.base_model is None and request.model_path is None:
            raise InvalidInputError(
                "is required (create_sampling_session returns one), unless base_model or model_path is given",
                field="sampling_session_id",
            )
        return await self._passing_sampler(owner, request)

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
        on_token: OnToken | None = None,
    ) -> SampledResult:
        """Run a job on the engine, after opening the sampler there."""
        job = replace(job, owner=sampler.row.owner)
        streamed = 0

        def send(token: StreamedToken) -> None:
            nonlocal streamed
            streamed += 1
            assert on_token is not None
            on_token(token)

        async def draw() -> SampledResult:
            await self._open(sampler)
            try:
                return await self._engine.sampler.sample(job, send if on_token else None)
            except EngineDiedError:
                if not streamed:
                    raise
                # No retry: the client would receive tokens twice, and perhaps different ones.
                raise RequestFailedError(
                    f"The engine's process died after {streamed} tokens of this stream; send the request again.",
                    category=RequestErrorCategory.Server,
                ) from None

        task = asyncio.current_task()
        assert task is not None
        sampler.drawing.add(task)
        try:
            if sampler.closed:
                raise asyncio.CancelledError
            await self._try_constraint(sampler.row, job)
            result = await self._engine.persist(draw)
        except asyncio.CancelledError:
            if not sampler.closed:
                raise
            raise RequestFailedError(
                f"Sampler {sampler.row.sampler_id!r} is closed: its session has ended, or it has expired.",
                category=RequestErrorCategory.User,
            ) from None
        finally:
            sampler.drawing.discard(task)
        row = sampler.row
        drawn = sum(map(len, result.tokens))
        self._usage.add(
            row.owner, row.session_id, row.base_model, "sampling_prefill", len(job.prompt_T)
        )
        self._usage.add(row.owner, row.session_id, row.base_model, "sampling_sample", drawn)
        return result

    async def _try_constraint(self, row: SamplerRow, job: SampleJob) -> None:
        """Refuse a constraint that would keep an engine from its other work."""
        if job.constraint is not None and self._trials is not None:
            model = await self._engine.catalog.model(row.base_model, "base_model")
            await self._trials.check(row.owner, model, job.constraint)

    @property
    def under_way(self) -> int:
        """The number of requests that wait for the engine or are in its batch."""
        return len(self._tasks)

    # -- open and closed -----------------------------------------------------------------------

    async def _open(self, sampler: _Sampler) -> None:
        row = sampler.row
        if row.sampler_id in self._samplers:
            self._samplers.move_to_end(row.sampler_id)
        if sampler.is_open:
            return
        async with sampler.opening:
            if sampler.is_open:
                return
            if sampler.directory is None and row.has_weights:
                raise InternalServerError(f"The weights of sampler {row.sampler_id!r} are missing.")
            lease = await self._engine.sampler.open_sampler(
                row.sampler_id, row.base_model, sampler.directory
            )
            await self._opened(sampler, lease)
        await self._close_unused()

    async def _opened(self, sampler: _Sampler, lease: EngineLease) -> None:
        sampler.lease = lease
        if sampler.directory is not None:
            sampler.size = await self._files(directories.stored_bytes, sampler.directory)

    async def _close_unused(self) -> None:
        """Close the least recently used samplers in the engine; they can be opened again."""
        opened = [sampler for sampler in self._samplers.values() if sampler.is_open]
        sizes = [sampler.size for sampler in opened]
        for sampler in opened[: surplus(sizes, least=self._open_limit, limit=self._open_bytes)]:
            if not sampler.drawing and sampler.directory is not None:
                sampler.lease = None
                await self._engine.sampler.close_sampler(sampler.row.sampler_id)

    # -- waiting for any -----------------------------------------------------------------------

    async def feed(self, sampler_id: str, clone: int, owner: str) -> Feed:
        """The feed of finished requests for one client of a sampler."""
        await self._find(sampler_id, owner)
        key = sampler_id, clone
        feeds = self._feeds.setdefault(owner, OrderedDict())
        if key not in feeds:
            # Cursors start at the clock, so that they continue to grow across a restart.
            feeds[key] = Feed(cursor=time.time_ns() // 1000)
            done = [promise for promise in self._promises.of_client(key) if promise.done]
            for promise in sorted(done, key=lambda promise: promise.finished_at):
                feeds[key].put(promise)
            if len(feeds) > FEED_LIMIT:
                feeds.popitem(last=False)
        feeds.move_to_end(key)
        return feeds[key]

    def trim_feeds(self) -> None:
        """Remove evicted requests from the feeds."""
        for feeds in self._feeds.values():
            for feed in feeds.values():
                feed.keep(lambda promise: self._promises.knows(promise.request_id))

    def _put_in_feed(self, promise: Promise) -> None:
        feeds = self._feeds.get(promise.owner)
        if feeds is not None and (feed := feeds.get(promise.client)) is not None:
            feed.put(promise)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _chunks(
    drawing: asyncio.Task[SampledResult], queue: asyncio.Queue[StreamedToken | None]
) -> AsyncIterator[SampleStreamChunk]:
    try:
        while (token := await queue.get()) is not None:
            yield SampleStreamChunk(token_id=token.token, logprob=token.logprob, index=token.index)
        result = await drawing
        for index, reason in enumerate(result.stop_reasons):
            yield SampleStreamChunk(
                index=index, finish_reason=reason, total_tokens=len(result.tokens[index])
            )
    finally:
        drawing.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await drawing


def _response(result: SampledResult, targets: TensorData | None) -> SampleResponse:
    """The sampled result as a response of the protocol."""
    topk, kept = result.topk_sampled, result.kept_mass
    sequences = [
        SampledSequence(
            stop_reason,
            tokens_np=tokens.astype(np.int32, copy=False),
            logprobs_np=logprobs.astype(np.float32, copy=False),
            topk_logprobs_np=None if topk is None else TopkLogprobs(*topk[index]),
            kept_mass_np=None if kept is None else kept[index],
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
        prompt_cache_hit_tokens=result.cached_tokens,
    )


def _in_layout_of(targets: TensorData, found: Array) -> TensorData:
    """Logprobs in the layout of the request: dense, or sparse with the same entries."""
    if targets.indices is None:
        return TensorData.from_numpy(found)
    crow, col = targets.indices
    rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
    return TensorData(found[rows, col], "float32", targets.shape, crow, col)
