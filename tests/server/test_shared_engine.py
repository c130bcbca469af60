"""Users of one real engine: what one of them does to it, by mistake or on purpose, fails nobody else's requests."""

from __future__ import annotations

import pytest

from tinkex.server.auth import Keys
from tinkex.testing import service

from .api import Api


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two users of one service that really trains."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    with (
        service("torch", keys=Keys.from_file(file), hold=1.0) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        yield ann, bob


def test_diverged_run_of_one_key_leaves_samples_of_another_unchanged(two):
    ann, bob = two
    sampler = bob.sampler()
    before = sampler.sample(prompt=range(5, 15), max_tokens=20, temperature=0.0)
    model = ann.model()
    model.step()
    ann.retrieve(model.forward_backward())
    ann.retrieve(model.optim_step(1e30))
    weights = model.save("diverged", "save_weights_for_sampler")
    diverged = ann.sampler(model.session_id, model_path=weights)
    # Bob's long sample keeps the batch going while Ann's come and go.
    long = sampler.send(prompt=range(5, 105), max_tokens=300, temperature=0.0)
    failed = [diverged.sample(prompt=range(5, 60), num_samples=4) for _ in range(3)]
    after = sampler.sample(prompt=range(5, 15), max_tokens=20, temperature=0.0)
    assert all(answer["category"] == "user" for answer in failed)
    assert all("learning rate" in answer["error"] for answer in failed)
    (first,), (second,) = before["sequences"], after["sequences"]
    assert second["tokens"] == first["tokens"]
    # The batch has another shape, so the last bit may differ.
    assert second["logprobs"] == pytest.approx(first["logprobs"], abs=1e-4)
    assert None not in bob.retrieve(long)["sequences"][0]["logprobs"]
