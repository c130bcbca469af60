"""Prompts that begin with tokens the cache holds: the same results, fewer tokens read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tinkex.engine.lora import Adapter
from tinkex.errors import RequestFailedError

from .test_non_finite import HUGE, let_in, outcomes, spoiled
from .test_sampling import job, run, sampler_of
from .test_training import trained

TEXT = np.random.default_rng(0).integers(0, 256, 100).astype(np.int32)


def alone(language_model, one: Any, adapter: Adapter | None = None) -> Any:
    return run(sampler_of(language_model), {"a": one}, adapter)["a"]


def same(found: Any, expected: Any) -> None:
    """Rows of a product depend on how many there are in the last bit only."""
    assert [drawn.tolist() for drawn in found.tokens] == [
        drawn.tolist() for drawn in expected.tokens
    ]
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_turns_of_a_conversation_read_only_what_is_new(language_model, adapted):
    adapter = trained(language_model).adapter.frozen_copy() if adapted else None
    sampler = sampler_of(language_model)
    prompt, cached = TEXT, []
    for turn in range(4):
        one = job(prompt_T=prompt, seed=turn, max_tokens=40)
        result = run(sampler, {"a": one}, adapter)["a"]
        same(result, alone(language_model, one, adapter))
        cached.append(result.cached_tokens)
        prompt = np.concatenate([prompt, result.tokens[0], TEXT[:25]])
    # Each turn finds the prompt and the answer of the one before, without the last token, in whole pages.
    assert cached == [0, (100 + 39) // 32 * 32, (165 + 39) // 32 * 32, (230 + 39) // 32 * 32]


def test_cached_prefix_with_scores_gives_the_same_prompt_logprobs(language_model):
    sampler = sampler_of(language_model)
    run(sampler, {"first": job(prompt_T=TEXT)})
    jobs = {
        "whole": job(prompt_T=TEXT, prompt_logprobs=True, topk_prompt_logprobs=3),
        "end": job(prompt_T=TEXT, prompt_logprobs=True, prompt_logprobs_last_n=10),
        "targets": job(prompt_T=TEXT, target_prompt_tokens=TEXT[1:, None].astype(np.int64)),
        "plain": job(prompt_T=TEXT, seed=1),
    }
    results = run(sampler, jobs)
    for name, one in jobs.items():
        expected = alone(language_model, one)
        found = results[name]
        for part in ("prompt_logprobs_T", "target_prompt_logprobs"):
            ours, theirs = getattr(found, part), getattr(expected, part)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        if found.topk_prompt is not None:
            np.testing.assert_array_equal(found.topk_prompt[0], expected.topk_prompt[0])
    assert results["plain"].cached_tokens == 96
    assert results["whole"].cached_tokens == results["targets"].cached_tokens == 0
    assert results["end"].cached_tokens == 64  # the states from position 89 on are needed


def test_candidates_of_one_prompt_in_separate_requests_share_it(language_model):
    sampler = sampler_of(language_model)
    jobs = {str(seed): job(prompt_T=TEXT, seed=seed) for seed in range(6)}
    sampler.add("0", jobs["0"], None)
    sampler.step()
    results = run(sampler, {name: one for name, one in jobs.items() if name != "0"})
    for name, result in results.items():
        same(result, alone(language_model, jobs[name]))
    assert [results[str(seed)].cached_tokens for seed in range(6)] == [0, 96, 96, 96, 96, 96]


def test_evicted_prefix_is_read_again(language_model):
    sampler = sampler_of(language_model)
    sampler.cache_bytes = 6 * sampler._runner.decoder.page_bytes
    first = job(prompt_T=TEXT, seed=1)
    expected = alone(language_model, first)
    assert run(sampler, {"a": first})["a"].cached_tokens == 0
    assert run(sampler, {"b": first})["b"].cached_tokens == 96
    run(sampler, {"other": job(prompt_T=TEXT[::-1].copy())})
    again = run(sampler, {"c": first})["c"]
    assert again.cached_tokens < 96
    same(again, expected)
    assert sampler._scheduler.pool.held <= 6


@pytest.mark.parametrize("value", [math.nan, math.inf, HUGE])
def test_diverged_adapter_does_not_affect_other_samples(language_model, value):
    """Its requests fail each time, and the pages they used give others the same results."""
    bad = let_in(spoiled(language_model, value, "k_proj"))
    worse = let_in(spoiled(language_model, value, "down_proj"))
    sampler = sampler_of(language_model)
    good = job(prompt_T=TEXT, seed=1)
    expected = alone(language_model, good)
    for adapter in (worse, bad, worse):
        found = outcomes(sampler, [(0, "x", job(prompt_T=TEXT, seed=2), adapter)])["x"]
        if adapter is worse:
            assert isinstance(found, RequestFailedError)
        same(outcomes(sampler, [(0, "y", good, None)])["y"], expected)


def test_reopened_adapter_finds_its_pages_and_another_does_not(language_model):
    first = trained(language_model).adapter.frozen_copy()
    reopened = first.frozen_copy()
    other = trained(language_model, train_mlp=False).adapter.frozen_copy()
    sampler = sampler_of(language_model)
    run(sampler, {"a": job(prompt_T=TEXT)}, first)
    sampler.forget(first)
    assert run(sampler, {"b": job(prompt_T=TEXT)}, other)["b"].cached_tokens == 0
    assert run(sampler, {"c": job(prompt_T=TEXT)}, reopened)["c"].cached_tokens == 96
