"""Promises: accepted requests on their way to a result.

A request is in the journal before its promise is given out, so it is answered even if the service dies meanwhile.
Results stay retrievable for a while, as often as a client asks: the newest in memory, the others from the journal.
Whoever waits is woken by the result itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from sys import intern
from types import MappingProxyType
from typing import Any, Final

from tinkex._wire import json_codec, proto_codec
from tinkex._wire.failures import failure_body
from tinkex._wire.operations import Operation, operation
from tinkex.errors import GoneError, InternalServerError, NotFoundError
from tinkex.types import ForwardBackwardOutput, SampleResponse

from .damage import Lost
from .disk import as_client_error
from .journal import Journal, Kind, Place, Record
from .quotas import Limits, Quotas
from .results import encode_result

__all__ = ["Feed", "Promise", "Promises", "Result"]

#: Results that are kept in memory; older ones are read from the journal.
MEMORY_BYTES: Final = 128 << 20
#: What the journal writes beside the bodies of a request and its result.
_HEADS: Final = 512
#: What most promises have as `extra`: one for each would be a sixth of a promise.
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(slots=True)
class Result:
    """The answer to a request, encoded: protobuf where the protocol has it, else JSON.

    `change` counts the requests that changed a model, in the order in which they did.
    """

    failed: bool
    binary: bool
    place: Place
    payload: bytes | None
    at: float
    change: int | None = None


@dataclass(eq=False, slots=True)
class Promise:
    """One accepted request.

    `scope` is the model or sampler it belongs to, `body` the bytes as they came and `extra` what the service
    decided when it accepted it, so that doing it again after a crash does the same.
    """

    request_id: str
    operation: Operation[Any]
    owner: str
    scope: str
    seq_id: int | None
    media: str
    accepted_at: float
    place: Place
    num_samples: int | None
    extra: Mapping[str, Any]
    request: Any = None
    started_at: float | None = None
    result: Result | None = None
    fetched_at: float | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    on_cancel: Callable[[], object] | None = None

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def finished_at(self) -> float:
        assert self.result is not None
        return self.result.at

    def told_before(self, moment: float) -> bool:
        """Whether nobody has asked for the result since, and somebody had before."""
        return self.fetched_at is not None and self.fetched_at <= moment

    @property
    def key(self) -> Hashable | None:
        """What a repeated request has in common with the first."""
        return None if self.seq_id is None else (self.scope, self.seq_id)

    @property
    def sequence_ids(self) -> list[str] | None:
        if self.num_samples is None:
            return None
        return [f"{self.request_id}-{i}" for i in range(self.num_samples)]


@dataclass
class Feed:
    """The finished requests of one sampling client, numbered, for whoever waits for any of them."""

    cursor: int = 0
    finished: deque[tuple[int, Promise]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, promise: Promise) -> None:
        self.cursor += 1
        self.finished.append((self.cursor, promise))
        self.changed.set()

    def after(self, cursor: int) -> list[Promise]:
        if cursor > self.cursor:  # since it was told, the clock that we began with was set back
            untold = [promise for _, promise in self.finished]
            self.cursor = cursor + len(untold)
            self.finished = deque(enumerate(untold, cursor + 1))
        while self.finished and self.finished[0][0] <= cursor:
            self.finished.popleft()
        return [promise for number, promise in self.finished if number > cursor]

    def keep(self, wanted: Callable[[Promise], bool]) -> None:
        self.finished = deque(each for each in self.finished if wanted(each[1]))


_FINISHED: Final = asyncio.Event()
_FINISHED.set()


class Promises:
    """All promises that can still be asked for."""

    def __init__(
        self,
        journal: Journal,
        *,
        memory_bytes: int = MEMORY_BYTES,
        quotas: Quotas | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        journal.on_moved = self.moved
        self._quotas = quotas or Quotas.of(Limits())
        self.clock = clock
        self._memory_bytes = memory_bytes
        self._promises: dict[str, Promise] = {}
        self._by_key: dict[Hashable, Promise] = {}
        self._in_memory: OrderedDict[str, Promise] = OrderedDict()
        self._bytes_in_memory = 0
        self._unwritten: deque[Promise] = deque()
        #: Changes of models, by scope, whose requests the journal has lost while it has their results.
        self.lost: dict[str, int] = {}
        #: Numbers of models, by scope, whose requests were turned away before a restart.
        self.refused: dict[str, list[int]] = {}
        #: Called with every promise that is given, that got its result, and whose result was told.
        self.on_accept: list[Callable[[Promise], None]] = []
        self.on_finish: list[Callable[[Promise], None]] = []
        self.on_told: list[Callable[[Promise], None]] = []
        #: Called with a key and a size when the key has too many results for one more request of that size.
        self.make_room: Callable[[str, int], None] = lambda _, __: None

    def __iter__(self) -> Iterator[Promise]:
        return iter(list(self._promises.values()))

    def __len__(self) -> int:
        return len(self._promises)

    # -- accepting ---------------------------------------------------------------------------

    def accept(
        self,
        row: Operation[Any],
        owner: str,
        scope: str,
        seq_id: int | None,
        request: Any,
        body: bytes,
        media: str,
        extra: dict[str, Any] | None = None,
    ) -> Promise:
        """Write a request down; it is safe once the journal is flushed."""
        self.check_room(owner)
        self._check_kept(owner, row, _HEADS + len(body))
        request_id = uuid.uuid4().hex
        now = self.clock()
        head = {
            "id": request_id,
            "op": row.name,
            "owner": owner,
            "scope": scope,
            # Clients number their samples beyond what JSON readers take for an integer.
            "seq": None if seq_id is None else str(seq_id),
            "media": media,
            "at": now,
            "extra": extra or {},
        }
        place = self._journal.append(Kind.REQUEST, head, body)
        promise = self._add(_promise(head, place, request))
        for tell in self.on_accept:
            tell(promise)
        return promise

    def refuse(self, scope: str, seq_id: int) -> None:
        """Write down that a number was turned away, so that nobody waits for it after a restart either."""
        head = {"id": "", "refused": scope, "scope": scope, "seq": str(seq_id)}
        with suppress(OSError):  # then they wait for a while
            self._journal.append(Kind.RESULT, head, b"")

    def duplicate(self, scope: str, seq_id: int | None) -> Promise | None:
        """The promise that was given for the same number before."""
        return None if seq_id is None else self._by_key.get((scope, seq_id))

    async def flushed(self, promise: Promise | None = None) -> None:
        """Wait until a request is on the disk, or all that were accepted so far."""
        await self._journal.flushed(None if promise is None else promise.place)

    async def settled(self) -> None:
        """Wait until every result so far is on the disk, those too for which there was no room before."""
        self._write_results()
        await self._journal.flushed()

    def check_room(self, owner: str) -> None:
        """Refuse one more request of an owner who has many waiting."""
        self._quotas.pending.check(owner)

    def _check_kept(self, owner: str, row: Operation[Any], size: int) -> None:
        """Refuse a request if the results or the journal records of its owner are at their limit."""
        results, journal = self._quotas.results, self._quotas.journal_bytes
        if results.has_room(owner) and journal.has_room(owner, size):
            return
        self.make_room(owner, size)
        results.check(owner)
        if not row.frees_journal:
            journal.check(owner, size)

    def pending(self, owner: str) -> int:
        """How many requests of an owner have no result yet."""
        return self._quotas.pending.used(owner)

    def request_of(self, promise: Promise) -> Any:
        """The request, read again from the journal when it is not at hand."""
        if promise.request is not None:
            return promise.request
        body = self._journal.read(promise.place)
        if promise.media == "proto":
            return proto_codec.decode_forward_backward_request(body)
        content = json_codec.parse(body)
        if isinstance(content, dict) and isinstance(content.get("seq_id"), float):
            content["seq_id"] = promise.seq_id  # beyond 64 bits the reader only comes close to it
        return json_codec.from_object(content, promise.operation.request)

    def _add(self, promise: Promise) -> Promise:
        self._promises[promise.request_id] = promise
        if promise.key is not None:
            self._by_key[promise.key] = promise
        self._quotas.pending.add(promise.owner)
        self._quotas.results.add(promise.owner)
        self._quotas.journal_bytes.add(promise.owner, _HEADS + promise.place.length)
        return promise

    # -- finishing ---------------------------------------------------------------------------

    def finish(self, promise: Promise, value: Any, change: int | None = None) -> None:
        try:
            payload, binary = _encoded(value)
        except Exception as error:  # it is done all the same, and nobody shall wait for ever
            self.fail(promise, error, change)
        else:
            self._keep(promise, payload, binary=binary, change=change)

    def fail(self, promise: Promise, error: BaseException, change: int | None = None) -> None:
        body = failure_body(as_client_error(error))
        self._keep(promise, json_codec.encode(body), failed=True, change=change)

    def _keep(
        self,
        promise: Promise,
        payload: bytes,
        *,
        binary: bool = False,
        failed: bool = False,
        change: int | None = None,
    ) -> None:
        if promise.done:  # cancelled meanwhile
            return
        nowhere = Place(-1, 0, len(payload))
        self._set(promise, Result(failed, binary, nowhere, payload, self.clock(), change))
        self._unwritten.append(promise)
        with suppress(OSError):  # a full disk: the answer is in memory until there is room
            self._write_results()
        for tell in self.on_finish:
            tell(promise)

    def _write_results(self) -> None:
        """Put results into the journal in the order in which they came, so that what it lacks is the newest."""
        while self._unwritten:
            promise = self._unwritten[0]
            result = promise.result
            assert result is not None
            assert result.payload is not None
            head: dict[str, Any] = {
                "id": promise.request_id,
                "failed": result.failed,
                "binary": result.binary,
                "at": result.at,
                "change": result.change,
                "scope": promise.scope,
            }
            result.place = self._journal.append(Kind.RESULT, head, result.payload)
            self._unwritten.popleft()
            self._in_memory[promise.request_id] = promise
            self._bytes_in_memory += len(result.payload)
        self._evict()

    def _set(self, promise: Promise, result: Result) -> None:
        promise.result = result
        promise.request = None
        promise.on_cancel = None
        promise.finished.set()
        # Those who wait have the other; one for each would be most of a promise.
        promise.finished = _FINISHED
        self._quotas.pending.release(promise.owner)
        self._quotas.journal_bytes.add(promise.owner, result.place.length)

    def _evict(self) -> None:
        while self._bytes_in_memory > self._memory_bytes:
            self._put_away(next(iter(self._in_memory.values())))

    def _put_away(self, promise: Promise) -> None:
        """From now on a result that is written is read from the journal."""
        if self._in_memory.pop(promise.request_id, None) is not None:
            assert promise.result is not None
            assert promise.result.payload is not None
            self._bytes_in_memory -= len(promise.result.payload)
            promise.result.payload = None

    # -- asking ------------------------------------------------------------------------------

    def get(self, request_id: str, owner: str) -> Promise:
        promise = self._promises.get(request_id)
        if promise is not None and promise.owner == owner:
            return promise
        if len(request_id) == 32 and request_id.isalnum():
            # Samples are asked for again when they hear this; a 404 would end them. Another's request is gone
            # too: nobody learns what there is of others.
            raise GoneError(f"The result of request {request_id!r} is no longer kept.")
        raise NotFoundError(f"There is no request {request_id!r:.100}.")

    def payload(self, promise: Promise) -> bytes:
        """The result as it is told to somebody."""
        promise.fetched_at = self.clock()
        assert promise.result is not None
        payload = promise.result.payload
        if payload is None:
            payload = self._journal.read(promise.result.place)
        self._put_away(promise)  # few ask twice
        for tell in self.on_told:
            tell(promise)
        return payload

    # -- restart and retention ---------------------------------------------------------------

    def restore(self, record: Record) -> Promise | None:
        """Take a record of the journal back; the promise it is about, unless that is forgotten."""
        if record.kind is Kind.REQUEST:
            known = self._promises.get(record.head["id"])
            return known or self._add(_promise(record.head, record.place, None))
        promise = self._promises.get(record.head["id"])
        head = record.head
        if "refused" in head:
            self.refused.setdefault(head["refused"], []).append(int(head["seq"]))
        if promise is None and head.get("change") is not None:
            self.lost[head["scope"]] = max(head["change"], self.lost.get(head["scope"], 0))
        if promise is not None:
            self.reopen(promise)  # what was done again has two, and the later counts
            self._set(
                promise,
                Result(
                    head["failed"],
                    head["binary"],
                    record.place,
                    None,
                    head["at"],
                    head.get("change"),
                ),
            )
        return promise

    def fail_lost(self, lost: Lost) -> set[str]:
        """Answer those whose request or result cannot be read; the ids of requests that were never done."""
        for record in lost.results:
            promise = self._promises.get(record.head["id"])
            if promise is not None and not promise.done:
                why = "The request was done; its result is damaged on the disk of the service."
                self.fail(promise, InternalServerError(why), record.head.get("change"))
        undone = set()
        for record in lost.requests:
            promise = self._promises[record.head["id"]]
            if not promise.done:
                undone.add(promise.request_id)
                why = "The request was not done: it is damaged on the disk of the service."
                self.fail(promise, InternalServerError(why))
        return undone

    def reopen(self, promise: Promise) -> None:
        """Take a result of before a restart back: it is worth nothing without another that was lost."""
        if promise.result is not None:
            self._quotas.journal_bytes.release(promise.owner, promise.result.place.length)
            self._quotas.pending.add(promise.owner)
            promise.result = None
            promise.finished = asyncio.Event()

    def moved(self, record: Record) -> None:
        """A record was written anew elsewhere."""
        promise = self._promises.get(record.head["id"])
        if promise is None:
            return
        if record.kind is Kind.REQUEST:
            promise.place = record.place
        elif promise.result is not None:
            promise.result.place = record.place

    def knows(self, request_id: str) -> bool:
        return request_id in self._promises

    def forget(self, promise: Promise) -> None:
        """Let a request and its result go; whoever asks for them hears that they are gone."""
        if promise in self._unwritten:
            return  # the disk has no room for it yet; later
        if self._promises.pop(promise.request_id, None) is None:
            return
        if promise.key is not None and self._by_key.get(promise.key) is promise:
            del self._by_key[promise.key]
        self._put_away(promise)
        length = promise.place.length + (promise.result.place.length if promise.result else 0)
        self._quotas.results.release(promise.owner)
        self._quotas.journal_bytes.release(promise.owner, _HEADS + length)


def _encoded(value: Any) -> tuple[bytes, bool]:
    """A result as bytes, and whether they are protobuf."""
    if isinstance(value, SampleResponse):
        return proto_codec.encode_sample_response(value), True
    if isinstance(value, ForwardBackwardOutput):
        return proto_codec.encode_forward_backward_output(value), True
    return encode_result(value), False


def _promise(head: dict[str, Any], place: Place, request: Any) -> Promise:
    seq = head["seq"]
    extra = dict(head["extra"])
    num_samples = extra.pop("num_samples", None)
    return Promise(
        request_id=head["id"],
        operation=operation(head["op"]),
        owner=intern(head["owner"]),
        scope=intern(head["scope"]),
        seq_id=None if seq is None else int(seq),
        media=intern(head["media"]),
        accepted_at=head["at"],
        place=place,
        request=request,
        num_samples=num_samples,
        extra=extra or _NOTHING,
    )
