"""Samples over many adapters on Ray, while adapters are trained, saved and dropped, are those of a single engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ray.inside.clusters import Machines
from tests.server.test_vllm import expected as drawn_by_stand_in
from tests.server.test_vllm import python as python  # a fixture
from tinkex.testing import service
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

ADAPTERS = 12


def data(number: int) -> list[Datum]:
    drawn = np.random.default_rng(number)
    tokens = drawn.integers(0, 256, 40)
    return [Datum(ModelInput.from_ints(tokens[:-1].tolist()), {"target_tokens": tokens[1:]})]


def drawn(client, count: int) -> list[list[list[int]]]:
    """`count` samples over the adapters, in rounds; between rounds each adapter is trained and saved again."""
    models = [
        client.create_lora_training_client("tinkex/tiny", rank=4, seed=number)
        for number in range(ADAPTERS)
    ]
    samples = []
    rounds = max(2, count // (ADAPTERS * 10))
    for turn in range(rounds):
        learning = []
        for number, model in enumerate(models):
            learning.append(model.forward_backward(data(number), "cross_entropy"))
            learning.append(model.optim_step(AdamParams(learning_rate=3e-2)))
        samplers = [model.save_weights_and_get_sampling_client() for model in models]
        # These train on while the samples are drawn.
        beside = [model.forward_backward(data(99), "cross_entropy") for model in models]
        waiting = [
            samplers[number].sample(
                ModelInput.from_ints([1, 2, 3 + number]),
                1,
                SamplingParams(max_tokens=8, seed=1000 * turn + each),
            )
            for each in range(count // (ADAPTERS * rounds))
            for number in range(ADAPTERS)
        ]
        samples.append([list(each.result().sequences[0].tokens) for each in waiting])
        for each in [*learning, *beside]:
            each.result()
        del samplers
    return samples


@pytest.fixture(scope="module")
def count(request):
    return 1200 if request.config.getoption("--long") else 240


def test_every_sample_is_that_of_its_own_adapter(count):
    with service("torch", dtype="float32") as running:
        expected = drawn(running.client(), count)
    with (
        Machines.running(2) as machines,
        service("torch", dtype="float32", ray=machines.address, engines=2) as running,
    ):
        found = drawn(running.client(), count)
    assert found == expected
    assert len({tuple(sample) for turn in found for sample in turn}) > ADAPTERS


def test_vllm_beside_the_cluster_draws_from_adapters_that_its_engines_trained(python, tmp_path):
    """With the stand-in for vLLM; engines of the cluster draw what vLLM would give another meaning."""
    sampling = {"sampler": "vllm", "sampler_python": python}
    with (
        Machines.running(2) as machines,
        service(
            "torch",
            data_dir=tmp_path,
            dtype="float32",
            ray=machines.address,
            engines=2,
            **sampling,
        ) as running,
    ):
        client = running.client()
        for number in range(3):
            model = client.create_lora_training_client("tinkex/tiny", rank=4, seed=number)
            model.forward_backward(data(number), "cross_entropy").result()
            model.optim_step(AdamParams(learning_rate=3e-2)).result()
            path = model.save_weights_for_sampler(f"saved-{number}").result().path
            sampler = client.create_sampling_client(model_path=path)
            params = SamplingParams(max_tokens=4, seed=number)
            found = sampler.sample(ModelInput.from_ints([5, 6]), 1, params).result()
            own = drawn_by_stand_in(running.data_dir, path, [5, 6], number, 4)
            assert list(found.sequences[0].tokens) == own
            penalized = SamplingParams(max_tokens=4, seed=number, presence_penalty=0.5)
            other = sampler.sample(ModelInput.from_ints([5, 6]), 1, penalized).result()
            assert list(other.sequences[0].tokens) != own
        kinds = [each.kind for each in client.health().engines or []]
        assert sorted(kinds) == ["torch", "torch", "vllm"]
