"""Decides how a model comes back after a crash: what is restored, what runs again, what is given up; pure.

A model is what its requests made of it. A request that changed the model has a change number, which is written with
its result. Three sources say what a lost model was: its snapshot (the model after a number of changes), the journal
(requests, and the results of those that ran) and the database (whether run and session exist). The snapshot is loaded,
and the requests that changed the model since then run again in the same order. A pass depends only on its request, so
the model is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from tinkex._wire.pass_parts import PassPart
from tinkex.types import ForwardRequest

from .damage import Lost
from .futures import Promise
from .snapshots import Snapshot

__all__ = [
    "DAMAGED_BEFORE",
    "GONE",
    "NO_CREATION",
    "Past",
    "Plan",
    "Sources",
    "Verdict",
    "change_of",
    "changes_model",
    "creation_of",
    "forward_mark",
    "judge",
    "plan",
]

#: Without an optimizer step, a snapshot is written after this many times the usual interval, with the gradients.
ACCUMULATION_FACTOR: Final = 2
NO_CREATION: Final = "the request that made it cannot be read in the journal"
DAMAGED_BEFORE: Final = "it was found damaged before"

#: Key of the journal on requests that compute a loss without gradients. As protobuf they have the same message and
#: path as those with gradients, so the operation alone does not tell.
_FORWARD: Final = "forward"


# -- one request -----------------------------------------------------------------------------------


def change_of(promise: Promise) -> int:
    """The change number of a request that ran; 0 if it changed nothing."""
    assert promise.result is not None
    return promise.result.change or 0


def changes_model(promise: Promise) -> bool:
    return promise.operation.changes_model and not promise.extra.get(_FORWARD)


def forward_mark(request: object) -> dict[str, object]:
    """What the journal notes of a request so that `changes_model` need not decode it."""
    return {_FORWARD: True} if isinstance(request, ForwardRequest) else {}


def _completes_pass(promise: Promise) -> bool:
    """Whether no part of a pass is missing after this request; a snapshot does not contain an incomplete pass."""
    part = promise.extra.get("part")
    return part is None or PassPart.parse(part).is_last


def creation_of(requests: Sequence[Promise]) -> Promise | None:
    """The request that made the model, or will make it when it runs."""
    for promise in requests:
        failed = promise.result is not None and promise.result.change is None
        if promise.operation.makes_model and not failed:
            return promise
    return None


def _unloaded(promise: Promise) -> bool:
    done = promise.result is not None and not promise.result.failed
    return promise.operation.ends_model and done


def _number(promise: Promise) -> float:
    """The place of a request in its model's queue; one without a number is behind all that have one."""
    return float("inf") if promise.seq_id is None else promise.seq_id


# -- a model in use --------------------------------------------------------------------------------


@dataclass
class Past:
    """All that is needed to restore a model: its snapshot and the requests that changed it since, in order."""

    snapshot: Snapshot | None = None
    history: list[Promise] = field(default_factory=list)
    changes: int = 0
    unsaved_seconds: float = 0.0  # of work that a crash would cost
    saving: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing has made the model yet."""
        return self.snapshot is None and not self.history

    @property
    def missing(self) -> int | None:
        """The first change that neither snapshot nor history contains; the model cannot be restored without it."""
        saved = 0 if self.snapshot is None else self.snapshot.changes
        lost = set(range(saved + 1, self.changes + 1)).difference(map(change_of, self.history))
        return min(lost, default=None)

    def needs(self, promise: Promise) -> bool:
        """Whether a restore runs this request again."""
        if promise.result is None or promise.result.change is None:
            return False
        return self.snapshot is None or promise.result.change > self.snapshot.changes

    def add(self, promise: Promise, seconds: float) -> None:
        """Add a request that has changed the model and has its result."""
        self.history.append(promise)
        self.unsaved_seconds += seconds

    def wants_snapshot(self, done: Promise, every: float) -> bool:
        """Whether to write a snapshot after this request has changed the model.

        The best moment is after an optimizer step, when there are no gradients to write. A client that accumulates
        gradients for long gets one in between, because the journal grows until the next snapshot.
        """
        if self.saving:
            return False
        stepped = done.operation.uses_gradients
        due = every * (1 if stepped else ACCUMULATION_FACTOR)
        return self.unsaved_seconds >= due and (stepped or _completes_pass(done))

    def replace_snapshot(self, snapshot: Snapshot) -> list[Promise]:
        """Use a new snapshot from now on; return the requests that are not needed any more."""
        covered = [each for each in self.history if change_of(each) <= snapshot.changes]
        self.snapshot = snapshot
        self.history = [each for each in self.history if change_of(each) > snapshot.changes]
        return covered


# -- after a restart -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """What is known of a model when the service starts."""

    #: From the journal, in the order of acceptance.
    requests: Sequence[Promise] = ()
    #: The snapshot, or why it cannot be read.
    snapshot: Snapshot | str | None = None
    has_run: bool = False  # the database has the run …
    marked_corrupted: bool = False  # … and says that it is corrupted
    session_active: bool = False
    #: Whether a record that the journal has lost may belong to this model.
    lost_a_record: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether a model comes back, from which snapshot, and why it is corrupted if it is."""

    lives: bool
    snapshot: Snapshot | None = None
    corrupted: str | None = None


