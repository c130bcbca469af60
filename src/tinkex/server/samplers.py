"""Samplers: frozen weights that can be drawn from.

Every sampler with an adapter has a directory of its own, so it stays what it was when the checkpoint it was made
from is replaced or deleted, when the engine has put it away to save memory, and across restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from tinkex._wire.operations import Operation
from tinkex.engine import directories
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
    CreateSessionRequest,
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
from .inputs import SampleLimits, sample_job
from .quotas import Quota
from .sessions import Sessions
from .store import Database, SamplerRow
from .usage import Usage
from .worker import EngineDiedError

__all__ = ["UNNAMED_LIMIT", "Samplers"]

#: Adapters that the engine keeps at hand for sampling.
OPEN_LIMIT: Final = 32
#: Samplers without a name that a session keeps.
UNNAMED_LIMIT: Final = 100
#: Samplers of one owner that are kept for requests without a session.
PASSING_LIMIT: Final = 32
#: Clients of one owner's samplers whose finished requests are kept in order; for others they are found anew.
FEED_LIMIT: Final = 1000
#: Clients number their requests from this many times their own number.
CLONE_STRIDE: Final = 1_000_000_000

_FeedKey = tuple[str, int]  # a sampler, and the number of its client


@dataclass(eq=False)
class _Sampler:
    row: SamplerRow
    directory: Path | None
    open_in: int = -1  # the life of the engine in which it was opened
    closed: bool = False  # for good: its session has ended, or its time is over
    drawing: set[asyncio.Task[Any]] = field(default_factory=set)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class _Passing:
    """What an owner samples from without having made a session: the samplers by what they are of."""

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
        sessions: Sessions,
        checkpoints: Checkpoints,
        promises: Promises,
        engine: Supervisor,
        usage: Usage,
        quota: Quota,
        *,
        limits: SampleLimits,
        now: Callable[[], datetime],
        expiry: Callable[[], datetime] | None = None,
        open_limit: int = OPEN_LIMIT,
        unnamed_limit: int = UNNAMED_LIMIT,
    ) -> None:
        self._directory = directory
        self._db, self._store = database, database.store
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._promises = promises
        self._engine = engine
        self._usage = usage
        self._quota = quota
        self._limits = limits
        self._now = now
        self._expiry = expiry or now  # up to when samplers have expired
        self._open_limit = open_limit
        self._unnamed_limit = unnamed_limit
        self._samplers: OrderedDict[str, _Sampler] = OrderedDict()
        self._of_session: Counter[str] = Counter()  # how many count towards the quota
        self._passing: dict[str, _Passing] = {}
        self._feeds: dict[str, OrderedDict[_FeedKey, Feed]] = {}  # by owner
        self._tasks: set[asyncio.Task[None]] = set()
        promises.on_finish.append(self._tell_feed)

    async def restore(self) -> None:
        """Count the samplers of sessions that have not ended."""
        for session_id, owner in await self._db(self._store.active_samplers):
            self._count(owner, session_id)

    def _count(self, owner: str, session_id: str) -> None:
        self._quota.add(owner)
        self._of_session[session_id] += 1

    def _uncount(self, row: SamplerRow) -> None:
        if self._of_session[row.session_id]:  # else its session has ended
            self._of_session[row.session_id] -= 1
            self._quota.release(row.owner)

    def check_room(self, owner: str) -> None:
        self._quota.check(owner)

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
        self._quota.take(owner)  # before anything is waited for: many may come at once
        try:
            row = await self._prepared(owner, session_id, sampler_id, base_model, model_path)
            added = await self._add(row)
        finally:
            self._quota.release(owner)  # counted for good where it was added
        return added.row.sampler_id

    async def _prepared(
        self,
        owner: str,
        session_id: str,
        sampler_id: str,
        base_model: str | None,
        model_path: str | None,
    ) -> SamplerRow:
        """The row of a new sampler, whose weights are in their place."""
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
            await self._db(directories.link, source, self.place(sampler_id))
            path = tinker_path(checkpoint)
            return SamplerRow(sampler_id, session_id, owner, run.base_model, path, self._now())
        if base_model is None:
            raise InvalidInputError("give base_model or model_path", field="base_model")
        await self._engine.model(base_model, "base_model")
        return SamplerRow(sampler_id, session_id, owner, base_model, None, self._now())

    def place(self, sampler_id: str) -> Path:
        """Where a sampler keeps its weights."""
        return self._directory / sampler_id.replace("/", "_")

    async def add_unnamed(
        self,
        owner: str,
        session_id: str,
        sampler_id: str,
        base_model: str,
        ttl_seconds: int | None,
        life: int,
    ) -> None:
        """List a sampler whose weights are in their place, and which an engine has open in that life of it."""
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
        (await self._add(row)).open_in = life
        await self._put_away()
        await self._thin_out_unnamed(session_id)

    async def _thin_out_unnamed(self, session_id: str) -> None:
        """Delete the unnamed samplers of a session that were not used for longest: a training loop makes one a step."""
        rows = await self._db(self._store.samplers_of_session, session_id)
        unnamed = [row for row in rows if row.unnamed]
        used = {sampler_id: place for place, sampler_id in enumerate(self._samplers)}
        unnamed.sort(key=lambda row: used.get(row.sampler_id, -1))  # else by their age
        for row in unnamed[: max(0, len(unnamed) - self._unnamed_limit)]:
            sampler = self._samplers.get(row.sampler_id)
            if sampler is None or not sampler.drawing:
                await self._delete(row)

    async def _add(self, row: SamplerRow) -> _Sampler:
        kept = await self._db(self._store.add_sampler, row)
        if kept is row:  # else it was there before
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
                    f"There is no sampler {sampler_id!r:.200}. Of its samplers without a name a session keeps "
                    f"the {self._unnamed_limit} that were used last (max_unnamed_samplers); weights saved "
                    "under a name stay."
                )
            sampler = self._know(row)
        if sampler.row.owner != owner:
            raise NotFoundError(f"There is no sampler {sampler_id!r:.200}.")
        return sampler

    async def join(self, sampler_id: str, owner: str) -> int:
        await self._find(sampler_id, owner)
        number = await self._db(self._store.next_clone, sampler_id)
        assert number is not None
        return number

    def clear_scratch(self) -> None:
        """Remove what a crash left half written."""
        for leftover in self._directory.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)

    async def close_session(self, session_id: str) -> None:
        """Let go of the samplers of a session that has ended, and of what is being drawn from them."""
        for row in await self._db(self._store.samplers_of_session, session_id):
            self._uncount(row)
            await self._let_go(row.sampler_id)
            feeds = self._feeds.get(row.owner, OrderedDict())
            for key in [key for key in feeds if key[0] == row.sampler_id]:
                del feeds[key]
        del self._of_session[session_id]

    async def delete_expired(self) -> None:
        """Let go of what has outlived its time, once nobody draws from it."""
        for row in await self._db(self._store.expired_samplers, self._expiry()):
            sampler = self._samplers.get(row.sampler_id)
            if sampler is None or not sampler.drawing:
                await self._delete(row)

    async def _delete(self, row: SamplerRow) -> None:
        await self._let_go(row.sampler_id)
        await self._db(self._store.delete_sampler, row.sampler_id)
        self._uncount(row)

    async def _let_go(self, sampler_id: str) -> None:
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is not None:
            sampler.closed = True
            for task in list(sampler.drawing):
                task.cancel()
            # Whether or not it is known to be open: somebody may just have asked for that.
            await self._engine.call_now("close_sampler", sampler_id)
        await asyncio.to_thread(shutil.rmtree, self.place(sampler_id), ignore_errors=True)

    # -- without a session ---------------------------------------------------------------------

    async def _passing_sampler(self, owner: str, request: SampleRequest) -> _Sampler:
        """A sampler for requests that name a model or a checkpoint instead, made for the first of them.

        It belongs to a session of its owner that ends, as any other, when nothing is heard of it for long.
        """
        passing = self._passing.setdefault(owner, _Passing())
        async with passing.making:
            await self._passing_session(owner, passing)
            base_model, path = request.base_model, request.model_path
            # Under the same path there may be other weights by now, or none.
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
            with contextlib.suppress(TinkerError):  # it has ended, and its samplers are gone
                return await self._sessions.check_active(passing.session_id, owner)
        request = CreateSessionRequest(tags=["sampling"], sdk_version="")
        passing.session_id = await self._sessions.create(owner, request, None)
        passing.made.clear()
        return None

    async def _thin_out(self, passing: _Passing) -> None:
        """Let go of those that were not used for longest: who trains goes from one checkpoint to the next."""
        for key, sampler_id in list(passing.made.items())[:-PASSING_LIMIT]:
            sampler = self._samplers.get(sampler_id)
            if sampler is None or not sampler.drawing:
                del passing.made[key]
                row = await self._db(self._store.sampler, sampler_id)
                await self._let_go(sampler_id)
                await self._db(self._store.delete_sampler, sampler_id)
                if row is not None:
                    self._uncount(row)

    # -- drawing -------------------------------------------------------------------------------

    async def sample(
        self, row: Operation[Any], owner: str, request: SampleRequest, body: bytes
    ) -> Promise:
        """Accept a request to sample."""
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
            context_length=self._engine.context_length(sampler.row.base_model),
        )

    async def resume(self, promise: Promise) -> None:
        """Go on with a request that was accepted before a restart."""
        try:
            request: SampleRequest = self._promises.request_of(promise)
            sampler = await self._find(promise.scope, promise.owner)
            await self._sessions.check_active(sampler.row.session_id, promise.owner)
            job = self._job(sampler, request)
        except TinkerError as error:
            self._promises.fail(promise, error)
            return
        self._start(promise, sampler, job, request)

    async def stream(self, owner: str, request: SampleRequest) -> AsyncIterator[SampleStreamChunk]:
        """Tokens as they are drawn; what is wrong with the request is raised before the first."""
        sampler = await self._sampler_of(owner, request)
        self._promises.check_room(owner)
        job = self._job(sampler, request)
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
            expires_at = sampler.row.expires_at
            if expires_at is not None and expires_at <= self._expiry():
                raise NotFoundError(f"The sampler {sampler.row.sampler_id!r:.200} has expired.")
            return sampler
        if request.base_model is None and request.model_path is None:
            raise InvalidInputError(
                "is required; create_sampling_session gives one. Or give base_model or model_path",
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
        on_token: Callable[[Token], None] | None = None,
    ) -> SampledResult:
        """Have a job done by an engine that has the sampler open."""
        job = replace(job, owner=sampler.row.owner)
        told = 0

        def tell(token: Token) -> None:
            nonlocal told
            told += 1
            assert on_token is not None
            on_token(token)

        async def draw() -> SampledResult:
            await self._open(sampler)
            try:
                return await self._engine.worker.sample(job, tell if on_token else None)
            except EngineDiedError:
                if not told:
                    raise
                # From the beginning it would be said twice, and perhaps not the same.
                raise RequestFailedError(
                    f"The engine's process died after {told} tokens of this stream; ask for it again.",
                    category=RequestErrorCategory.Server,
                ) from None

        task = asyncio.current_task()
        assert task is not None
        sampler.drawing.add(task)
        try:
            if sampler.closed:
                raise asyncio.CancelledError
            result = await self._engine.persist(draw)
        except asyncio.CancelledError:
            if not sampler.closed:
                raise
            raise RequestFailedError(
                f"Sampler {sampler.row.sampler_id!r} is gone: its session has ended, or its time was over.",
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
            if sampler.directory is None and row.has_weights:
                raise InternalServerError(f"The weights of sampler {row.sampler_id!r} are gone.")
            life = self._engine.life  # another one would know nothing of it
            await self._engine.worker.call_now(
                "open_sampler", row.sampler_id, row.base_model, directory=sampler.directory
            )
            sampler.open_in = life
        await self._put_away()

    async def _put_away(self) -> None:
        """Close the samplers that were not used for longest; they can be opened again."""
        life = self._engine.life
        opened = [sampler for sampler in self._samplers.values() if sampler.open_in == life]
        for sampler in opened[: max(0, len(opened) - self._open_limit)]:
            if not sampler.drawing and sampler.directory is not None:
                sampler.open_in = -1
                await self._engine.call_now("close_sampler", sampler.row.sampler_id)

    # -- waiting for any -----------------------------------------------------------------------

    async def feed(self, sampler_id: str, clone: int, owner: str) -> Feed:
        """What was finished for one client of a sampler."""
        await self._find(sampler_id, owner)
        key = sampler_id, clone
        feeds = self._feeds.setdefault(owner, OrderedDict())
        if key not in feeds:
            # The clock, so that the numbers go on where those of before a restart have ended.
            feeds[key] = Feed(cursor=time.time_ns() // 1000)
            done = [
                promise for promise in self._promises if promise.result and _feed(promise) == key
            ]
            for promise in sorted(done, key=lambda promise: promise.finished_at):
                feeds[key].put(promise)
            if len(feeds) > FEED_LIMIT:
                feeds.popitem(last=False)
        feeds.move_to_end(key)
        return feeds[key]

    def trim_feeds(self) -> None:
        """Let go of what nobody can ask for any more."""
        for feeds in self._feeds.values():
            for feed in feeds.values():
                feed.keep(lambda promise: self._promises.knows(promise.request_id))

    def _tell_feed(self, promise: Promise) -> None:
        feeds = self._feeds.get(promise.owner)
        if feeds is not None and (feed := feeds.get(_feed(promise))) is not None:
            feed.put(promise)

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
