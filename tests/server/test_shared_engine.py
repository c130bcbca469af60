"""Two keys on one real engine: no request of one key makes requests of the other fail."""

from __future__ import annotations

import json

import pytest

from tinkex.server.auth import Keys
from tinkex.testing import service

from .api import Api


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two keys of one service with a real model."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ann: tml-key-of-ann\nbob: tml-key-of-bob\n")
    with (
        service("torch", keys=Keys.from_file(file), hold=1.0) as running,
        Api(running.url, "tml-key-of-ann") as ann,
        Api(running.url, "tml-key-of-bob") as bob,
    ):
        yield ann, bob


def test_diverged_run_of_one_key_does_not_change_samples_of_another(two):
    ann, bob = two
    sampler = bob.sampler()
    before = sampler.sample(prompt=range(5, 15), max_tokens=20, temperature=0.0)
    model = ann.model()
    model.step()
    ann.retrieve(model.forward_backward())
    ann.retrieve(model.optim_step(1e30))
    # Its owner still gets results.
    assert ann.retrieve(model.forward_backward())["metrics"]["loss:sum"] == "NaN"
    assert "grad_norm" in ann.retrieve(model.optim_step())["metrics"]
    weights = model.save("diverged", "save_weights_for_sampler")
    diverged = ann.sampler(model.session_id, model_path=weights)
    # Bob's long sample stays in the batch while Ann's samples start and finish.
    long = sampler.send(prompt=range(5, 105), max_tokens=300, temperature=0.0)
    failed = [diverged.sample(prompt=range(5, 60), num_samples=4) for _ in range(3)]
    after = sampler.sample(prompt=range(5, 15), max_tokens=20, temperature=0.0)
    assert all(answer["category"] == "user" for answer in failed)
    assert all("learning rate" in answer["error"] for answer in failed)
    (first,), (second,) = before["sequences"], after["sequences"]
    assert second["tokens"] == first["tokens"]
    # The batch has another shape, so the last bits may differ.
    assert second["logprobs"] == pytest.approx(first["logprobs"], abs=1e-4)
    assert None not in bob.retrieve(long)["sequences"][0]["logprobs"]


def loss_body(session_id, nodes, number=0):
    logprobs = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    return {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "loss",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": [logprobs, *nodes]},
        "type": "create_custom_loss",
    }


def node(op, name, target, *args):
    return {"op": op, "name": name, "target": target, "args": list(args)}


TOTAL = [
    node("call_method", "total", "sum", {"ref": "logprobs"}),
    node("output", "output", "output", {"ref": "total"}),
]


@pytest.mark.parametrize("depth", [9, 200, 900])
def test_loss_with_deep_arguments_is_refused_at_once(two, depth):
    ann, _ = two
    nested = "[" * depth + "1" + "]" * depth
    body = json.dumps(
        loss_body(ann.session(), [node("call_function", "x", "torch.exp", 0), *TOTAL])
    )
    body = body.replace('"args": [0]', f'"args": [{nested}]')
    answer = ann.post(
        "create_custom_loss", body.encode(), headers={"content-type": "application/json"}
    )
    assert 400 <= answer.status_code < 500
    assert answer.json()["category"] == "user"


@pytest.mark.heavy
def test_a_loss_that_exhausts_memory_fails_alone(two):
    ann, bob = two
    model, others = ann.model(), bob.model()
    nodes = [node("call_function", "x0", "operator.getitem", [1, 2], 0)]
    for level in range(1, 60):
        held = [[{"ref": f"x{level - 1}"}] * 2]
        nodes.append(node("call_function", f"x{level}", "operator.getitem", held, 0))
    nodes.append(node("call_function", "same", "operator.eq", {"ref": "x59"}, {"ref": "x59"}))
    made = ann.retrieve(
        ann.told("create_custom_loss", loss_body(model.session_id, [*nodes, *TOTAL]))
    )
    config = {"loss_id": made["loss_id"]}
    failed = ann.retrieve(model.forward_backward(loss_fn="custom", loss_fn_config=config))
    assert failed["category"] == "user"
    assert "makes a list" in failed["error"]
    assert others.step() > 0
    assert model.step() > 0
