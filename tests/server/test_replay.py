"""Restoring models: every combination of snapshot, journal and database, and every lost result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tinkex._wire.operations import operation
from tinkex.server.damage import Lost
from tinkex.server.futures import Promise, Result
from tinkex.server.journal import BodyPosition
from tinkex.server.replay import (
    DAMAGED_BEFORE,
    GONE,
    NO_CREATION,
    Past,
    Plan,
    Sources,
    Verdict,
    change_of,
    judge,
    plan,
)
from tinkex.server.segments import Damage, Kind, Record
from tinkex.server.snapshots import Snapshot

MODEL = "s:train:0"
NOWHERE = BodyPosition(0, 0, 0)


def request(
    name: str,
    seq_id: int | None,
    *,
    change: int | None = None,
    done: bool | None = None,
    failed: bool = False,
    **extra: Any,
) -> Promise:
    """A request of the journal; `change` is the number in its result."""
    done = change is not None or failed if done is None else done
    result = Result(failed, binary=False, place=NOWHERE, payload=None, at=0.0, change=change)
    return Promise(
        request_id=f"{name} {seq_id}",
        operation=operation(name),
        owner="ann",
        scope=MODEL,
        seq_id=seq_id,
        media="json",
        accepted_at=0.0,
        place=NOWHERE,
        num_samples=None,
        extra=extra,
        result=result if done else None,
    )


def snapshot(changes: int, next_seq: int) -> Snapshot:
    return Snapshot(Path("snapshots") / str(changes), changes, next_seq)


# -- whether a model comes back ------------------------------------------------------------------

SAVED = snapshot(4, 5)
TORN = "the snapshot is damaged"

#: By kind: the request of the journal that creates the model.
CREATION = {
    "none": [],
    "failed": [request("create_model", 0, failed=True)],
    "ran": [request("create_model", 0, change=1)],
    "waits": [request("create_model", 0)],
}
UNLOADED = [request("unload_model", 9, done=True)]

#: The rules in order: which sources a rule applies to, and the verdict. The first that applies decides.
RULES: list[tuple[dict[str, Any], Verdict]] = [
    ({"active": False}, GONE),
    ({"unloaded": True}, GONE),
    ({"run": "whole", "saved": SAVED}, Verdict(lives=True, snapshot=SAVED)),
    ({"run": "whole", "saved": TORN}, Verdict(lives=True, corrupted=TORN)),
    (
        {"run": "corrupted", "saved": SAVED},
        Verdict(lives=True, snapshot=SAVED, corrupted=DAMAGED_BEFORE),
    ),
    ({"run": "corrupted", "saved": TORN}, Verdict(lives=True, corrupted=TORN)),
    # From here on there is no snapshot that can be used: a snapshot without a run in the database is not.
    ({"run": "none", "creation": "ran"}, Verdict(lives=True)),
    ({"run": "none", "creation": "waits"}, Verdict(lives=True)),
    ({"run": "none"}, GONE),
    ({"run": "whole", "creation": "ran"}, Verdict(lives=True)),
    ({"run": "whole", "creation": "waits"}, Verdict(lives=True)),
    ({"run": "whole", "lost": True}, Verdict(lives=True, corrupted=NO_CREATION)),
    ({"run": "whole", "lost": False}, GONE),
    ({"run": "corrupted", "creation": "ran"}, Verdict(lives=True, corrupted=DAMAGED_BEFORE)),
    ({"run": "corrupted", "creation": "waits"}, Verdict(lives=True, corrupted=DAMAGED_BEFORE)),
    ({"run": "corrupted"}, Verdict(lives=True, corrupted=NO_CREATION)),
]
CASES: list[dict[str, Any]] = [
    dict(zip(("active", "unloaded", "run", "saved", "creation", "lost"), values, strict=True))
    for values in product(
        (True, False),
        (True, False),
        ("none", "whole", "corrupted"),
        (None, SAVED, TORN),
        CREATION,
        (True, False),
    )
]


def expected(case: dict[str, Any]) -> tuple[int, Verdict]:
    for number, (applies_to, verdict) in enumerate(RULES):
        if all(case[name] == value for name, value in applies_to.items()):
            return number, verdict
    raise AssertionError(f"no rule for {case}")


def test_every_combination_of_sources_has_its_verdict():
    used = set()
    for case in CASES:
        rule, verdict = expected(case)
        used.add(rule)
        sources = Sources(
            [*CREATION[case["creation"]], *(UNLOADED if case["unloaded"] else [])],
            case["saved"],
            has_run=case["run"] != "none",
            marked_corrupted=case["run"] == "corrupted",
            session_active=case["active"],
            lost_a_record=case["lost"],
        )
        assert judge(sources) == verdict, case
    assert len(CASES) == 288
    assert used == set(range(len(RULES)))


def test_a_failed_unload_leaves_the_model_loaded():
    created, refused = CREATION["ran"][0], request("unload_model", 3, failed=True)
    assert judge(Sources([created, refused], session_active=True)).lives


# -- what runs again -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What a model did before a crash: for each number, what the request was and what is left of it."""

    kinds: tuple[str, ...]  # by number: "change", "read", or "fails"
    ran: int  # the numbers below it had run
    kept: tuple[bool, ...]  # by number: whether the result is on the disk
    saved: int | None  # the number of requests before the snapshot; None if there is none

    def requests(self) -> list[Promise]:
        promises, change = [], 0
        for seq_id, kind in enumerate(self.kinds):
            has_result = seq_id < self.ran and self.kept[seq_id]
            ran_change = kind == "change" and seq_id < self.ran
            change += ran_change
            promises.append(
                request(
                    ("create_model" if not seq_id else "optim_step")
                    if kind != "read"
                    else "save_weights",
                    seq_id,
                    change=change if has_result and kind == "change" else None,
                    done=has_result,
                    failed=has_result and kind == "fails",
                )
            )
        return promises

    def snapshot(self) -> Snapshot | None:
        if self.saved is None:
            return None
        return snapshot(self.kinds[: self.saved].count("change"), self.saved)


