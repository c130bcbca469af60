"""Adapters with NaN or infinite weights: their own requests fail, and no other sequence of the batch changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine import base_models
from tinkex.engine.decoder import PlainDecoder
from tinkex.engine.lean_decoder import LeanDecoder
from tinkex.engine.lora import Adapter
from tinkex.engine.trainer import LanguageModel, run_pass
from tinkex.engine.values import AdamStep, PassJob, SampledResult
from tinkex.errors import RequestErrorCategory, RequestFailedError

from ..running import finish
from .conftest import load
from .test_sampling import PROMPT, job, sampler_of
from .test_training import examples, trained

BAD_VALUES = (math.nan, math.inf, -math.inf)
#: Finite, but products with it overflow.
HUGE = 1e38


@pytest.fixture(scope="module")
def shared(tiny: base_models.PreparedModel) -> LanguageModel:
    return LanguageModel(load(tiny), context_length=tiny.context_length)


def spoiled(language_model: LanguageModel, value: float, layer: str = "") -> Adapter:
    """An adapter with one non-finite row in the first layer whose name contains `layer`."""
    adapter: Adapter = trained(language_model).adapter.frozen_copy()
    name = next(name for name in adapter.pairs if layer in name)
    adapter.pairs[name].b.data[0] = value
    return adapter


def let_in(adapter: Adapter) -> Adapter:
    """Bypass the sampler's check, so that non-finite values get into its batch."""
    adapter.__dict__["is_finite"] = True
    return adapter


def outcomes(sampler: Any, arrivals: list[tuple[int, str, Any, Adapter | None]]) -> dict[str, Any]:
    """The result or error of each job; jobs are added before the step they name."""
    found: dict[str, Any] = {}
    waiting, step = list(arrivals), 0
    while waiting or sampler.busy:
        for _, job_id, made, adapter in [each for each in waiting if each[0] <= step]:
            sampler.add(job_id, made, adapter)
        waiting = [each for each in waiting if each[0] > step]
        for event in sampler.step():
            found[event.job_id] = event.result if event.error is None else event.error
        step += 1
    return found


def exact(result: SampledResult) -> list[bytes]:
    arrays = [*result.tokens, *result.logprobs]
    if result.prompt_logprobs_T is not None:
        arrays.append(result.prompt_logprobs_T)
    return [array.tobytes() for array in arrays]


