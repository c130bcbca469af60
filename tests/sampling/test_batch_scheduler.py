"""The batch scheduler alone: admission, chunks of prompts, sharing, fairness between owners, leaving and failing."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from tinkex.engine.batch_scheduler import BatchScheduler, Step
from tinkex.engine.continuations import Continuation, SamplingRequest
from tinkex.engine.pages import PagePool
from tinkex.engine.values import SampleJob


@dataclass(frozen=True)
class Adapter:
    digest: bytes


def scheduler(
    *, size: int = 4, budget: float = inf, sequences: int = 8, prefill: int = 100
) -> BatchScheduler:
    pool = PagePool(size, budget)
    return BatchScheduler(pool, max_sequences=sequences, prefill_tokens=prefill)


def add(to: BatchScheduler, name: str, prompt: range | list[int], **options: Any) -> Any:
    adapter = options.pop("adapter", None)
    made = SampleJob(name, np.array(prompt, np.int32), **options)
    request = SamplingRequest(name, made, adapter, frozenset(), 0, 99, made.num_samples)
    to.add(request)
    return request


def run(on: BatchScheduler, token: int = 7) -> tuple[dict[str, tuple[int, int]], Step]:
    """Schedule a step and pretend to run it; return what was read of each job, and the step."""
    step = on.schedule()
    drawing = [chunk.continuation for chunk in step.chunks if chunk.completes]
    drawing += [fork.target for fork in on.advance(step.chunks)]
    for one in drawing:
        one.tokens.append(token)
    read = {chunk.continuation.request.job_id: (chunk.start, chunk.count) for chunk in step.chunks}
    return read, step


def finish(on: BatchScheduler, request: SamplingRequest) -> None:
    for one in list(request.started):
        on.finish(one)


def test_prompt_is_read_in_chunks_beside_running_continuations():
    on = scheduler(prefill=10)
    add(on, "a", range(3))
    assert run(on)[0] == {"a": (0, 3)}
    add(on, "long", range(25))
    assert run(on)[0] == {"a": (3, 1), "long": (0, 10)}
    assert run(on)[0] == {"a": (4, 1), "long": (10, 10)}
    add(on, "next", range(50, 54))
    assert run(on)[0] == {"a": (5, 1), "long": (20, 5), "next": (0, 4)}
    assert run(on)[0] == {"a": (6, 1), "long": (25, 1), "next": (4, 1)}


def test_continuations_of_one_prompt_read_it_once_and_share_its_full_pages():
    on = scheduler()
    request = add(on, "many", range(10), num_samples=3)
    other = add(on, "same", range(10))
    read, _ = run(on)
    assert read == {"many": (0, 10)}
    pages = [one.pages for one in (*request.started, *other.started)]
    assert [own[:2] for own in pages] == [pages[0][:2]] * 4
    assert len({own[2] for own in pages}) == 4
    assert on.pool.used == 2 + 4
    assert on.depth == (0, 4)


def test_longest_prefix_in_the_cache_is_reused_and_counted():
    on = scheduler()
    first = add(on, "first", range(10))
    run(on)
    finish(on, first)
    longer = add(on, "longer", [*range(10), 7, 30, 31])
    assert run(on)[0] == {"longer": (8, 5)}
    assert longer.cached_tokens == 8
    whole = add(on, "whole", range(8))  # the last token is always read, for its logits
    assert run(on)[0]["whole"] == (4, 4)
    assert whole.cached_tokens == 4
    assert add(on, "other", [9, *range(9)]).cached_tokens == 0
    assert run(on)[0]["other"] == (0, 10)


def test_drawn_tokens_are_reused_by_the_next_turn():
    on = scheduler()
    turn = add(on, "turn", range(6))
    for _ in range(5):
        run(on, token=50)
    finish(on, turn)
    add(on, "next", [*range(6), 50, 50, 50, 50, 99])
    assert run(on)[0] == {"next": (8, 3)}


def test_other_adapter_or_owner_shares_nothing():
    on = scheduler()
    add(on, "base", range(10), owner="ann")
    run(on)
    add(on, "adapter", range(10), owner="ann", adapter=Adapter(b"x"))
    add(on, "stranger", range(10), owner="bob")
    read, _ = run(on)
    assert read["adapter"] == read["stranger"] == (0, 10)
    add(on, "reopened", range(10), owner="ann", adapter=Adapter(b"x"))
    assert run(on)[0]["reopened"] == (8, 2)


def test_prompt_with_scores_is_read_from_the_first_scored_position():
    on = scheduler()
    add(on, "first", range(12))
    run(on)
    add(on, "scored", range(12), prompt_logprobs=True)
    add(on, "end", range(12), prompt_logprobs=True, prompt_logprobs_last_n=3)
    read, _ = run(on)
    assert read["scored"] == (0, 12)
    assert read["end"] == (8, 4)


def test_pages_of_a_failed_request_are_not_reused():
    on = scheduler()
    request = add(on, "bad", range(10))
    run(on)
    request.failure = RuntimeError()
    on.drop(request)
    assert on.pool.held == 0
    add(on, "again", range(10))
    assert run(on)[0] == {"again": (0, 10)}


def test_cancelled_leader_leaves_the_reading_to_its_followers():
    on = scheduler(prefill=5)
    leader = add(on, "leader", range(10))
    follower = add(on, "follower", range(10))
    run(on)
    assert on.depth == (0, 2)
    on.drop(leader)
    assert on.depth == (1, 0)
    run(on)
    run(on)
    assert follower.started[0].tokens == [7]
    on.drop(follower)
    assert not on.busy
    assert on.pool.used == 0


def test_last_continuation_leaves_when_pages_run_out_and_continues_later():
    on = scheduler(budget=5)
    add(on, "first", range(10))
    add(on, "second", range(50, 57))
    run(on)
    assert on.depth == (1, 1)  # a page for the running one stays free
    on = scheduler(budget=7)
    first, second = add(on, "first", range(10)), add(on, "second", range(50, 57))
    for _ in range(6):
        run(on)
    assert on.depth == (0, 2)
    for _ in range(4):
        run(on)
    assert on.depth == (1, 1)
    assert len(first.started[0].tokens) == 10
    drawn = len(second.started[0].tokens)
    assert on.pool.used <= 7
    finish(on, first)
    read, _ = run(on)
    assert read["second"][0] + read["second"][1] == 7 + drawn
    assert len(second.started[0].tokens) == drawn + 1


def test_owners_take_turns_for_the_free_places():
    on = scheduler(sequences=3)
    for number in range(3):
        add(on, f"ann {number}", [number], owner="ann")
    add(on, "bob", [9], owner="bob")
    assert set(run(on)[0]) == {"ann 0", "bob", "ann 1"}


def test_failed_step_is_retried_with_half_the_pages_until_one_is_alone():
    on = scheduler()
    for number in range(4):
        add(on, str(number), range(10 * number, 10 * number + 6))
    counts = []
    for _ in range(3):
        on.schedule()
        tried = on.empty()
        counts.append(len(tried))
        assert on.pool.used == 0
        on.retry_smaller(tried)
    assert counts == [4, 2, 1]
    on.lift_limit()
    assert len(on.schedule().chunks) == 4


def test_fresh_pages_are_all_pages_that_the_batch_has_taken():
    on = scheduler()
    add(on, "a", range(4))
    _, step = run(on)
    (one,) = (chunk.continuation for chunk in step.chunks)
    assert isinstance(one, Continuation)
    assert step.fresh == one.pages[:1]
    assert run(on)[1].fresh == one.pages[1:]  # the drawn token needs a second page
    assert run(on)[1].fresh == []
