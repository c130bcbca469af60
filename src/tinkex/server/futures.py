"""Promises: accepted requests and, once finished, their results.

A request is in the journal before its promise is acknowledged, so it is answered even if the service crashes.
Clients can fetch a result several times until it is evicted: the newest are in memory, the others in the journal.
A waiting poll is woken by the result.
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
from tinkex.errors import GoneError, InternalServerError, InvalidInputError, NotFoundError
from tinkex.types import ForwardBackwardOutput, SampleResponse

from .client_errors import client_error
from .damage import Lost
from .journal import BodyPosition, Journal, Kind, Record
from .quotas import KeyLimits, Quotas
from .results import encode_result

__all__ = ["Client", "Feed", "Promise", "Promises", "Result"]

#: Bytes of results kept in memory; older ones are read from the journal.
MEMORY_BYTES: Final = 128 << 20
#: Estimated bytes of the journal heads of a request and its result.
_HEADS: Final = 512
#: Client number n of a sampler numbers its requests from n times this stride.
CLONE_STRIDE: Final = 1_000_000_000
#: The shared empty `extra` of most promises: a separate dict would take a sixth of a promise's memory.
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


#: One client of a model or a sampler: its scope and its number.
Client = tuple[str, int]


@dataclass(slots=True)
class Result:
    """The encoded result of a request: protobuf where the protocol defines it, otherwise JSON.

    `change` numbers the requests that changed a model, in the order in which they ran.
    """

    failed: bool
    binary: bool
    place: BodyPosition
    payload: bytes | None
    at: float
    change: int | None = None


@dataclass(eq=False, slots=True)
class Promise:
    """One accepted request.

    `scope` is the model or sampler it belongs to, `place` the position of its body in the journal. `extra` holds
    decisions that the service made on acceptance, so that a replay after a crash does the same.
    """

    request_id: str
    operation: Operation[object]
    owner: str
    scope: str
    seq_id: int | None
    media: str
    accepted_at: float
    place: BodyPosition
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

    def fetched_before(self, moment: float) -> bool:
        """Whether a client has fetched the result, the last time at or before `moment`."""
        return self.fetched_at is not None and self.fetched_at <= moment

    @property
    def key(self) -> Hashable | None:
        """Identifies retries of the same request; None for requests without a number."""
        return None if self.seq_id is None else (self.scope, self.seq_id)

    @property
    def client(self) -> Client:
        """The scope, and the number of the client that sent the request; -1 for a request without a number."""
        return self.scope, -1 if self.seq_id is None else self.seq_id // CLONE_STRIDE

    @property
    def sequence_ids(self) -> list[str] | None:
        if self.num_samples is None:
            return None
        return [f"{self.request_id}-{i}" for i in range(self.num_samples)]


@dataclass
class Feed:
    """The numbered finished requests of one sampling client, for polls that wait for any of them."""

    cursor: int = 0
    finished: deque[tuple[int, Promise]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, promise: Promise) -> None:
        self.cursor += 1
        self.finished.append((self.cursor, promise))
        self.changed.set()

    def after(self, cursor: int) -> list[Promise]:
        if (
            cursor > self.cursor
        ):  # cursors start at the wall clock, which was set back after the client got this one
            unsent = [promise for _, promise in self.finished]
            self.cursor = cursor + len(unsent)
            self.finished = deque(enumerate(unsent, cursor + 1))
        while self.finished and self.finished[0][0] <= cursor:
            self.finished.popleft()
        return [promise for number, promise in self.finished if number > cursor]

    def keep(self, wanted: Callable[[Promise], bool]) -> None:
        self.finished = deque(each for each in self.finished if wanted(each[1]))


_FINISHED: Final = asyncio.Event()
_FINISHED.set()


class Promises:
    """All promises that have not been evicted."""

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
        self._quotas = quotas or Quotas.of(KeyLimits())
        self.clock = clock
        self._memory_bytes = memory_bytes
        self._promises: dict[str, Promise] = {}
        self._by_key: dict[Hashable, Promise] = {}
        #: By session, then by client: a question about one of them costs as much as it has promises.
        self._of_session: dict[str, dict[Client, dict[str, Promise]]] = {}
        self._in_memory: OrderedDict[str, Promise] = OrderedDict()
        self._bytes_in_memory = 0
        self._unwritten: deque[Promise] = deque()
        #: By scope: the highest change number whose result is in the journal while its request is lost.
        self.lost: dict[str, int] = {}
        #: By scope: the sequence numbers of requests that were refused before a restart.
        self.refused: dict[str, list[int]] = {}
        #: Called with a promise when its request is accepted, when it finishes, and when its result is fetched.
        self.on_accept: list[Callable[[Promise], None]] = []
        self.on_finish: list[Callable[[Promise], None]] = []
        self.on_fetched: list[Callable[[Promise], None]] = []
        #: Called with a promise and its result when it succeeds, while the promise still has its request.
        self.on_value: list[Callable[[Promise, object], None]] = []
        #: Called with an owner and a size when the owner's kept results leave no room for a request of that size.
        self.make_room: Callable[[str, int], None] = lambda _, __: None

    def __iter__(self) -> Iterator[Promise]:
        return iter(list(self._promises.values()))

    def __len__(self) -> int:
        return len(self._promises)

    def of_client(self, client: Client) -> list[Promise]:
        """The promises of one client of a model or a sampler, in the order of their acceptance."""
        clients = self._of_session.get(_session_of(client), {})
        return list(clients.get(client, {}).values())

    def of_session(self, session_id: str) -> list[Promise]:
        clients = self._of_session.get(session_id, {})
        return [promise for mine in clients.values() for promise in mine.values()]

    # -- accepting ---------------------------------------------------------------------------

    def accept(
        self,
        row: Operation[object],
        owner: str,
        scope: str,
        seq_id: int | None,
        request: object,
        body: bytes,
        media: str,
        extra: Mapping[str, object] | None = None,
    ) -> Promise:
        """Append a request to the journal; it is durable once the journal is flushed."""
        self.check_room(owner)
        self._check_kept(owner, row, _HEADS + len(body))
        request_id = uuid.uuid4().hex
        now = self.clock()
        head = {
            "id": request_id,
            "op": row.name,
            "owner": owner,
            "scope": scope,
            # A string: sample numbers exceed the integers that JSON readers support.
            "seq": None if seq_id is None else str(seq_id),
            "media": media,
            "at": now,
            "extra": extra or {},
        }
        place = self._journal.append(Kind.REQUEST, head, body)
        promise = self._add(_promise(head, place, request))
        for notify in self.on_accept:
            notify(promise)
        return promise

    def refuse(self, scope: str, seq_id: int) -> None:
        """Record a refused number in the journal, so that later requests do not wait for it after a restart."""
        head = {"id": "", "refused": scope, "scope": scope, "seq": str(seq_id)}
        with suppress(OSError):  # then they wait until a timeout
            self._journal.append(Kind.RESULT, head, b"")

    def duplicate(self, scope: str, seq_id: int | None) -> Promise | None:
        """The promise of an earlier request with the same number."""
        return None if seq_id is None else self._by_key.get((scope, seq_id))

    async def flushed(self, promise: Promise | None = None) -> None:
        """Wait until this request is on disk, or all requests accepted so far."""
        await self._journal.flushed(None if promise is None else promise.place)

    async def settled(self) -> None:
        """Wait until every result so far is on disk, including those that a full disk could not take before."""
        self._write_results()
        await self._journal.flushed()

    def check_room(self, owner: str, count: int = 1) -> None:
        """Refuse requests as a whole if their owner has too many without a result."""
        pending = self._quotas.pending
        if count > 1 and count > pending.limit:  # waiting does not help
            raise InvalidInputError(
                f"asks for {count:,} answers at once; this key may have {pending.limit:,} requests without a result. "
                "Send several requests with fewer prompts, or let the operator raise the limit with "
                "`tinkex serve --limit pending=...`",
                field="prompt",
            )
        pending.check(owner, count)

    def take_room(self, owner: str, count: int) -> None:
        """Count requests that get their results without a promise; each calls `give_room_back` when it is done."""
        self.check_room(owner, count)
        self._quotas.pending.add(owner, count)

    def give_room_back(self, owner: str) -> None:
        self._quotas.pending.release(owner)

    def _check_kept(self, owner: str, row: Operation[object], size: int) -> None:
        """Refuse a request if the results or the journal records of its owner are at their limit."""
        results, journal = self._quotas.results, self._quotas.journal_bytes
        if results.has_room(owner) and journal.has_room(owner, size):
            return
        self.make_room(owner, size)
        results.check(owner)
        if not row.frees_journal:
            journal.check(owner, size)

    def pending(self, owner: str) -> int:
        """The number of an owner's requests without a result."""
        return self._quotas.pending.used(owner)

    def request_of(self, promise: Promise) -> Any:
        """The request, read from the journal if it is not in memory."""
        if promise.request is not None:
            return promise.request
        body = self._journal.read(promise.place)
        if promise.media == "proto":
            return proto_codec.decode_forward_backward_request(body)
        content = json_codec.parse(body)
        if isinstance(content, dict) and isinstance(content.get("seq_id"), float):
            content["seq_id"] = promise.seq_id  # the JSON reader rounds integers over 64 bits
        return json_codec.from_object(content, promise.operation.request)

    def _add(self, promise: Promise) -> Promise:
        self._promises[promise.request_id] = promise
        if promise.key is not None:
            self._by_key[promise.key] = promise
        clients = self._of_session.setdefault(_session_of(promise.client), {})
        clients.setdefault(promise.client, {})[promise.request_id] = promise
        self._quotas.pending.add(promise.owner)
        self._quotas.results.add(promise.owner)
        self._quotas.journal_bytes.add(promise.owner, _HEADS + promise.place.length)
        return promise

    # -- finishing ---------------------------------------------------------------------------

    def finish(self, promise: Promise, value: object, change: int | None = None) -> None:
        try:
            payload, binary = _encoded(value)
        except Exception as error:  # the request did finish: no client may wait for ever
            self.fail(promise, error, change)
        else:
            if not promise.done:
                for notify in self.on_value:
                    notify(promise, value)
            self._keep(promise, payload, binary=binary, change=change)

    def fail(self, promise: Promise, error: BaseException, change: int | None = None) -> None:
        told = client_error(error, promise.operation.name, promise.request_id)
        body = failure_body(told)
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
        if promise.done:  # it was cancelled meanwhile
            return
        nowhere = BodyPosition(-1, 0, len(payload))
        self._set(promise, Result(failed, binary, nowhere, payload, self.clock(), change))
        self._unwritten.append(promise)
        with suppress(OSError):  # disk full: the result stays in memory until there is space
            self._write_results()
        for notify in self.on_finish:
            notify(promise)

    def _write_results(self) -> None:
        """Append results to the journal in the order they finished, so that only the newest can be missing."""
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
        # Waiting polls hold the old event. A separate one per promise would be most of its memory.
        promise.finished = _FINISHED
        self._quotas.pending.release(promise.owner)
        self._quotas.journal_bytes.add(promise.owner, result.place.length)

    def _evict(self) -> None:
        while self._bytes_in_memory > self._memory_bytes:
            self._put_away(next(iter(self._in_memory.values())))

    def _put_away(self, promise: Promise) -> None:
        """Drop a result from memory; it is read from the journal from now on."""
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
            # Clients retry a sample after 410, but not after 404. The requests of other owners are answered
            # the same way, so that a client cannot find out which exist.
            raise GoneError(f"The result of request {request_id!r} is no longer kept.")
        raise NotFoundError(f"There is no request {request_id!r:.100}.")

    def payload(self, promise: Promise) -> bytes:
        """The encoded result for a client; counts as fetched."""
        promise.fetched_at = self.clock()
        assert promise.result is not None
        payload = promise.result.payload
        if payload is None:
            payload = self._journal.read(promise.result.place)
        self._put_away(promise)  # few clients fetch a result twice
        for notify in self.on_fetched:
            notify(promise)
        return payload

    # -- restart and retention ---------------------------------------------------------------

    def restore(self, record: Record) -> Promise | None:
        """Restore a record of the journal; return its promise, or None if that was evicted."""
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
            self.reopen(promise)  # a request that ran twice has two results: the later one counts
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
        """Fail promises whose request or result is unreadable; return the ids of requests that never ran."""
        for record in lost.results:
            promise = self._promises.get(record.head["id"])
            if promise is not None and not promise.done:
                why = "The request was run, but its result is damaged on the service's disk."
                self.fail(promise, InternalServerError(why), record.head.get("change"))
        undone = set()
        for record in lost.requests:
            promise = self._promises[record.head["id"]]
            if not promise.done:
                undone.add(promise.request_id)
                why = "The request was not run: it is damaged on the service's disk."
                self.fail(promise, InternalServerError(why))
        return undone

    def reopen(self, promise: Promise) -> None:
        """Discard a result from before a restart, because an earlier one that it depends on is lost."""
        if promise.result is not None:
            self._quotas.journal_bytes.release(promise.owner, promise.result.place.length)
            self._quotas.pending.add(promise.owner)
            promise.result = None
            promise.finished = asyncio.Event()

    def moved(self, record: Record) -> None:
        """Note the new place of a record that the journal has rewritten."""
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
        """Evict a request and its result; clients that ask for it receive 410."""
        if promise in self._unwritten:
            return  # not in the journal yet because the disk is full
        if self._promises.pop(promise.request_id, None) is None:
            return
        if promise.key is not None and self._by_key.get(promise.key) is promise:
            del self._by_key[promise.key]
        self._remove_from_index(promise)
        self._put_away(promise)
        length = promise.place.length + (promise.result.place.length if promise.result else 0)
        self._quotas.results.release(promise.owner)
        self._quotas.journal_bytes.release(promise.owner, _HEADS + length)

    def _remove_from_index(self, promise: Promise) -> None:
        client = promise.client
        session_id = _session_of(client)
        clients = self._of_session[session_id]
        del clients[client][promise.request_id]
        if not clients[client]:
            del clients[client]
        if not clients:
            del self._of_session[session_id]


def _session_of(client: Client) -> str:
    """The session of a scope, which begins with its id."""
    return client[0].partition(":")[0]


def _encoded(value: object) -> tuple[bytes, bool]:
    """A result as bytes, and whether they are protobuf."""
    if isinstance(value, SampleResponse):
        return proto_codec.encode_sample_response(value), True
    if isinstance(value, ForwardBackwardOutput):
        return proto_codec.encode_forward_backward_output(value), True
    return encode_result(value), False


def _promise(head: dict[str, Any], place: BodyPosition, request: object) -> Promise:
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
