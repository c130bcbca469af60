"""Order within a model, and fairness between keys."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.interface import Spot
from tinkex.server.scheduling import (
    GAP_LIMIT,
    SETTLED_GAP_LIMIT,
    Candidate,
    Sequencer,
    Shares,
)


def drain(sequencer, now=0.0):
    taken = []
    while (request := sequencer.take(now)) is not None:
        taken.append(request)
    return taken


@given(st.permutations(range(1, 12)))
def test_requests_run_by_number_in_any_arrival_order(order):
    sequencer: Sequencer[int] = Sequencer()
    run = []
    for number in order:
        sequencer.offer(number, number)
        run += drain(sequencer)
    assert run == list(range(1, 12))
    assert len(sequencer) == 0


def test_the_first_chunk_may_arrive_last():
    sequencer: Sequencer[str] = Sequencer()
    for number in (2, 3, 4):
        sequencer.offer(number, f"chunk {number}")
    assert drain(sequencer) == []
    sequencer.offer(1, "chunk 1")
    sequencer.offer(5, "optim_step")
    assert drain(sequencer) == ["chunk 1", "chunk 2", "chunk 3", "chunk 4", "optim_step"]


def test_a_repeated_number_returns_the_first_request():
    sequencer: Sequencer[str] = Sequencer()
    assert sequencer.offer(1, "original") == "original"
    assert sequencer.offer(1, "retry") == "original"
    assert drain(sequencer) == ["original"]
    assert sequencer.knows(1)
    assert not sequencer.knows(2)


def test_replayed_requests_run_before_all_others():
    sequencer: Sequencer[int] = Sequencer(next_seq=4)
    sequencer.run_again([2, 3])
    assert sequencer.ready(0.0)
    assert sequencer.goes_back
    sequencer.offer(4, 4)
    sequencer.offer(None, 9)
    assert len(sequencer) == 4
    assert drain(sequencer) == [2, 3, 4, 9]
    assert not sequencer.goes_back
    sequencer.run_again([2])
    assert sequencer.drain() == [2]
    assert len(sequencer) == 0


def test_a_refused_number_is_not_waited_for():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.offer(3, "third")
    sequencer.refuse(2)
    sequencer.offer(1, "first")
    assert drain(sequencer) == ["first", "third"]
    sequencer.refuse(4)
    sequencer.offer(5, "fifth")
    assert drain(sequencer) == ["fifth"]


def test_a_missing_number_is_skipped_after_the_gap_limit():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.offer(2, "second")
    assert sequencer.take(100.0) is None
    assert sequencer.wakes_at(100.0) == 100.0 + GAP_LIMIT
    assert not sequencer.ready(99.9 + GAP_LIMIT)
    assert sequencer.ready(100.0 + GAP_LIMIT)
    assert sequencer.take(100.0 + GAP_LIMIT) == "second"
    assert sequencer.wakes_at(200.0) is None


def test_a_gap_before_a_settling_request_has_the_short_limit():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.offer(2, "pass")
    sequencer.offer(3, "step", settles=True)
    assert sequencer.take(0.0) is None
    assert sequencer.wakes_at(0.0) == SETTLED_GAP_LIMIT
    sequencer.offer(1, "late")
    assert drain(sequencer) == ["late", "pass", "step"]
    sequencer.offer(5, "another")  # 4 may still arrive
    assert sequencer.wakes_at(100.0) == 100.0 + GAP_LIMIT


def test_a_number_skipped_by_the_gap_limit_counts_as_known():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.offer(3, "third")
    sequencer.take(0.0)
    assert sequencer.take(GAP_LIMIT) == "third"
    assert sequencer.knows(1)


def test_a_request_without_a_number_runs_after_those_already_queued():
    sequencer: Sequencer[str] = Sequencer()
    sequencer.offer(1, "first")
    sequencer.offer(2, "second")
    sequencer.offer(None, "info")
    sequencer.offer(3, "third")
    assert drain(sequencer) == ["first", "second", "info", "third"]


def order_of(shares: Shares, waiting: list[Candidate]) -> list[str]:
    """The keys in the order served, one unit each, until no key waits."""
    order = []
    while (chosen := shares.choose(waiting)) is not None:
        waiting.remove(chosen)
        shares.begin(chosen.key, 1.0)
        shares.end(chosen.key, 1.0, 1.0)
        order.append(chosen.model_id)
    return order


def candidates(key: str, count: int) -> list[Candidate]:
    return [Candidate(f"{key}{number:02}", key, number) for number in range(count)]


def test_keys_share_equally_however_many_requests_one_has():
    waiting = [*candidates("greedy", 50), Candidate("modest", "modest", 49.5)]
    order = order_of(Shares(), waiting)
    assert order.index("modest") <= 1
    assert [name for name in order if name != "modest"] == [
        candidate.model_id for candidate in candidates("greedy", 50)
    ]
    assert Shares().choose([]) is None


@pytest.mark.parametrize("served_before", [0, 3])
def test_an_idle_key_gets_no_credit(served_before):
    shares = Shares()
    shares.arrive("back")
    order_of(shares, candidates("back", served_before))
    shares.arrive("busy")
    order_of(shares, candidates("busy", 40))
    for key in ("back", "busy"):  # whichever is the first
        shares.arrive(key)
    order = order_of(shares, [*candidates("back", 10), *candidates("busy", 10)])
    assert 4 <= sum(name.startswith("busy") for name in order[:10]) <= 6


def test_the_choice_does_not_depend_on_the_order_of_the_list():
    several = [Candidate(f"m{index}", index % 3, index / 2) for index in range(9)]
    shares = Shares()
    for key, amount in enumerate((2.0, 1.0, 1.0)):
        shares.begin(key, amount)
    expected = shares.choose(several)
    random.Random(1).shuffle(several)
    assert shares.choose(several) == expected


def test_request_counts_from_its_start():
    """A key whose requests have not ended is not chosen for all free places."""
    shares, order = Shares(), []
    waiting = [*candidates("a", 4), *candidates("b", 4)]
    while (chosen := shares.choose(waiting)) is not None:
        waiting.remove(chosen)
        shares.begin(chosen.key, 2.0)
        order.append(chosen.key)
    assert order == ["a", "b"] * 4


def test_key_that_was_busy_all_the_time_keeps_its_place_when_another_arrives():
    shares = Shares()
    for key, used in (("ahead", 9.0), ("behind", 2.0)):
        shares.begin(key, 0.0)
        shares.end(key, 0.0, used)
    shares.arrive("new", {"ahead", "behind"})
    several = [Candidate(key, key, 0.0) for key in ("ahead", "new")]
    assert shares.choose(several) == several[1]
    shares.begin("new", 0.0)
    shares.end("new", 0.0, 0.5)
    behind = Candidate("behind", "behind", 0.0)
    assert shares.choose([*several, behind]) == behind


AWAY = Spot("other", moves=True, idle=True, price=4.0)


def test_model_moves_to_an_idle_engine_only_if_none_can_run_at_home():
    shares = Shares()
    moves, stays = Candidate("a", "a", 0.0, AWAY), Candidate("b", "b", 1.0)
    assert shares.choose([moves, stays]) == stays
    assert shares.choose([moves]) == moves
    assert shares.choose([replace(moves, spot=replace(AWAY, idle=False))]) is None


def test_model_moves_to_a_used_engine_if_its_key_is_far_behind():
    shares, spot = Shares(), replace(AWAY, idle=False)
    moves, stays = Candidate("a", "a", 0.0, spot), Candidate("b", "b", 1.0)
    shares.begin("b", 4.0)
    assert shares.choose([moves, stays]) == stays
    shares.begin("b", 0.1)
    assert shares.choose([moves, stays]) == moves


def test_key_that_pauses_between_steps_is_not_charged_for_what_others_have_in_flight():
    """It would never fall behind otherwise, however little it gets."""
    shares = Shares()
    for _ in range(10):
        shares.begin("steady", 1.0)
        shares.arrive("pauses", {"steady"})
        shares.end("steady", 1.0, 1.0)
        shares.begin("pauses", 0.5)
        shares.end("pauses", 0.5, 0.5)
    waiting = [Candidate("a", "pauses", 1.0), Candidate("b", "steady", 0.0)]
    assert shares.choose(waiting) == waiting[0]
