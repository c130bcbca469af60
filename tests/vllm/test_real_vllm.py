"""The real vLLM behind the service; `make vllm` makes its environment, which takes minutes.

Compared with our own engine on the same weights: prompt logprobs, greedy tokens, and that every adapter is its own.
"""

from __future__ import annotations

import os
import select
import signal

import numpy as np
import pytest

from tinkex.testing import service
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

from ..cancelling import cancelled_in
from ..many_adapters import PER_MOMENT, sampled_while_training
from ..processes import command
from ..server.test_vllm import group, open_pidfd, vllm_pids

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTERS, MOMENTS = 12, 21


@pytest.fixture(scope="module")
def client(python):
    with service(
        "torch", (SMOL,), sampler="vllm", sampler_python=python, vllm_eager=True, dtype="float32"
    ) as running:
        yield running.client()


@pytest.fixture(scope="module")
def trained(client):
    """A model at four moments: its logprobs, greedy continuations of its own engine, and its sampler."""
    tokens = np.random.default_rng(0).integers(100, 30_000, 24).tolist()
    data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": np.array(tokens[1:])})]
    training = client.create_lora_training_client(SMOL, rank=8, seed=1)
    moments = []
    for _ in range(4):
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(AdamParams(learning_rate=3e-3)).result()
        scores = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        moments.append((scores.to_numpy(), training.save_weights_and_get_sampling_client()))
    return tokens, moments


def test_prompt_logprobs_are_the_trainers_for_every_adapter(trained):
    tokens, moments = trained
    for scores, sampler in moments:
        found = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
        assert np.array(found[1:], float) == pytest.approx(scores, abs=1e-3)


def test_samples_repeat_with_their_seed_and_differ_between_adapters(trained):
    tokens, moments = trained
    prompt = ModelInput.from_ints(tokens[:10])
    seen = set()
    for _, sampler in moments:
        params = SamplingParams(max_tokens=8, seed=7)
        first = sampler.sample(prompt, 1, params).result().sequences[0]
        again = sampler.sample(prompt, 1, params).result().sequences[0]
        assert first.tokens == again.tokens
        seen.add(tuple(first.tokens))
    assert len(seen) > 1


def test_logprobs_of_samples_are_those_of_the_trainer(trained):
    tokens, moments = trained
    prompt = ModelInput.from_ints(tokens[:10])
    for _, sampler in moments:
        drawn = sampler.sample(prompt, 1, SamplingParams(max_tokens=8, seed=3)).result()
        sequence = drawn.sequences[0]
        whole = ModelInput.from_ints([*tokens[:10], *sequence.tokens])
        scores = sampler.compute_logprobs(whole).result()[10:]
        assert sequence.logprobs == pytest.approx(scores, abs=1e-3)


def test_every_sample_is_of_its_own_adapter(python, small, tmp_path):
    """1,008 samples of 12 adapters, which share 8 slots, while they are trained; our own engine scores what each drew."""
    model, settings = f"small={small}", {"data_dir": tmp_path, "dtype": "float32"}
    vllm = {"sampler": "vllm", "sampler_python": python, "vllm_eager": True}
    with service("torch", (model,), **vllm, **settings) as running:
        found = sampled_while_training(running.client(), "small", ADAPTERS, MOMENTS)
    assert len(found) == ADAPTERS * MOMENTS * PER_MOMENT
    with service("torch", (model,), **settings) as running:
        client = running.client()
        samplers = {
            path: client.create_sampling_client(model_path=path)
            for path in sorted({asked.kept for asked, _ in found})
        }
        another = dict(zip(samplers, [*list(samplers)[1:], *list(samplers)[:1]], strict=True))
        scored = []
        for asked, sequence in found:
            whole = ModelInput.from_ints([*asked.prompt, *sequence.tokens])
            own = samplers[asked.kept].compute_logprobs(whole)
            scored.append((own, samplers[another[asked.kept]].compute_logprobs(whole)))
        apart = 0
        for (asked, sequence), (own, other) in zip(found, scored, strict=True):
            start = len(asked.prompt)
            assert sequence.logprobs == pytest.approx(own.result()[start:], abs=1e-3), asked
            apart += sequence.logprobs != pytest.approx(other.result()[start:], abs=1e-3)
        assert apart > 0.9 * len(found)


def test_cancelled_sample_leaves_vllm(python, small):
    assert cancelled_in(python, small) == "3 1 2"


def test_vllm_is_started_again_when_one_of_its_processes_is_killed(python, small, tmp_path):
    """While it is idle: vLLM notices only at the next request, and may then wait for ever."""
    model, settings = f"small={small}", {"data_dir": tmp_path, "dtype": "float32"}
    vllm = {"sampler": "vllm", "sampler_python": python, "vllm_eager": True}
    others = set(vllm_pids())  # of services that other tests keep
    with service("torch", (model,), **vllm, **settings) as running:
        client = running.client()
        training = client.create_lora_training_client("small", rank=4, seed=1)
        sampler = training.save_weights_and_get_sampling_client()
        prompt, params = ModelInput.from_ints([5, 6, 7]), SamplingParams(max_tokens=4, seed=3)
        before = sampler.sample(prompt, 1, params).result().sequences[0].tokens
        (leader,) = set(vllm_pids()) - others
        (core,) = [pid for pid in group(leader) if b"EngineCore" in command(pid)]
        with open_pidfd(leader) as ended:
            os.kill(core, signal.SIGKILL)
            assert select.select([ended], [], [], 60)[0]
        assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == before
        assert {each.name: each.restarts for each in client.health().engines or []}["vllm"] == 1