GONE: Final = Verdict(lives=False)


def judge(sources: Sources) -> Verdict:
    """Whether a model comes back. One that cannot be restored comes back as corrupted, so that clients get the error."""
    if not sources.session_active or any(map(_unloaded, sources.requests)):
        return GONE
    known = DAMAGED_BEFORE if sources.marked_corrupted else None
    snapshot = sources.snapshot if sources.has_run else None
    if isinstance(snapshot, str):
        return Verdict(lives=True, corrupted=snapshot)
    if snapshot is not None:
        return Verdict(True, snapshot, known)
    if creation_of(sources.requests) is not None:
        return Verdict(lives=True, corrupted=known)
    if sources.has_run and (sources.marked_corrupted or sources.lost_a_record):
        return Verdict(lives=True, corrupted=NO_CREATION)
    return GONE


@dataclass(frozen=True)
class Plan:
    """How a model continues after a restart."""

    past: Past
    next_seq: int
    #: Requests that did not run: they wait for their turn.
    waiting: list[Promise]
    #: Requests that ran, but whose effect cannot be restored: they run again, before all others, in this order.
    again: list[Promise]
    #: Requests that ran and whose result is lost; running them again would apply them twice.
    over: list[Promise]
    corrupted: str | None = None


def plan(
    model_id: str,
    snapshot: Snapshot | None,
    requests: Sequence[Promise],
    *,
    forgotten: int = 0,
    lost: Lost | None = None,
    undone: Container[str] = (),
) -> Plan:
    """What happens to the requests of a model, which are in the order of their acceptance.

    `forgotten` is the highest change number whose request is lost. `undone` are the ids of lost requests that were
    accepted and did not run. A model that needs a lost request is corrupted: it is never restored without it.
    """
    past = Past(snapshot, changes=0 if snapshot is None else snapshot.changes)
    numbers = [each.seq_id + 1 for each in requests if each.done and each.seq_id is not None]
    next_seq = max([0 if snapshot is None else snapshot.next_seq, *numbers])
    past.history = sorted(filter(past.needs, requests), key=change_of)
    unfinished = [each for each in requests if not each.done]
    late = sorted((each for each in unfinished if _number(each) < next_seq), key=_number)
    again, over = _go_back(past, late)
    past.changes = max([past.changes, forgotten, *map(change_of, past.history)])
    waiting = [each for each in unfinished if _number(each) >= next_seq]
    needed = {each.request_id for each in past.history}
    why = (lost or Lost()).reason(model_id, lambda name: name in needed or name in undone)
    return Plan(past, next_seq, waiting, again, over, why)


def _go_back(past: Past, late: Sequence[Promise]) -> tuple[list[Promise], list[Promise]]:
    """Take a model back to before the first change whose result is lost; return what runs again and what does not.

    `late` are requests without a result though later ones have theirs. Results are sent before they are on the disk,
    so a machine crash can lose one and keep later ones. All changes from there on run again: in the same order, to the
    same bits.
    """
    since = 0 if past.snapshot is None else past.snapshot.next_seq
    changing = [each for each in late if changes_model(each) and _number(each) >= since]
    known = set(map(change_of, past.history))
    missing = set(range(past.changes + 1, max(known, default=0) + 1)) - known
    if not changing or len(missing) > len(changing):  # more than these are lost
        return [], list(late)
    first = _number(changing[0])
    undo = [each for each in past.history if _number(each) > first]
    if any(each.seq_id is None for each in undo):  # the order in which they ran is not known
        return [], list(late)
    past.history = [each for each in past.history if _number(each) < first]
    again = sorted([*(each for each in late if _number(each) >= first), *undo], key=_number)
    return again, [each for each in late if _number(each) < first]