@dataclass(frozen=True)
class Arrival:
    step: int
    length: int
    samples: int
    tokens: int
    temperature: float
    scored: bool
    kind: str  # weights to sample from: base, finite, or bad

    def job(self, seed: int) -> Any:
        return job(
            prompt_T=PROMPT[: self.length],
            num_samples=self.samples,
            # A bad sequence fails at its first token, so its finite substitute ends after one token too.
            max_tokens=1 if self.kind == "bad" else self.tokens,
            temperature=self.temperature,
            prompt_logprobs=self.scored,
            seed=seed,
        )


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 6),
        length=st.integers(1, 19),
        samples=st.integers(1, 3),
        tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        scored=st.booleans(),
        kind=st.sampled_from(["base", "finite", "bad"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60)
@given(
    arrivals=ARRIVALS,
    value=st.sampled_from([*BAD_VALUES, HUGE, -HUGE]),
    layer=st.sampled_from(["q_proj", "k_proj", "v_proj", "down_proj", "lm_head", "layers.1."]),
)
def test_non_finite_adapters_leave_every_other_sequence_bit_identical(
    shared: LanguageModel, arrivals: list[Arrival], value: float, layer: str
) -> None:
    finite, stand_in = trained(shared).adapter, trained(shared).adapter.frozen_copy()

    def run(bad: Adapter) -> dict[str, Any]:
        adapters = {"base": None, "finite": finite, "bad": bad}
        return outcomes(
            sampler_of(shared),
            [
                (each.step, f"{each.kind}{index}", each.job(index), adapters[each.kind])
                for index, each in enumerate(arrivals)
            ],
        )

    mixed, alone = run(let_in(spoiled(shared, value, layer))), run(stand_in)
    assert mixed.keys() == alone.keys()
    for job_id, outcome in mixed.items():
        if job_id.startswith("bad"):
            # A non-finite value may happen not to affect the first token.
            assert isinstance(outcome, RequestFailedError) or np.isfinite(outcome.logprobs).all()
        else:
            assert exact(outcome) == exact(alone[job_id])


@pytest.mark.parametrize("value", [*BAD_VALUES, HUGE])
def test_reused_slot_of_non_finite_sequence_does_not_reach_the_next_one(shared, value):
    """The long sequence keeps the cache alive; the short ones reuse the slot of the bad one."""

    def run(adapter: Adapter) -> dict[str, Any]:
        return outcomes(
            sampler_of(shared),
            [
                (0, "first", job(temperature=0.0, max_tokens=30), None),
                (1, "bad", job(max_tokens=1), adapter),
                (3, "next", job(prompt_T=PROMPT[:3], temperature=0.0), None),
            ],
        )

    mixed = run(let_in(spoiled(shared, value, "down_proj")))
    alone = run(trained(shared).adapter.frozen_copy())
    assert isinstance(mixed["bad"], RequestFailedError)
    assert exact(mixed["first"]) == exact(alone["first"])
    assert exact(mixed["next"]) == exact(alone["next"])
    assert np.isfinite(mixed["next"].logprobs[0]).all()


@settings(max_examples=40)
@given(arrivals=ARRIVALS, page=st.sampled_from([1, 2, 5, 32]))
def test_cache_is_zero_beyond_the_length_of_every_sequence(
    shared: LanguageModel, arrivals: list[Arrival], page: int
) -> None:
    """Holds for any order of prompts, forks, draws and departures; page 0 stays zero too."""
    bad = let_in(spoiled(shared, math.nan))
    sampler = sampler_of(shared, page_tokens=page, prefill_tokens=7)
    waiting, step = list(enumerate(arrivals)), 0
    while waiting or sampler.busy:
        for index, each in [one for one in waiting if one[1].step <= step]:
            sampler.add(str(index), each.job(index), bad if each.kind == "bad" else None)
        waiting = [one for one in waiting if one[1].step > step]
        sampler.step()
        step += 1
        decoder = sampler._runner.decoder
        assert isinstance(decoder, LeanDecoder)
        for layer in decoder.cache._layers:
            assert not layer[:, :, :1].any()
            for one in sampler._scheduler._batch:
                last = one.pages[one.length // page] if one.length % page else 0
                assert not layer[:, :, last, one.length % page :].any()


@pytest.mark.parametrize("value", BAD_VALUES)
def test_non_finite_adapter_is_refused_with_the_cause(shared, value):
    with pytest.raises(RequestFailedError, match=r"finite logits.*learning rate") as caught:
        sampler_of(shared).add("a", job(), spoiled(shared, value))
    assert caught.value.category is RequestErrorCategory.User


def test_adapter_that_overflows_fails_its_request_with_the_cause(shared):
    bad = spoiled(shared, HUGE, "down_proj")
    failed = outcomes(sampler_of(shared), [(0, "a", job(), bad)])["a"]
    assert failed.category is RequestErrorCategory.User
    assert "finite logits" in str(failed)


def test_prompt_scoring_that_overflows_fails(shared):
    scored = job(max_tokens=0, prompt_logprobs=True)
    bad = spoiled(shared, HUGE, "down_proj")
    failed = outcomes(sampler_of(shared), [(0, "a", scored, bad)])["a"]
    assert isinstance(failed, RequestFailedError)


def test_all_samples_of_a_failed_request_leave_the_batch(shared):
    sampler = sampler_of(shared, max_sequences=3)
    many = job(num_samples=8)
    arrivals = [(0, "bad", many, spoiled(shared, HUGE, "down_proj")), (0, "good", job(), None)]
    found = outcomes(sampler, arrivals)
    assert isinstance(found["bad"], RequestFailedError)
    assert len(found["good"].tokens[0]) == 12
    assert sampler.depth == (0, 0)


def test_plain_decoder_keeps_non_finite_sequences_apart(shared):
    def run(adapter: Adapter) -> dict[str, Any]:
        sampler = sampler_of(shared)
        sampler._runner.decoder = PlainDecoder(shared, 32)
        sampler._scheduler._share_prefixes = False
        return outcomes(
            sampler, [(0, "a", job(max_tokens=1), adapter), (0, "b", job(seed=1), None)]
        )

    mixed = run(spoiled(shared, HUGE, "down_proj"))
    alone = run(trained(shared).adapter.frozen_copy())
    assert isinstance(mixed["a"], RequestFailedError)
    assert exact(mixed["b"]) == exact(alone["b"])


def test_training_after_a_far_too_large_step_does_not_crash(shared):
    """The results are not finite, but the request does not fail."""
    model = trained(shared)
    request = PassJob(examples(), "cross_entropy")
    finish(run_pass(model, request, 512))
    model.optimizer.step(AdamStep(learning_rate=1e30))
    after = finish(run_pass(model, request, 512))
    assert not math.isfinite(after.metrics["loss:sum"])
    assert not math.isfinite(model.optimizer.step(AdamStep())["grad_norm"])
