"""Admission to the sampling batch: order, memory budget, and recovery when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinkex.engine.values import SampledResult, SampleEvent
from tinkex.errors import RequestFailedError

from .test_sampling import PROMPT, job, run, sampler_of


class Watched:
    """A decoder that records what is read of prompts and the most pages, and fails above `limit` pages."""

    def __init__(self, sampler: Any, limit: float = float("inf")) -> None:
        self._decoder, self._limit = sampler._runner.decoder, limit
        self._scheduler = sampler._scheduler
        self.most = 0
        self.parts: list[tuple[int, int]] = []

    def read(self, step: Any, groups: Any) -> Any:
        used = self._scheduler.pool.used
        if used > self._limit:
            raise RuntimeError(f"can't allocate memory: you tried to allocate {used} pages")
        self.most = max(self.most, self._scheduler.pool.held)
        self.parts += [(chunk.start, chunk.count) for chunk in step.chunks if chunk.count > 1]
        return self._decoder.read(step, groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def watched(language_model, *, limit: float = float("inf"), **options):
    sampler = sampler_of(language_model, **options)
    sampler._runner.decoder = watch = Watched(sampler, limit)
    return sampler, watch


def pages(sampler: Any, count: int) -> Any:
    """Bytes of `count` pages."""
    return count * sampler._runner.decoder.page_bytes


def tokens(result: SampledResult | None) -> list[list[int]]:
    assert result is not None
    return [drawn.tolist() for drawn in result.tokens]


def events_of(sampler, each_step: Callable[[], object] = lambda: None) -> list[SampleEvent]:
    events = []
    while sampler.busy:
        events += sampler.step()
        each_step()
    return events


# -- many sequences ----------------------------------------------------------------------------------


def test_running_samples_of_one_request_stay_within_the_limit(language_model):
    many = job(seed=3, num_samples=10, prompt_logprobs=True)
    expected = run(sampler_of(language_model), {"a": many})["a"]
    sampler, watch = watched(language_model, max_sequences=4)
    sampler.add("a", many, None)
    depths = []
    (event,) = events_of(sampler, lambda: depths.append(sampler.depth))
    assert tokens(event.result) == tokens(expected)
    assert event.result is not None
    np.testing.assert_array_equal(event.result.prompt_logprobs_T, expected.prompt_logprobs_T)
    assert depths[0] == (1, 4)
    assert max(running for _, running in depths) == 4
    assert watch.parts == [(0, len(PROMPT))] * 3  # once for all that start in the same step


def test_later_samples_read_only_the_end_of_the_prompt(language_model):
    many = job(seed=3, num_samples=20, max_tokens=30, stop_tokens=tuple(range(0, 264, 8)))
    expected = run(sampler_of(language_model), {"a": many})["a"]
    sampler, watch = watched(language_model, max_sequences=4, page_tokens=4)
    assert tokens(run(sampler, {"a": many})["a"]) == tokens(expected)
    assert len({len(drawn) for drawn in expected.tokens}) > 5
    assert watch.parts[0] == (0, len(PROMPT))
    assert set(watch.parts[1:]) == {(16, 3)}


def test_request_can_be_cancelled_while_some_samples_run(language_model):
    sampler, _ = watched(language_model, max_sequences=4)
    sampler.add("many", job(num_samples=10), None)
    sampler.add("other", job(temperature=0.0), None)
    sampler.step()
    sampler.cancel("many")
    sampler.cancel("nobody")
    assert sampler.depth == (1, 0)
    assert [event.job_id for event in events_of(sampler)] == ["other"]
    sampler.add("many", job(num_samples=10), None)
    sampler.step()
    sampler.cancel("many")
    assert not sampler.busy
    assert sampler._scheduler.pool.used == 0


# -- owners ------------------------------------------------------------------------------------------


def test_owners_take_turns(language_model):
    sampler = sampler_of(language_model, max_sequences=2)
    for number in range(6):
        sampler.add(f"ann {number}", job(max_tokens=4, owner="ann"), None)
    sampler.add("ann many", job(max_tokens=4, num_samples=6, owner="ann"), None)
    for number in range(2):
        sampler.add(f"bob {number}", job(max_tokens=4, owner="bob"), None)
    finished = [event.job_id for event in events_of(sampler)]
    assert finished == [
        *("ann 0", "bob 0", "ann 1", "bob 1"),
        *("ann 2", "ann 3", "ann 4", "ann 5", "ann many"),
    ]


def test_samples_of_one_request_alternate_with_other_owners(language_model):
    sampler = sampler_of(language_model, max_sequences=2)
    sampler.add("many", job(max_tokens=4, num_samples=9, owner="ann"), None)
    sampler.step()
    sampler.add("one", job(max_tokens=4, owner="bob"), None)
    assert [event.job_id for event in events_of(sampler)] == ["one", "many"]


# -- memory ------------------------------------------------------------------------------------------


def test_cache_stays_within_its_budget_with_unchanged_results(language_model):
    jobs = {str(number): job(seed=number, max_tokens=90 + 20 * number) for number in range(6)}
    expected = run(sampler_of(language_model), jobs)
    sampler, watch = watched(language_model)
    sampler.cache_bytes = pages(sampler, 14)
    results = run(sampler, jobs)
    assert {name: tokens(result) for name, result in results.items()} == {
        name: tokens(result) for name, result in expected.items()
    }
    assert 10 < watch.most <= 14
    # Some left the batch and were read again with their drawn tokens, as far as the cache did not hold them.
    assert max(start + count for start, count in watch.parts) > 2 * len(PROMPT)


def test_long_prompt_waits_until_it_fits_and_is_not_overtaken(language_model):
    sampler, watch = watched(language_model, prefill_tokens=1000)
    sampler.cache_bytes = pages(sampler, 8)
    for number in range(4):
        sampler.add(f"short {number}", job(max_tokens=5 + number), None)
    sampler.add("long", job(prompt_T=np.resize(PROMPT, 150), max_tokens=5), None)
    sampler.add("late", job(max_tokens=5), None)
    finished = [event.job_id for event in events_of(sampler)]
    assert finished == [*(f"short {number}" for number in range(4)), "long", "late"]
    assert watch.most <= 8


def test_single_sequence_over_the_budget_runs_alone(language_model):
    sampler, watch = watched(language_model, cache_bytes=1, page_tokens=4)
    jobs = {name: job(seed=1) for name in "ab"}
    assert tokens(run(sampler, jobs)["b"]) == tokens(run(sampler_of(language_model), jobs)["b"])
    assert watch.most == -(-(len(PROMPT) + 12 - 1) // 4)


def test_sequences_of_different_lengths_take_the_pages_that_they_use(language_model):
    sampler, watch = watched(language_model, prefill_tokens=4096)
    lengths = [1000, 10, 20, 30, 100]
    for length in lengths:
        prompt = np.resize(np.roll(PROMPT, length), length)
        sampler.add(str(length), job(prompt_T=prompt, max_tokens=2), None)
    events_of(sampler)
    assert watch.most == sum(-(-(length + 1) // 32) for length in lengths)


# -- steps that fail ---------------------------------------------------------------------------------


def test_out_of_memory_step_is_retried_in_smaller_batches(language_model):
    jobs = {str(number): job(seed=number, num_samples=4, stream=True) for number in range(8)}
    expected = run(sampler_of(language_model), jobs)
    sampler, _ = watched(language_model, limit=5)
    for name, one in jobs.items():
        sampler.add(name, one, None)
    events = events_of(sampler)
    streamed: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if event.token is not None:
            streamed.setdefault((event.job_id, event.index), []).append(event.token)
    assert {event.job_id for event in events if event.result is not None} == set(jobs)
    assert not [event for event in events if event.error is not None]
    for name, result in expected.items():
        for index, drawn in enumerate(tokens(result)):
            assert streamed[name, index] == drawn
    assert sampler._scheduler.pool.used == 0


def test_only_the_request_that_does_not_fit_alone_fails(language_model):
    others = {str(number): job(seed=number, max_tokens=30) for number in range(6)}
    expected = run(sampler_of(language_model), others)
    sampler, _ = watched(language_model, limit=12, prefill_tokens=1000)
    for name, one in list(others.items())[:3]:
        sampler.add(name, one, None)
    sampler.step()
    sampler.add("long", job(prompt_T=np.resize(PROMPT, 600), num_samples=3), None)
    for name, one in list(others.items())[3:]:
        sampler.add(name, one, None)
    ended = {event.job_id: event for event in events_of(sampler)}
    error = ended.pop("long").error
    assert isinstance(error, RequestFailedError)
    assert "too little memory to sample after 600 tokens" in str(error)
    assert {name: tokens(event.result) for name, event in ended.items()} == {
        name: tokens(result) for name, result in expected.items()
    }
    assert sampler._scheduler._pages_that_work == float("inf")


def test_error_in_one_request_fails_only_that_request(language_model):
    def detokenize(ids):
        if len(ids) == 3:
            raise UnicodeError("these tokens are no text")
        return ""

    sampler = sampler_of(language_model)
    sampler._detokenize = detokenize
    others = {str(number): job(seed=number) for number in range(5)}
    expected = run(sampler_of(language_model), others)
    sampler.add("broken", job(stop_texts=("x",)), None)
    for name, one in others.items():
        sampler.add(name, one, None)
    ended = {event.job_id: event for event in events_of(sampler)}
    assert isinstance(ended.pop("broken").error, UnicodeError)
    assert {name: tokens(event.result) for name, event in ended.items()} == {
        name: tokens(result) for name, result in expected.items()
    }


def test_lost_device_is_raised_not_retried(language_model):
    class Lost(Watched):
        def read(self, *_: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    sampler = sampler_of(language_model)
    sampler._runner.decoder = Lost(sampler)
    sampler.add("a", job(), None)
    with pytest.raises(RuntimeError, match="CUDA error"):
        sampler.step()
