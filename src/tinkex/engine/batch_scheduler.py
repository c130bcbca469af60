"""Decides what the next sampling step reads: which continuations are in the batch, and how much of each prompt.

Pure bookkeeping without torch. A step reads one token of every continuation that is drawing, and a limited number of
prompt tokens, so that a long prompt does not delay the others. A continuation can leave the batch at any time. When it
returns, the part of its text whose pages were evicted meanwhile is read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from .continuations import Chunk, Continuation, SamplingRequest
from .pages import PagePool, chain

__all__ = ["BatchScheduler", "Fork", "Step"]


@dataclass(frozen=True, slots=True)
class Fork:
    """A continuation that starts with the cache of another one; `copied` is the page to copy, from and to."""

    source: Continuation
    target: Continuation
    copied: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Step:
    """What a step reads; `fresh` are pages to clear before."""

    chunks: list[Chunk] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


class BatchScheduler:
    """The continuations of all requests on one base model.

    Continuations in the batch use at most the pages of the pool's budget; one always runs, even if it needs more.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_sequences: int,
        prefill_tokens: int,
        share_prefixes: bool = True,
    ) -> None:
        self.pool = pool
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens
        self._share_prefixes = share_prefixes
        self._pages_that_work = inf  # lowered after a failed step
        self._requests: dict[str, SamplingRequest] = {}  # all unfinished requests
        # By owner: the requests with a waiting continuation. The owner to serve next comes first.
        self._lines: OrderedDict[str, OrderedDict[str, SamplingRequest]] = OrderedDict()
        self._batch: dict[Continuation, None] = {}
        self._followers = 0
        self._fresh: list[int] = []
        #: Continuations that left the batch since the list was last cleared.
        self.departed: list[Continuation] = []

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> int:
        return len(self._batch) + self._followers

    @property
    def depth(self) -> tuple[int, int]:
        """Number of waiting requests and of continuations in the batch."""
        return sum(map(len, self._lines.values())), self.running

    # -- requests ----------------------------------------------------------------------------

    def add(self, request: SamplingRequest) -> None:
        self._requests[request.job_id] = request
        self._line(request)[request.job_id] = request

    def get(self, job_id: str) -> SamplingRequest | None:
        return self._requests.get(job_id)

    def requests(self) -> Iterable[SamplingRequest]:
        return self._requests.values()

    def drop(self, request: SamplingRequest) -> None:
        """Remove a request and its continuations; what they computed may be wrong, so nothing of it is kept."""
        del self._requests[request.job_id]
        self._leave_line(request)
        if request.started:
            for one in [one for one in self._batch if one.request is request]:
                self._leave(one, keep=request.failure is None)
            for leader in self._batch:
                self._unfollow(leader, [one for one in leader.followers if one.request is request])

    def finish(self, continuation: Continuation) -> bool:
        """Remove a continuation that is complete; return whether its request is complete."""
        if continuation in self._batch:
            self._leave(continuation)
        request = continuation.request
        request.left -= 1
        if request.left == 0:
            del self._requests[request.job_id]
        return request.left == 0

    def _line(self, request: SamplingRequest) -> OrderedDict[str, SamplingRequest]:
        return self._lines.setdefault(request.job.owner, OrderedDict())

    def _leave_line(self, request: SamplingRequest) -> None:
        owner = request.job.owner
        line = self._lines.get(owner, OrderedDict())
        if line.pop(request.job_id, None) is not None and not line:
            del self._lines[owner]

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose what to read next, and take the pages for it."""
        self._make_room()
        reading = sum(one.unread for one in self._batch if one.unread > 1)
        self._admit(self._prefill_tokens - reading)
        fresh, self._fresh = self._fresh, []
        return Step(_by_adapter(self._chunks()), fresh)

    def _chunks(self) -> Iterator[Chunk]:
        budget = self._prefill_tokens
        for one in self._batch:
            if one.unread == 1:
                yield Chunk(one, one.length, 1)
            elif (count := min(one.unread, budget)) > 1:
                yield Chunk(one, one.length, count)
                budget -= count

    def _make_room(self) -> None:
        """Take the pages that the batch grows into; if there are too few, the last continuations leave it."""
        for one in list(self._batch):
            while one in self._batch and self.pool.needed(one.text_length) > len(one.pages):
                if self._has_room(1) or len(self._batch) == 1:
                    self._extend(one, self.pool.needed(one.text_length))
                else:
                    self._put_back(next(reversed(self._batch)))

    def _has_room(self, pages: int) -> bool:
        return self.pool.used + pages <= min(self.pool.budget, self._pages_that_work)

    def _has_room_beside(self, pages: int) -> bool:
        """Leave a page for each continuation of the batch, so that the next steps need not put one back."""
        spare = self.pool.budget - self.pool.used - self.running
        return self._has_room(pages) and pages <= spare

    def _extend(self, one: Continuation, pages: int) -> None:
        taken = self.pool.take(pages - len(one.pages))
        one.pages += taken
        self._fresh += taken

    def _admit(self, budget: int) -> None:
        """Take the next continuations that fit, owners in turn.

        Three limits apply: the number of continuations in the batch, the pages, and the tokens to read in one step.
        """
        if not self._lines:
            return
        leaders = {_same_reading(one): one for one in self._batch if one.unread > 1}
        while self._lines and self.running < self._max_sequences:
            owner, line = next(iter(self._lines.items()))
            request = next(iter(line.values()))
            one = request.take()
            reading = _same_reading(one)
            leader = leaders.get(reading)
            if leader is not None:
                fits = self._follow(leader, one)
            else:
                fits = (budget > 0 or not self._batch) and self._start(one)
            if not fits:
                request.back.append(one)
                break
            if leader is None:
                leaders[reading] = one
                budget -= one.unread
            self._lines.move_to_end(owner)
            if not request.waits:
                self._leave_line(request)

    def _start(self, one: Continuation) -> bool:
        """Take the pages of a continuation's text, unless they do not fit beside the batch."""
        found = self._cached_pages(one)
        self.pool.share(found)  # from here on they are not counted as available
        missing = self.pool.needed(one.text_length + 1) - len(found)
        if self._batch and not self._has_room_beside(missing):
            self.pool.give_back(found)
            return False
        one.pages, one.length = found, len(found) * self.pool.size
        if not one.tokens:
            one.request.cached_tokens = max(one.request.cached_tokens, one.length)
        self._extend(one, self.pool.needed(one.text_length))
        self._batch[one] = None
        return True

    def _cached_pages(self, one: Continuation) -> list[int]:
        """Pages that hold the beginning of a text; at least its last token is read, to get the next logits."""
        one.keys = []
        if not self._share_prefixes:
            return []
        reused, request = one.text_length - 1, one.request
        if request.prompt is None and request.scored_from is not None:
            reused = min(reused, request.scored_from - 1)
        keys = chain(_start_key(request), one.text(0, reused), self.pool.size)
        remembered: list[bytes] = []
        found = self.pool.find(_recorded(keys, remembered))
        one.keys = remembered[: len(found)]
        return found

    def _follow(self, leader: Continuation, one: Continuation) -> bool:
        """Let a continuation wait for another one that reads the same text."""
        if not self._has_room_beside(1):
            return False
        leader.followers.append(one)
        self._followers += 1
        return True

    # -- after a step ------------------------------------------------------------------------

    def advance(self, chunks: Iterable[Chunk]) -> list[Fork]:
        """Record what was read; return the continuations that now join the batch with the same text."""
        forks: list[Fork] = []
        for chunk in chunks:
            one = chunk.continuation
            one.length = chunk.start + chunk.count
            if one.length // self.pool.size > len(one.keys):
                self._publish(one)
            if one.followers and chunk.completes:
                forks += self._fork(one)
        return forks

    def _publish(self, one: Continuation) -> None:
        if not self._share_prefixes:
            return
        done, size = len(one.keys), self.pool.size
        start = one.keys[-1] if one.keys else _start_key(one.request)
        for key in chain(start, one.text(done * size, one.length), size):
            self.pool.publish(one.pages[len(one.keys)], key)
            one.keys.append(key)

    def _fork(self, leader: Continuation) -> list[Fork]:
        forks = []
        for one in leader.followers:
            self._followers -= 1
            whole = leader.length // self.pool.size
            partial = leader.pages[whole : whole + 1] if leader.length % self.pool.size else []
            if partial and not self._has_room(1):
                self._queue(one)
                continue
            self.pool.share(leader.pages[:whole])
            own = self.pool.take(len(partial))
            one.pages, one.length = leader.pages[:whole] + own, leader.length
            one.keys = leader.keys[:whole]
            request = one.request
            request.cached_tokens = max(request.cached_tokens, leader.request.cached_tokens)
            self._batch[one] = None
            forks.append(Fork(leader, one, (partial[0], own[0]) if partial else None))
        leader.followers = []
        return forks

    # -- leaving the batch -------------------------------------------------------------------

    def _leave(self, one: Continuation, *, keep: bool = True) -> None:
        del self._batch[one]
        self.pool.give_back(one.pages, keep=keep)
        one.pages, one.length, one.keys = [], 0, []
        self.departed.append(one)
        self._unfollow(one, list(one.followers), queue=True)

    def _unfollow(
        self, leader: Continuation, leaving: Iterable[Continuation], *, queue: bool = False
    ) -> None:
        for one in leaving:
            leader.followers.remove(one)
            self._followers -= 1
            if queue and one.request.job_id in self._requests:
                self._queue(one)

    def _put_back(self, one: Continuation) -> None:
        self._leave(one)
        self._queue(one)

    def _queue(self, one: Continuation) -> None:
        """Queue a continuation that left the batch, before all other requests of its owner."""
        request = one.request
        request.back.append(one)
        line = self._line(request)
        line[request.job_id] = request
        line.move_to_end(request.job_id, last=False)

    # -- failed steps ------------------------------------------------------------------------

    def empty(self) -> list[Continuation]:
        """Remove all continuations from the batch, after a failed step; return them."""
        tried = [each for one in self._batch for each in (one, *one.followers)]
        for one in self._batch:
            self.pool.give_back(one.pages, keep=False)
            self.departed.append(one)
        for one in tried:
            one.pages, one.length, one.keys, one.followers = [], 0, [], []
        self._batch, self._followers, self._fresh = {}, 0, []
        return tried

    def retry_smaller(self, tried: list[Continuation]) -> None:
        """Queue the continuations of a failed step again; together they may use half as many pages from now on."""
        pages = sum(self.pool.needed(one.text_length + 1) for one in tried)
        self._pages_that_work = min(self._pages_that_work, pages) // 2
        for one in reversed(tried):
            one.rewind()
            self._queue(one)

    def lift_limit(self) -> None:
        self._pages_that_work = inf


def _same_reading(one: Continuation) -> tuple[object, ...]:
    """Equal for continuations that one reading can serve; a prompt with scores is read for its own request."""
    request = one.request
    scored = request.prompt is None and request.scored_from is not None
    return id(request.adapter), one.text().tobytes(), request.job_id if scored else None


def _start_key(request: SamplingRequest) -> bytes:
    """Pages are shared only between requests of one owner: otherwise a cache hit tells what another one has sent."""
    weights = b"" if request.adapter is None else request.adapter.digest
    return weights + b"/" + request.job.owner.encode()


def _by_adapter(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Chunks with the same adapter stand together, so that one product serves them."""
    groups: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(id(chunk.adapter), []).append(chunk)
    return [chunk for group in groups.values() for chunk in group]


def _recorded(keys: Iterable[bytes], into: list[bytes]) -> Iterable[bytes]:
    for key in keys:
        into.append(key)
        yield key
