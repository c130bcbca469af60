"""Samples over many adapters on Ray, while adapters are trained, saved and dropped, are those of a single engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ray.inside.clusters import Machines
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
