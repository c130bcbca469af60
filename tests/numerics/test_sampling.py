"""The sampler, compared with the trainer and with transformers' `generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine.sampler import Sampler
from tinkex.engine.trainer import TrainedModel, run_pass
from tinkex.engine.values import Example, PassJob, SampleJob
from tinkex.errors import InvalidInputError

from ..running import finish
from .test_training import trained

PROMPT = np.frombuffer(b"The quick brown fox", np.uint8).astype(np.int32)


def sampler_of(language_model, **options):
    return Sampler(
        language_model,
        end_tokens=(257,),
        detokenize=lambda ids: bytes(id_ for id_ in ids if id_ < 256).decode("utf-8", "replace"),
        **options,
    )


def run(sampler, jobs, adapter=None):
    """Run jobs and return their results by job id; a job may have its own adapter."""
    for job_id, job in jobs.items():
        job, own = job if isinstance(job, tuple) else (job, adapter)
        sampler.add(job_id, job, own)
    results = {}
    while sampler.busy:
        for event in sampler.step():
            if event.result is not None:
                results[event.job_id] = event.result
    return results


def job(**options: Any) -> SampleJob:
    given: dict[str, Any] = {
        "sampler_id": "s",
        "prompt_T": PROMPT,
        "max_tokens": 12,
        "stop_tokens": (),
        **options,
    }
    return SampleJob(**given)


def test_greedy_equals_generate(language_model):
    expected = language_model.model.generate(
        torch.tensor(PROMPT.astype(np.int64))[None],
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :]
    result = run(sampler_of(language_model), {"a": job(temperature=0.0)})["a"]
    assert result.tokens[0].tolist() == expected.tolist()


@pytest.mark.parametrize("adapted", [False, True])
def test_sampled_and_prompt_logprobs_equal_the_trainer(language_model, adapted):
    model = trained(language_model)
    adapter = model.adapter.frozen_copy() if adapted else None
    sampler = sampler_of(language_model)
    result = run(sampler, {"a": job(seed=3, prompt_logprobs=True)}, adapter)["a"]
    whole = np.concatenate([PROMPT, result.tokens[0]])
    if not adapted:
        for pair in model.adapter.pairs.values():
            pair.b.data.zero_()
    example = Example(whole[:-1], {"target_tokens": whole[1:].astype(np.int64)})
    logprobs = finish(
        run_pass(
            TrainedModel(language_model, model.adapter),
            PassJob([example], "cross_entropy", backward=False),
            999,
        )
    ).logprobs[0]
    np.testing.assert_allclose(result.logprobs[0], logprobs[len(PROMPT) - 1 :], atol=1e-4)
    np.testing.assert_allclose(result.prompt_logprobs_T[1:], logprobs[: len(PROMPT) - 1], atol=1e-4)
    assert np.isnan(result.prompt_logprobs_T[0])


def test_seed_repeats_in_any_batch_and_samples_of_one_job_differ(language_model):
    adapter = trained(language_model).adapter
    alone = run(sampler_of(language_model), {"a": job(seed=7, num_samples=3)})["a"]
    crowd = {
        f"other{index}": (job(seed=index, prompt_T=PROMPT[: 3 + index]), adapter)
        for index in range(5)
    }
    together = run(sampler_of(language_model), {**crowd, "a": job(seed=7, num_samples=3)})["a"]
    assert [tokens.tolist() for tokens in alone.tokens] == [
        tokens.tolist() for tokens in together.tokens
    ]
    assert len({tuple(tokens) for tokens in alone.tokens}) == 3


@pytest.mark.parametrize("seed", [-1, -7, 2**63, 2**64 - 1])
def test_large_and_negative_seeds_differ_from_their_neighbours(language_model, seed):
    first, again, neighbour = (
        run(sampler_of(language_model), {"a": job(seed=chosen, num_samples=2)})["a"]
        for chosen in (seed, seed, seed - 1)
    )
    assert [tokens.tolist() for tokens in again.tokens] == [
        tokens.tolist() for tokens in first.tokens
    ]
    for index in range(2):
        assert neighbour.tokens[index].tolist() != first.tokens[index].tolist()


def test_adapters_and_the_base_model_share_a_batch(language_model):
    first, second = (
        trained(language_model).adapter,
        trained(language_model, train_mlp=False).adapter,
    )
    jobs = {
        "base": job(temperature=0.0),
        "first": (job(temperature=0.0), first),
        "second": (job(temperature=0.0, prompt_T=PROMPT[:5]), second),
    }
    together = run(sampler_of(language_model), jobs)
    for name, one in jobs.items():
        apart = run(sampler_of(language_model), {name: one})[name]
        assert together[name].tokens[0].tolist() == apart.tokens[0].tolist()
    assert together["base"].tokens[0].tolist() != together["first"].tokens[0].tolist()


def test_logprobs_are_those_of_the_scaled_distribution(language_model):
    plain = run(
        sampler_of(language_model), {"a": job(seed=1, max_tokens=1, topk_sample_logprobs=264)}
    )["a"]
    hot = run(
        sampler_of(language_model),
        {"a": job(seed=1, max_tokens=1, temperature=2.0, topk_sample_logprobs=264)},
    )["a"]
    ids, values = plain.topk_sampled[0]
    logits = np.empty(264)
    logits[ids[0]] = values[0]
    scaled = logits / 2 - np.log(np.exp(logits / 2).sum())
    hot_ids, hot_values = hot.topk_sampled[0]
    np.testing.assert_allclose(hot_values[0], scaled[hot_ids[0]], atol=1e-5)


def test_draws_follow_the_distribution(language_model):
    many = run(
        sampler_of(language_model, max_sequences=512),
        {
            "a": job(
                seed=5,
                max_tokens=1,
                num_samples=500,
                topk_prompt_logprobs=0,
                topk_sample_logprobs=264,
            )
        },
    )["a"]
    ids, values = many.topk_sampled[0]
    expected = np.zeros(264)
    expected[ids[0]] = np.exp(values[0])
    counts = np.bincount([int(tokens[0]) for tokens in many.tokens], minlength=264)
    # The total variation of 500 fair draws over 264 values stays well below this limit.
    assert 0.5 * np.abs(counts / 500 - expected).sum() < 0.35


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(language_model):
    greedy = run(sampler_of(language_model), {"a": job(temperature=0.0)})["a"].tokens[0].tolist()
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        assert (
            run(sampler_of(language_model), {"a": job(seed=1, **options)})["a"].tokens[0].tolist()
            == greedy
        )


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-39, 1e-46, 5e-324])
def test_very_low_temperature_is_greedy(language_model, temperature):
    greedy = run(sampler_of(language_model), {"a": job(temperature=0.0)})["a"].tokens[0].tolist()
    cold = run(
        sampler_of(language_model),
        {"a": job(seed=1, temperature=temperature, topk_sample_logprobs=264)},
    )["a"]
    assert cold.tokens[0].tolist() == greedy
    assert cold.logprobs[0].tolist() == [0.0] * len(greedy)
    assert np.isfinite(cold.topk_sampled[0][1]).all()


def test_zero_tokens_to_draw_give_empty_alternatives(language_model):
    empty = run(
        sampler_of(language_model),
        {"a": job(max_tokens=0, topk_sample_logprobs=5, num_samples=2)},
    )["a"]
    assert [tokens.shape for tokens in empty.tokens] == [(0,), (0,)]
    assert [[part.shape for part in parts] for parts in empty.topk_sampled] == [[(0, 5)] * 2] * 2
    assert empty.stop_reasons == ["length", "length"]


def test_stop_tokens_and_strings_end_a_sample_and_are_included(language_model):
    greedy = run(sampler_of(language_model), {"a": job(temperature=0.0)})["a"].tokens[0].tolist()
    stopped = run(
        sampler_of(language_model), {"a": job(temperature=0.0, stop_tokens=(greedy[4],))}
    )["a"]
    cut = greedy.index(greedy[4])
    assert stopped.tokens[0].tolist() == greedy[: cut + 1]
    assert stopped.stop_reasons == ["stop"]
    free = run(sampler_of(language_model), {"a": job(temperature=0.0)})["a"]
    assert free.stop_reasons == ["length"]


def test_prompt_logprobs_can_be_limited_to_the_last_tokens_and_given_for_targets(language_model):
    targets = np.tile(np.arange(4), (len(PROMPT) - 1, 1)).astype(np.int64)
    targets[0, 0] = -1
    result = run(
        sampler_of(language_model),
        {
            "a": job(prompt_logprobs=True, prompt_logprobs_last_n=3, topk_prompt_logprobs=2),
            "b": job(target_prompt_tokens=targets),
        },
    )
    scored = result["a"].prompt_logprobs_T
    assert np.isnan(scored[:-3]).all()
    assert np.isfinite(scored[-3:]).all()
    assert result["a"].topk_prompt[0].shape == (len(PROMPT), 2)
    assert result["b"].target_prompt_logprobs[0, 0] == 0.0
    assert (result["b"].target_prompt_logprobs[1:] < 0).all()


def test_prompts_that_cannot_be_sampled_from_are_refused(language_model):
    sampler = sampler_of(language_model)
    for prompt in (np.zeros(0, np.int32), np.array([9999], np.int32), np.zeros(4096, np.int32)):
        with pytest.raises(InvalidInputError) as caught:
            sampler.add("a", job(prompt_T=prompt), None)
        assert caught.value.field == "prompt"


def test_stop_strings_without_a_readable_tokenizer_are_refused(language_model):
    def unreadable(_):
        raise OSError("tokenizer.json is gone")

    for detokenize, message in ((None, "need a tokenizer"), (unreadable, "is gone")):
        sampler = Sampler(language_model, end_tokens=(), detokenize=detokenize)
        with pytest.raises((InvalidInputError, OSError), match=message):
            sampler.add("a", job(stop_texts=("x",)), None)
        assert not sampler.busy


def prepared(language_model):
    """Number of adapters that the model holds prepared tensors for."""
    return {
        len(projection._frozen)
        for layer in language_model.llama.layers
        for projection in layer.projections
    }


def test_adapter_is_dropped_after_its_last_sample(language_model):
    adapter = trained(language_model, train_mlp=False).adapter.frozen_copy()
    expected = run(sampler_of(language_model), {"a": job(seed=1)}, adapter)["a"]
    sampler = sampler_of(language_model)
    sampler.add("a", job(seed=1), adapter)
    sampler.add("b", job(seed=2, max_tokens=3), None)
    sampler.step()
    sampler.forget(adapter)
    assert prepared(language_model) == {1}
    results = run(sampler, {})
    assert results["a"].tokens[0].tolist() == expected.tokens[0].tolist()
    assert prepared(language_model) == {0}
    sampler.add("gone", job(), adapter)
    sampler.forget(adapter)
    sampler.cancel("gone")
    assert not sampler._closed


def test_step_reads_a_limited_number_of_prompt_tokens(language_model):
    sampler = sampler_of(language_model, prefill_tokens=100)
    long, short = np.resize(PROMPT, 250).astype(np.int32), [PROMPT[: 2 + n] for n in range(16)]
    sampler.add("long", job(prompt_T=long, temperature=0.0), None)
    for number, prompt in enumerate(short):
        sampler.add(f"short{number}", job(prompt_T=prompt, temperature=0.0, max_tokens=30), None)
    sampler.step()
    assert sampler.depth == (16, 1)  # the long prompt takes three steps
    sampler.step()
    assert sampler.depth == (16, 1)
    sampler.step()
    assert sampler.depth[1] > 8  # its last 50 tokens leave room for others
    results = run(sampler, {})
    for name, prompt in {"long": long, "short7": short[7]}.items():
        count = len(results[name].tokens[0])
        expected = job(prompt_T=prompt, temperature=0.0, max_tokens=count)
        alone = run(sampler_of(language_model), {"a": expected})["a"]
        assert results[name].tokens[0].tolist() == alone.tokens[0].tolist()


def test_running_samples_draw_while_a_long_prompt_is_read(language_model):
    sampler = sampler_of(language_model, prefill_tokens=50)
    sampler.add("running", job(stream=True, max_tokens=20), None)
    sampler.step()
    sampler.add("long", job(prompt_T=np.resize(PROMPT, 500).astype(np.int32)), None)
    for _ in range(9):
        assert [event.job_id for event in sampler.step()] == ["running"]


def test_sequences_can_leave_after_the_cache_has_grown(language_model):
    limits = (70, 100, 90, 140)
    jobs = {str(limit): job(seed=limit, max_tokens=limit) for limit in limits}
    together = run(sampler_of(language_model), jobs)
    for name, one in jobs.items():
        alone = run(sampler_of(language_model), {name: one})[name]
        assert together[name].tokens[0].tolist() == alone.tokens[0].tolist()
        assert len(alone.tokens[0]) == int(name)


def test_cancelled_job_does_not_affect_others(language_model):
    sampler = sampler_of(language_model)
    sampler.add("gone", job(seed=1), None)
    sampler.add("stays", job(temperature=0.0), None)
    sampler.step()
    sampler.cancel("gone")
    results = run(sampler, {})
    assert list(results) == ["stays"]
    alone = run(sampler_of(language_model), {"a": job(temperature=0.0)})["a"]
    assert results["stays"].tokens[0].tolist() == alone.tokens[0].tolist()
