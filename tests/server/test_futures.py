"""Promises and their results: in memory, in the journal, and after a restart."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkex._wire import json_codec, proto_codec
from tinkex._wire.operations import operation
from tinkex.errors import (
    GoneError,
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
)
from tinkex.server.futures import CLONE_STRIDE, Feed, Promise, Promises
from tinkex.server.journal import Journal
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    OptimStepRequest,
    OptimStepResponse,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
)

OPTIM_STEP, ASAMPLE, FORWARD_BACKWARD = map(
    operation, ("optim_step", "asample", "forward_backward")
)
BEYOND = 10**22 + 12_345  # some client releases use such numbers; a float cannot represent it


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.123456

    def __call__(self) -> float:
        return self.now


class Desk:
    """A journal with its promises."""

    def __init__(self, directory: Path, memory_bytes: int = 1 << 20, **options: Any) -> None:
        self.clock = FakeClock()
        self.journal = Journal(directory, **options)
        self.promises = Promises(self.journal, memory_bytes=memory_bytes, clock=self.clock)
        for record in self.journal.open():
            self.promises.restore(record)

    def step(self, seq_id: int | None = 1, owner: str = "me", scope: str = "m") -> Promise:
        request = OptimStepRequest(optim_params=AdamParams(), model_id=scope, seq_id=seq_id)
        body = json_codec.encode(request)
        return self.promises.accept(OPTIM_STEP, owner, scope, seq_id, request, body, "json")

    def sample(self, seq_id: int | None = 1, num_samples: int = 2) -> Promise:
        request = SampleRequest(
            prompt=ModelInput.from_ints([1, 2, 3]),
            sampling_params=SamplingParams(max_tokens=3),
            num_samples=num_samples,
            sampling_session_id="s",
            seq_id=None,
        )
        # The fast JSON writer does not support such numbers.
        content = json.loads(json_codec.encode(request)) | {"seq_id": seq_id}
        request = json_codec.from_object(content, SampleRequest)
        extra = {"num_samples": num_samples}
        return self.promises.accept(
            ASAMPLE, "me", "s", seq_id, request, json.dumps(content).encode(), "json", extra
        )

    def get(self, promise: Promise) -> Promise:
        return self.promises.get(promise.request_id, promise.owner)

    def answer(self, promise: Promise) -> Any:
        return json.loads(self.promises.payload(promise))


@contextmanager
def desk(directory: Path, **options: Any) -> Iterator[Desk]:
    opened = Desk(directory, **options)
    try:
        yield opened
    finally:
        opened.journal.close()


def metrics(value: float = 1.0) -> OptimStepResponse:
    return OptimStepResponse(metrics={"loss": value})


# -- accepting and finishing -------------------------------------------------------------------------


def test_an_accepted_request_gets_its_result(tmp_path):
    with desk(tmp_path) as at:
        promise = at.step()
        assert not promise.done
        assert promise.accepted_at == at.clock.now
        assert at.get(promise) is promise
        assert at.promises.pending("me") == 1
        asyncio.run(at.promises.flushed())
        at.clock.now += 5
        at.promises.finish(promise, metrics())
        assert promise.done
        assert promise.result is not None
        assert promise.result.at == at.clock.now
        assert (promise.result.failed, promise.result.binary) == (False, False)
        assert at.promises.pending("me") == 0
        for _ in range(3):
            assert at.answer(at.get(promise)) == {"metrics": {"loss": 1.0}}


def test_a_result_wakes_its_waiters(tmp_path):
    async def wait(at: Desk) -> None:
        promise = at.step()
        waiting = [asyncio.create_task(promise.finished.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        at.promises.finish(promise, metrics())
        assert all(await asyncio.gather(*waiting))

    with desk(tmp_path) as at:
        asyncio.run(wait(at))


def test_listeners_are_called_on_accept_and_on_finish(tmp_path):
    with desk(tmp_path) as at:
        heard: list[tuple[int | None, bool]] = []
        for listeners in (at.promises.on_accept, at.promises.on_finish):
            listeners.append(lambda promise: heard.append((promise.seq_id, promise.done)))
        first, second = at.step(1), at.step(2)
        at.promises.fail(second, RuntimeError())
        at.promises.finish(first, metrics())
        assert heard == [(1, False), (2, False), (2, True), (1, True)]


def test_a_second_result_is_ignored(tmp_path):
    with desk(tmp_path) as at:
        promise = at.step()
        at.promises.fail(promise, RequestFailedError("cancelled"))
        at.promises.finish(promise, metrics())
        assert at.answer(promise)["error"] == "cancelled"
        assert at.promises.pending("me") == 0


def test_samples_and_passes_are_stored_as_protobuf(tmp_path):
    response = SampleResponse(
        [SampledSequence("length", tokens=[5, 6], logprobs=[-0.5, -1.25])],
        prompt_logprobs_np=np.array([np.nan, -2.0], np.float32),
    )
    output = ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": TensorData.from_numpy(np.array([-1.5], np.float32))}],
        metrics={"loss:sum": 1.5},
    )
    with desk(tmp_path) as at:
        sample, step = at.sample(), at.step()
        at.promises.finish(sample, response)
        at.promises.finish(step, output)
        assert sample.result is not None
        assert sample.result.binary
        drawn = proto_codec.decode_sample_response(at.promises.payload(sample))
        assert drawn.sequences[0].tokens == [5, 6]
        assert drawn.prompt_logprobs == [None, -2.0]
        passed = proto_codec.decode_forward_backward_output(at.promises.payload(step))
        assert passed.metrics == {"loss:sum": 1.5}


@pytest.mark.parametrize(
    ("error", "message", "category"),
    [
        (RequestFailedError("no room", category=RequestErrorCategory.Server), "no room", "server"),
        (InvalidInputError("is too long", field="prompt"), "prompt: is too long", "user"),
        (NotFoundError("There is no model 'm'."), "There is no model 'm'.", "user"),
    ],
)
def test_a_failure_is_a_result_with_message_and_category(tmp_path, error, message, category):
    with desk(tmp_path) as at:
        promise = at.step()
        at.promises.fail(promise, error)
        assert promise.result is not None
        assert promise.result.failed
        assert at.answer(promise) == {"error": message, "category": category}


def test_pending_requests_are_counted_by_owner(tmp_path):
    with desk(tmp_path) as at:
        mine, others = [at.step(n) for n in range(3)], at.step(9, owner="other")
        assert (at.promises.pending("me"), at.promises.pending("other")) == (3, 1)
        at.promises.finish(mine[0], metrics())
        at.promises.fail(others, RuntimeError())
        assert (at.promises.pending("me"), at.promises.pending("other")) == (2, 0)
        assert at.promises.pending("nobody") == 0


# -- duplicates --------------------------------------------------------------------------------------


def test_a_repeated_number_returns_its_promise(tmp_path):
    with desk(tmp_path) as at:
        promise = at.step(7)
        assert at.promises.duplicate("m", 7) is promise
        assert at.promises.duplicate("m", 8) is None
        assert at.promises.duplicate("another", 7) is None
        at.promises.finish(promise, metrics())
        assert at.promises.duplicate("m", 7) is promise


def test_requests_without_a_number_are_never_duplicates(tmp_path):
    with desk(tmp_path) as at:
        first, second = at.step(None), at.step(None)
        assert first.request_id != second.request_id
        assert at.promises.duplicate("m", None) is None


# -- by client and by session ---------------------------------------------------------------------------


def test_promises_are_found_by_client_and_by_session_until_they_are_forgotten(tmp_path):
    with desk(tmp_path) as at:
        first, second = at.step(1, scope="a:train:0"), at.step(2, scope="a:train:0")
        copy = at.step(3 * CLONE_STRIDE, scope="a:train:0")
        unnumbered = at.step(None, scope="a:train:0")
        other = at.step(1, scope="ab:train:0")
        assert at.promises.of_client(("a:train:0", 0)) == [first, second]
        assert at.promises.of_client(("a:train:0", 3)) == [copy]
        assert at.promises.of_client(("a:train:0", -1)) == [unnumbered]
        assert at.promises.of_client(("a:train:0", 7)) == []
        assert at.promises.of_session("a") == [first, second, copy, unnumbered]
        assert at.promises.of_session("ab") == [other]
        at.promises.finish(first, metrics())
        at.promises.forget(first)
        assert at.promises.of_client(("a:train:0", 0)) == [second]
    with desk(tmp_path) as again:
        found = [promise.request_id for promise in again.promises.of_session("a")]
        assert {second.request_id, copy.request_id, unnumbered.request_id} <= set(found)
        for promise in list(again.promises):
            again.promises.finish(promise, metrics())
            again.promises.forget(promise)
        assert again.promises.of_session("a") == []
        assert not again.promises._of_session


# -- memory and disk ---------------------------------------------------------------------------------


def test_old_results_leave_memory_and_are_read_from_the_journal(tmp_path):
    with desk(tmp_path, memory_bytes=500) as at:
        made = [at.step(number) for number in range(30)]
        for number, promise in enumerate(made):
            at.promises.finish(promise, metrics(number))
        kept = [promise.result.payload for promise in made if promise.result is not None]
        assert kept[0] is None
        assert kept[-1] is not None
        assert 0 < sum(len(payload) for payload in kept if payload is not None) <= 500
        answers = [at.answer(promise)["metrics"]["loss"] for promise in made]
        assert answers == list(range(30))


def test_a_fetched_result_is_dropped_from_memory(tmp_path):
    with desk(tmp_path) as at:
        made = [at.step(number) for number in range(2)]
        for promise in made:
            at.promises.finish(promise, metrics())
        for _ in range(2):
            assert at.answer(made[0]) == {"metrics": {"loss": 1.0}}
        kept = [promise.result.payload for promise in made if promise.result is not None]
        assert kept[0] is None
        assert kept[1] is not None


def test_promises_share_equal_strings(tmp_path):
    with desk(tmp_path) as at:
        at.sample(1), at.sample(2)
    with desk(tmp_path) as at:  # reads every string again
        one, other = at.promises
        for name in ("owner", "scope", "media", "extra"):
            assert getattr(one, name) is getattr(other, name)


def test_a_result_larger_than_the_memory_is_read_from_the_journal(tmp_path):
    with desk(tmp_path, memory_bytes=3) as at:
        promise = at.step()
        at.promises.finish(promise, metrics())
        assert promise.result is not None
        assert promise.result.payload is None
        assert at.answer(promise)["metrics"] == {"loss": 1.0}


def test_on_a_full_disk_results_stay_in_memory_until_there_is_space(tmp_path):
    with desk(tmp_path, memory_bytes=100) as at:
        made = [at.step(number) for number in range(8)]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at.journal.size, before[1]))
        try:
            for number, promise in enumerate(made):
                at.promises.finish(promise, metrics(number))
            with pytest.raises(OSError, match="too large"):
                at.step(99)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert at.promises.duplicate("m", 99) is None
        assert at.promises.pending("me") == 0
        later = [at.step(number) for number in range(10, 18)]
        for number, promise in enumerate(later):
            at.promises.finish(promise, metrics(number))
        for promises in (made, later):
            assert [at.answer(promise)["metrics"]["loss"] for promise in promises] == list(range(8))
            for promise in promises:
                at.promises.forget(promise)
    with desk(tmp_path) as at:
        assert [promise.done for promise in at.promises] == [True] * 16


def test_a_crash_on_a_full_disk_loses_the_newest_results_and_no_others(tmp_path):
    """Otherwise a replayed request would run after its successors."""
    with desk(tmp_path) as at:
        made = [at.step(number) for number in range(8)]
        at.promises.finish(made[0], metrics(0))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at.journal.size + 10, before[1]))
        try:
            at.promises.finish(made[1], OptimStepResponse(metrics={"loss": 1.0, "x" * 5000: 2.0}))
            resource.setrlimit(resource.RLIMIT_FSIZE, (at.journal.size + 1000, before[1]))
            at.promises.finish(made[2], metrics(2))  # only this one would fit
            with pytest.raises(OSError, match="too large"):
                asyncio.run(at.promises.settled())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        shutil.copytree(tmp_path, tmp_path / "crashed", ignore=shutil.ignore_patterns("crashed"))
        asyncio.run(at.promises.settled())
    with desk(tmp_path / "crashed") as at:
        assert [promise.done for promise in at.promises] == [True] + [False] * 7
    with desk(tmp_path) as at:
        assert [promise.done for promise in at.promises] == [True] * 3 + [False] * 5


def test_a_result_whose_request_is_lost_is_detected(tmp_path):
    with desk(tmp_path) as at:
        for number in range(3):
            at.promises.finish(at.step(number), metrics(number), change=number + 1)
    journal = Journal(tmp_path)
    promises = Promises(journal)
    for record in journal.open():
        if record.head.get("seq") != "1":
            promises.restore(record)
    journal.close()
    assert promises.lost == {"m": 2}
    assert [promise.seq_id for promise in promises] == [0, 2]


# -- fetching ----------------------------------------------------------------------------------------


def test_an_evicted_request_is_gone_and_an_invalid_id_is_not_found(tmp_path):
    with desk(tmp_path) as at:
        promise = at.step()
        with pytest.raises(NotFoundError):
            at.promises.get("nonsense", "me")
        with pytest.raises(GoneError):  # an unknown id looks the same as an evicted one
            at.promises.get(promise.request_id, "other")
        at.promises.finish(promise, metrics())
        at.promises.forget(promise)
        for owner in ("me", "other"):
            with pytest.raises(GoneError):
                at.promises.get(promise.request_id, owner)


def test_eviction_frees_number_and_memory(tmp_path):
    with desk(tmp_path, memory_bytes=150) as at:
        kept = at.step(0)
        at.promises.finish(kept, metrics())
        for _ in range(20):
            promise = at.step(1)
            at.promises.finish(promise, metrics())
            at.promises.forget(promise)
            assert at.promises.duplicate("m", 1) is None
            assert not at.promises.knows(promise.request_id)
        assert list(at.promises) == [kept]
        assert kept.result is not None
        assert kept.result.payload is not None  # the evicted ones do not count


def test_evicting_an_earlier_request_keeps_a_later_one_with_the_same_number(tmp_path):
    with desk(tmp_path) as at:
        first, second = at.step(1), at.step(1)
        at.promises.finish(first, metrics())
        at.promises.forget(first)
        assert at.promises.duplicate("m", 1) is second


# -- restart -----------------------------------------------------------------------------------------


def facts(promise: Promise) -> Any:
    result = promise.result
    return (
        promise.request_id,
        promise.operation,
        promise.owner,
        promise.scope,
        promise.seq_id,
        promise.media,
        promise.accepted_at,
        promise.place,
        promise.extra,
        promise.sequence_ids,
        promise.finished.is_set(),
        None if result is None else astuple(replace(result, payload=None)),
    )


def test_a_replayed_request_has_its_later_result(tmp_path):
    with desk(tmp_path) as at:
        at.promises.fail(at.step(1), InvalidInputError("is wrong", field="x"))
    with desk(tmp_path) as at:
        (promise,) = at.promises
        at.promises.reopen(promise)
        assert not promise.finished.is_set()
        assert at.promises.pending("me") == 1
        at.promises.finish(promise, metrics(3.0), change=12)
    with desk(tmp_path) as at:
        (promise,) = at.promises
        assert promise.result is not None
        assert (promise.result.failed, promise.result.change) == (False, 12)
        assert at.answer(promise)["metrics"] == {"loss": 3.0}
        assert at.promises.pending("me") == 0


def test_promises_and_results_are_equal_after_a_restart(tmp_path):
    with desk(tmp_path) as at:
        made = [at.step(1), at.step(None, owner="other"), at.sample(BEYOND), at.step(2), at.step(3)]
        at.clock.now += 0.1
        at.promises.finish(made[0], metrics(3.0), change=12)
        at.promises.fail(made[3], InvalidInputError("is wrong", field="x"))
        before = [facts(promise) for promise in made]
        payloads = [at.promises.payload(promise) for promise in made if promise.done]
    with desk(tmp_path) as at:
        restored = list(at.promises)
        assert restored[0].result is not None
        assert restored[0].result.change == 12
        assert [facts(promise) for promise in restored] == before
        assert [at.promises.payload(promise) for promise in restored if promise.done] == payloads
        assert (at.promises.pending("me"), at.promises.pending("other")) == (2, 1)
        assert at.promises.duplicate("m", 2) is restored[3]
        at.promises.finish(restored[4], metrics(4.0))
    with desk(tmp_path) as at:
        assert at.answer(list(at.promises)[4])["metrics"] == {"loss": 4.0}


def test_a_request_is_read_from_the_journal_after_a_restart(tmp_path):
    with desk(tmp_path) as at:
        step, sample = at.step(5), at.sample(6)
        kept = [at.promises.request_of(step), at.promises.request_of(sample)]
        step.request = sample.request = None  # dropped to save memory
        assert [at.promises.request_of(step), at.promises.request_of(sample)] == kept
    with desk(tmp_path) as at:
        assert [at.promises.request_of(promise) for promise in at.promises] == kept


def test_a_protobuf_request_is_read_from_the_journal_after_a_restart(tmp_path):
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": TensorData.from_numpy(np.array([2, 3]))},
    )
    request = ForwardBackwardRequest(ForwardBackwardInput([datum], "cross_entropy"), "m", 3)
    body = proto_codec.encode_forward_backward_request(request)
    with desk(tmp_path) as at:
        at.promises.accept(FORWARD_BACKWARD, "me", "m", 3, request, body, "proto")
    with desk(tmp_path) as at:
        [promise] = at.promises
        again = at.promises.request_of(promise)
        assert proto_codec.encode_forward_backward_request(again) == body


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64 + 1, BEYOND])
def test_numbers_of_any_size_survive_a_restart(tmp_path, number):
    with desk(tmp_path) as at:
        assert at.sample(number).seq_id == number
        assert at.promises.duplicate("s", number) is not None
    with desk(tmp_path) as at:
        [promise] = at.promises
        assert promise.seq_id == number
        assert at.promises.duplicate("s", number) is promise
        assert at.promises.duplicate("s", number - 1) is None
        assert at.promises.request_of(promise).seq_id == number


def test_evicted_promises_may_reappear_after_a_restart_until_compaction(tmp_path):
    with desk(tmp_path, segment_bytes=200) as at:
        made = [at.step(number) for number in range(10)]
        for promise in made[:-1]:
            at.promises.finish(promise, metrics())
            at.promises.forget(promise)
        kept = made[-1]
        needed = lambda record: at.promises.knows(record.head["id"])  # noqa: E731
        while asyncio.run(at.journal.compact(needed)):
            pass
        assert at.promises.request_of(kept).seq_id == 9
    with desk(tmp_path) as at:
        [restored] = at.promises
        assert facts(restored) == facts(kept)


def test_results_and_requests_are_found_where_compaction_moved_them(tmp_path):
    with desk(tmp_path, memory_bytes=0, segment_bytes=500) as at:
        made = [at.step(number) for number in range(6)]
        for number, promise in enumerate(made):
            promise.request = None
            at.promises.finish(promise, metrics(number))
        for _ in range(5):
            before = [facts(promise) for promise in made]
            asyncio.run(at.journal.compact(lambda _: True))
            assert [facts(promise) for promise in made] != before
            assert [at.answer(promise)["metrics"]["loss"] for promise in made] == list(range(6))
            assert [at.promises.request_of(promise).seq_id for promise in made] == list(range(6))
    # Requests are now after their results in the file, but are still read before them.
    with desk(tmp_path) as at:
        assert [promise.seq_id for promise in at.promises] == list(range(6))
        answers = [at.answer(promise)["metrics"]["loss"] for promise in at.promises]
        assert answers == list(range(6))


def test_a_result_that_cannot_be_encoded_fails_but_keeps_its_change_number(tmp_path):
    with desk(tmp_path) as at:
        promise = at.step()
        at.promises.finish(promise, object(), 7)
        assert promise.done
        assert "error" in at.answer(promise)
    with desk(tmp_path) as at:
        (promise,) = at.promises
        assert promise.result is not None
        assert (promise.result.failed, promise.result.change) == (True, 7)


def test_refused_numbers_survive_a_restart(tmp_path):
    with desk(tmp_path) as at:
        at.promises.refuse("m", 3)
        at.promises.refuse("m", BEYOND)
        at.promises.refuse("other", 1)
        assert not len(at.promises)
    with desk(tmp_path) as at:
        assert at.promises.refused == {"m": [3, BEYOND], "other": [1]}
        assert not len(at.promises)


# -- feeds -------------------------------------------------------------------------------------------


def test_a_feed_returns_requests_after_the_cursor_and_drops_acknowledged_ones(tmp_path):
    with desk(tmp_path) as at:
        feed = Feed()
        first, second, third = (at.sample(number) for number in (1, 2, 3))
        assert feed.after(0) == []
        feed.put(second)
        feed.put(first)
        assert feed.changed.is_set()
        assert feed.after(0) == [second, first]
        assert feed.after(0) == [second, first]  # again: the response may have been lost
        assert feed.after(1) == [first]
        feed.put(third)
        assert feed.after(2) == [third]
        assert feed.after(feed.cursor) == []
        assert not feed.finished


def test_a_feed_continues_after_its_last_cursor_when_the_clock_is_set_back(tmp_path):
    with desk(tmp_path) as at:
        feed = Feed(cursor=100)
        first, second = at.sample(1), at.sample(2)
        feed.put(first)
        assert feed.after(5000) == [first]
        assert feed.cursor == 5001
        feed.put(second)
        assert feed.after(5001) == [second]
        assert feed.after(feed.cursor) == []


def test_a_sample_promise_has_sequence_ids(tmp_path):
    with desk(tmp_path) as at:
        promise = at.sample(num_samples=2)
        assert promise.sequence_ids == [f"{promise.request_id}-0", f"{promise.request_id}-1"]
        assert at.step().sequence_ids is None
