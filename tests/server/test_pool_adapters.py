"""Samples of many adapters on a pool, while adapters are trained, saved, opened again and deleted: each is its own.

Every answer is compared with the one of a single engine that reads the same checkpoint. `--long` takes 12 adapters and
1,000 samples.
"""

from __future__ import annotations

import pytest

from tinkex.testing import service

from ..many_adapters import PER_MOMENT, sampled_while_training


@pytest.fixture(scope="module")
def amount(request) -> tuple[int, int]:
    """Adapters, and moments at which each is sampled."""
    return (12, 21) if request.config.getoption("--long") else (3, 3)


@pytest.mark.heavy
def test_every_sample_is_of_its_own_adapter(amount, tmp_path):
    with service("torch", data_dir=tmp_path, engines=2) as running:
        found = sampled_while_training(running.client(), "tinkex/tiny", *amount)
    assert len(found) == amount[0] * amount[1] * PER_MOMENT
    with service("torch", data_dir=tmp_path) as running:
        client = running.client()
        samplers = {
            path: client.create_sampling_client(model_path=path)
            for path in sorted({asked.kept for asked, _ in found})
        }
        another = dict(zip(samplers, [*list(samplers)[1:], *list(samplers)[:1]], strict=True))
        expected = [asked.ask(samplers[asked.kept]) for asked, _ in found]
        others = [asked.ask(samplers[another[asked.kept]]) for asked, _ in found]
        apart = 0
        for (asked, sequence), own, other in zip(found, expected, others, strict=True):
            alone = own.result().sequences[0]
            assert sequence.tokens == alone.tokens, asked
            assert sequence.logprobs == pytest.approx(alone.logprobs, abs=1e-4), asked
            apart += sequence.logprobs != pytest.approx(
                other.result().sequences[0].logprobs, abs=1e-3
            )
        assert apart > 0.9 * len(found)
    assert len({tuple(sequence.tokens) for _, sequence in found}) > len(found) / 2
