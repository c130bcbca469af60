"""Losses that clients trace and the engine runs: same numbers as run by the client, and nothing but arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tinkex
from tinkex.engine.traced import TracedLoss
from tinkex.engine.values import TracedGraph


def clipped(logprobs, advantages, old):
    ratio = torch.exp(logprobs - old)
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -terms.sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/positions:sum": (ratio > 0).sum(),
    }


RANKS = {"logprobs": 1, "advantages": 1, "old": 1}


def data(count=3):
    random = np.random.default_rng(0)
    made = []
    for index in range(count):
        row = random.integers(0, 256, 8 + 3 * index)
        length = len(row) - 1
        made.append(
            tinkex.Datum(
                model_input=tinkex.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": row[1:],
                    "advantages": random.standard_normal(length).astype(np.float32),
                    "old": np.full(length, -5.0, np.float32),
                },
            )
        )
    return made


def stepped(client, loss):
    training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=3)
    results = []
    for _ in range(4):
        results.append(training.forward_backward_custom(data(), loss).result().metrics)
        training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
    final = training.forward(data(), "cross_entropy").result()
    return results, [output["logprobs"].to_numpy() for output in final.loss_fn_outputs]


def test_a_traced_loss_trains_at_the_service_as_it_does_in_the_client(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(clipped, RANKS).result()
    assert handle.loss_id is not None
    at_service, final = stepped(client, handle)

    def here(data, logprobs):
        losses, ratios = [], []
        for datum, logp in zip(data, logprobs, strict=True):
            inputs = [datum.loss_fn_inputs[name].to_torch() for name in ("advantages", "old")]
            value, metrics = clipped(logp, *inputs)
            losses.append(value)
            ratios.append(metrics["custom/ratio:mean"].item())
        return sum(losses), {"custom/ratio:mean": sum(ratios) / len(ratios)}

    in_client, expected = stepped(client, here)
    for ours, theirs in zip(at_service, in_client, strict=True):
        assert ours["loss:sum"] == pytest.approx(theirs["loss:sum"], abs=1e-4)
        assert ours["custom/ratio:mean"] == pytest.approx(theirs["custom/ratio:mean"], rel=1e-4)
        assert ours["custom/positions:sum"] == sum(len(d.loss_fn_inputs["old"]) for d in data())
    for ours, theirs in zip(final, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_what_a_loss_reads_must_be_there_and_of_its_rank(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(clipped, RANKS).result()
    training = client.create_lora_training_client("tinkex/tiny", rank=4)
    lacking = data(1)
    del lacking[0].loss_fn_inputs["old"]
    with pytest.raises(tinkex.InvalidInputError, match=r"data\.0\.old"):
        training.forward_backward_custom(lacking, handle)
    with pytest.raises(tinkex.InvalidInputError, match="input_ranks"):
        client.create_custom_loss(clipped, {"logprobs": 1})


def test_a_loss_of_another_session_is_unknown(tinkex_tiny):
    handle = tinkex_tiny.client().create_custom_loss(clipped, RANKS).result()
    training = tinkex_tiny.client().create_lora_training_client("tinkex/tiny", rank=4)
    with pytest.raises(tinkex.InvalidInputError, match=handle.session_id):
        training.forward_backward_custom(data(1), handle)
    with pytest.raises(tinkex.RequestFailedError, match="loss_id"):
        training.forward_backward(data(1), "custom", {"loss_id": handle.loss_id}).result()


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LOGPROBS = node("placeholder", "logprobs", "logprobs")
REF = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (node("call_function", "x", "os.system", "true"), "os.system"),
        (node("call_function", "x", "torch.load", "file"), "torch.load"),
        (node("call_function", "x", "builtins.eval", "1"), "builtins.eval"),
        (node("call_function", "x", "torch.zeros", 10), "torch.zeros"),
        (node("call_method", "x", "__class__", REF), "__class__"),
        (node("call_method", "x", "numpy", REF), "numpy"),
        (node("call_module", "x", "layer", REF), "layer"),
        (node("get_attr", "x", "weights"), "weights"),
        (node("call_function", "x", "getattr", REF, "__class__"), "__class__"),
        (node("call_function", "x", "getattr", REF, "grad_fn"), "grad_fn"),
        (node("call_function", "x", "getattr", REF, REF), "ref"),
        (node("call_function", "x", "getattr", REF, "shape", 0), "shape"),
        (node("call_function", "x", "torch.exp", {"ref": "later"}), "later"),
    ],
)
def test_anything_but_arithmetic_is_refused_by_name(bad, named):
    nodes = [LOGPROBS, bad, node("output", "output", "output", {"tuple": [REF, {"dict": {}}]})]
    with pytest.raises(tinkex.InvalidInputError, match=named) as refused:
        TracedLoss(TracedGraph("loss", [("logprobs", 1)], nodes))
    assert refused.value.field == "graph"


def shaped(logprobs, advantages, old):
    ones = torch.ones_like(logprobs, memory_format=torch.preserve_format, layout=torch.strided)
    moved = advantages.to(logprobs.dtype).to(logprobs.device) * ones
    flat = moved.contiguous(memory_format=torch.contiguous_format).reshape(logprobs.shape + (1,))  # noqa: RUF005
    mean = (logprobs * flat.T.mT[:, 0]).sum() / logprobs.shape[0] * logprobs.ndim
    return [mean, {"custom/mean:mean": mean}]


def test_a_loss_can_ask_what_its_tensors_are_and_return_a_list(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(shaped, RANKS).result()
    assert handle.loss_id is not None
    training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=3)
    batch = data()
    outputs = training.forward(batch, "cross_entropy").result().loss_fn_outputs
    means = [
        float((output["logprobs"].to_numpy() * each.loss_fn_inputs["advantages"].to_numpy()).mean())
        for output, each in zip(outputs, batch, strict=True)
    ]
    metrics = training.forward_backward_custom(batch, handle).result().metrics
    assert metrics["loss:sum"] == pytest.approx(sum(means), rel=1e-5)
    assert metrics["custom/mean:mean"] == pytest.approx(sum(means) / len(means), rel=1e-5)


@pytest.mark.parametrize(
    "growing",
    [
        [node("call_function", "x", "operator.mul", {"tuple": [0]}, 1 << 40)],
        [node("call_function", "x", "operator.mod", "%999999999d", 1)],
        [
            node("call_function", "x", "operator.add", {"tuple": [0]}, {"tuple": [0]}),
            *(
                node("call_function", f"x{n}", "operator.add", *[{"ref": f"x{n - 1 or ''}"}] * 2)
                for n in range(1, 60)
            ),
        ],
        [node("call_function", "x", "getattr", {"tuple": [0]}, "T")],
    ],
)
def test_lists_and_texts_do_not_grow_without_end(growing):
    output = node("output", "output", "output", {"tuple": [REF, {"dict": {}}]})
    loss = TracedLoss(TracedGraph("loss", [("logprobs", 1)], [LOGPROBS, *growing, output]))
    with pytest.raises(tinkex.InvalidInputError, match="failed at x"):
        loss(torch.zeros(3, requires_grad=True), {})


def test_numbers_do_not_grow_without_end():
    power = node("call_function", "x", "operator.pow", 9, 1_000_000_000)
    total = node("call_method", "total", "sum", REF)
    output = node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]})
    loss = TracedLoss(TracedGraph("loss", [("logprobs", 1)], [LOGPROBS, power, total, output]))
    with pytest.raises(tinkex.InvalidInputError, match="x"):
        loss(torch.zeros(3, requires_grad=True), {})