def lives() -> Iterator[Life]:
    """All short lives. A snapshot exists only if all results before it are on the disk."""
    for rest in product(("change", "read", "fails"), repeat=4):
        kinds = ("change", *rest)
        for ran in range(len(kinds) + 1):
            for lost in product((True, False), repeat=ran):
                for saved in (None, *range(1, ran + 1)):
                    if saved is None or (kinds[saved - 1] == "change" and all(lost[:saved])):
                        yield Life(kinds, ran, lost, saved)


def check_nothing_is_lost_or_done_twice(life: Life, decided: Plan) -> None:
    """Replay a plan as the service does, and compare the changes with those of an undisturbed model."""
    saved = life.snapshot()
    run = [
        each.seq_id
        for each in (*decided.past.history, *decided.again, *decided.waiting)
        if each.seq_id is not None
    ]
    assert run == sorted(set(run)), "requests run in the order of their numbers, once"
    changing = [
        seq_id
        for seq_id, kind in enumerate(life.kinds)
        if kind == "change" and seq_id >= (0 if saved is None else saved.next_seq)
    ]
    repeated = [seq_id for seq_id in run if seq_id in changing]
    assert not {each.seq_id for each in decided.over} & set(repeated)
    # Only results are lost, so the model can always be restored, and what is given up changed nothing.
    assert decided.past.missing is None
    assert repeated == changing


def test_no_change_is_lost_or_applied_twice_whatever_results_a_crash_takes():
    count = 0
    for life in lives():
        requests = life.requests()
        decided = plan(MODEL, life.snapshot(), requests)
        assert [change_of(each) for each in decided.past.history] == sorted(
            change_of(each) for each in decided.past.history
        )
        check_nothing_is_lost_or_done_twice(life, decided)
        covered = [*decided.past.history, *decided.again, *decided.waiting, *decided.over]
        left = [each for each in requests if each not in covered]
        assert all(each.done for each in left)
        count += 1
    assert count == 8316


@pytest.mark.parametrize(
    ("kept", "saved", "history", "again", "waiting"),
    [
        pytest.param("yyyy", None, [0, 1, 2, 3], [], [4], id="all results kept"),
        pytest.param("yyyn", None, [0, 1, 2], [], [3, 4], id="the last result lost"),
        pytest.param("yyny", None, [0, 1], [2, 3], [4], id="a result in the middle lost"),
        pytest.param("ynny", None, [0], [1, 2, 3], [4], id="two results lost"),
        pytest.param("nnnn", None, [], [], [0, 1, 2, 3, 4], id="all results lost"),
        pytest.param("yyyy", 2, [2, 3], [], [4], id="the snapshot covers two"),
        pytest.param("yyny", 2, [], [2, 3], [4], id="the first result after the snapshot lost"),
        pytest.param("yyyy", 4, [], [], [4], id="the snapshot covers all"),
    ],
)
def test_plan_of_a_model_with_five_changes_of_which_four_ran(kept, saved, history, again, waiting):
    life = Life(("change",) * 5, 4, tuple(result == "y" for result in kept), saved)
    decided = plan(MODEL, life.snapshot(), life.requests())
    assert [each.seq_id for each in decided.past.history] == history
    assert [each.seq_id for each in decided.again] == again
    assert [each.seq_id for each in decided.waiting] == waiting
    assert decided.over == []
    assert decided.next_seq == (0 if kept == "nnnn" else 3 if kept == "yyyn" else 4)
    assert decided.past.missing is None


def test_a_request_that_changes_nothing_and_whose_result_is_lost_does_not_run_again():
    life = Life(("change", "read", "change"), 3, (True, False, True), None)
    decided = plan(MODEL, None, life.requests())
    assert [each.seq_id for each in decided.over] == [1]
    assert [each.seq_id for each in decided.past.history] == [0, 2]
    assert (decided.again, decided.waiting) == ([], [])


def test_a_model_does_not_go_back_if_the_order_of_its_requests_is_unknown():
    requests = [
        request("create_model", 0, change=1),
        request("optim_step", 1),
        request("optim_step", None, change=3),
        request("optim_step", 2, change=4),
    ]
    decided = plan(MODEL, None, requests)
    assert decided.again == []
    assert decided.over == [requests[1]]
    assert decided.past.missing == 2


def test_a_change_without_its_request_cannot_be_restored():
    created = request("create_model", 0, change=1)
    decided = plan(MODEL, None, [created], forgotten=2)
    assert decided.past.missing == 2
    assert decided.corrupted is None  # detected when the model is restored


def lost_request(name: str, scope: str = MODEL) -> Lost:
    record = Record(1, Kind.REQUEST, {"id": name, "scope": scope}, NOWHERE)
    return Lost([Damage(0, 0, record, Kind.REQUEST)])


def test_a_model_that_needs_a_lost_request_is_corrupted():
    created, step = request("create_model", 0, change=1), request("optim_step", 1, change=2)
    needed = lost_request(step.request_id)
    assert plan(MODEL, None, [created, step], lost=needed).corrupted is not None
    assert plan(MODEL, snapshot(2, 2), [created, step], lost=needed).corrupted is None
    never_ran = plan(MODEL, snapshot(2, 2), [], lost=lost_request("x"), undone={"x"})
    assert never_ran.corrupted is not None
    other = lost_request(step.request_id, "s:train:1")
    assert plan(MODEL, None, [created, step], lost=other).corrupted is None


# -- snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extra", "seconds", "saving", "wanted"),
    [
        ("optim_step", {}, 29.0, False, False),
        ("optim_step", {}, 30.0, False, True),
        ("optim_step", {}, 30.0, True, False),
        ("forward_backward", {}, 59.0, False, False),
        ("forward_backward", {}, 60.0, False, True),
        ("forward_backward", {"part": "a 1/2"}, 60.0, False, False),
        ("forward_backward", {"part": "a 2/2"}, 60.0, False, True),
    ],
)
def test_when_a_snapshot_is_written(name, extra, seconds, saving, wanted):
    past = Past(saving=saving)
    done = request(name, 1, change=1, **extra)
    past.add(done, seconds)
    assert past.wants_snapshot(done, every=30.0) is wanted


def test_a_snapshot_replaces_the_requests_that_it_covers():
    past = Past(changes=4)
    for number in range(1, 5):
        past.add(request("optim_step", number, change=number), 1.0)
    covered = past.replace_snapshot(snapshot(3, 4))
    assert [each.seq_id for each in covered] == [1, 2, 3]
    assert [each.seq_id for each in past.history] == [4]
    assert past.missing is None
    assert [past.needs(each) for each in (*covered, *past.history)] == [False] * 3 + [True]
    assert not past.needs(request("save_weights", 9, done=True))
    assert not past.needs(request("optim_step", 9))
