"""Losses, LoRA and Adam, compared with plain PyTorch and PEFT in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tinkex.engine.checks import LOSSES
from tinkex.engine.lora import Adapter
from tinkex.engine.shards import divide
from tinkex.engine.trainer import TrainedModel, begin_pass, finish_pass, run_pass, run_shards
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob
from tinkex.errors import InvalidInputError

from ..running import finish
from .conftest import load

LENGTHS = (5, 17, 9, 2)


def examples(loss_fn="cross_entropy", lengths=LENGTHS, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        inputs = {
            "target_tokens": random.integers(0, 256, length),
            "weights": random.normal(size=length).astype(np.float32),
            "logprobs": random.uniform(-6.5, -4.5, length).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
            "sequence_ratio_mask": (random.random(length) < 0.7).astype(np.float32),
        }
        if loss_fn != "cross_entropy":
            inputs["weights"] = (random.random(length) < 0.8).astype(np.float32)
        made.append(Example(random.integers(0, 256, length).astype(np.int32), inputs))
    return made


def trained(language_model, **spec):
    adapter = Adapter.fresh(language_model.layers, LoraSpec(4, seed=1, **spec), "cpu")
    with torch.no_grad():  # a new adapter has no effect, so set B to nonzero values
        for index, pair in enumerate(adapter.pairs.values()):
            pair.b.normal_(0, 0.05, generator=torch.Generator().manual_seed(index))
    return TrainedModel(language_model, adapter)


def reference_logprobs(model, example):
    """Logprobs of one example's targets, computed with transformers' forward."""
    with model.adapter.switched_on(model.base.layers):
        logits = model.base.model(torch.tensor(example.tokens_T.astype(np.int64))[None]).logits[0]
    targets = torch.tensor(example.inputs["target_tokens"])
    return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def reference_loss(name, logp, inputs):
    """The protocol's definition of each loss, for one sequence."""
    given = {key: torch.tensor(value) for key, value in inputs.items()}
    weights = given["weights"]
    if name == "cross_entropy":
        return (-logp * weights).sum()
    old, advantages = given["logprobs"], given["advantages"]
    ratio = torch.exp(logp - old)
    if name == "importance_sampling":
        terms = -ratio * advantages
    elif name == "ppo":
        terms = -torch.min(ratio * advantages, torch.clip(ratio, 0.8, 1.2) * advantages)
    elif name == "cispo":
        terms = -torch.clip(ratio, 0.0, 4.0).detach() * logp * advantages
    elif name == "dro":
        terms = -(logp * advantages - 0.5 * 0.05 * (logp - old) ** 2)
    else:
        mask = given["sequence_ratio_mask"]
        mean = ((logp.detach() - old) * mask).sum() / mask.sum().clamp(min=1)
        token_ratio = mean.exp() * torch.exp(logp - logp.detach())
        low, high = 1 - 3e-4, 1 + 4e-4
        terms = -torch.min(
            token_ratio * advantages, torch.clip(token_ratio, low, high) * advantages
        )
    return (terms * weights).sum()


@pytest.mark.parametrize("lengths", [LENGTHS, (70, 130, 70)], ids=["short", "equal and long"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", [16, 10_000])
def test_every_loss_and_its_gradient_equal_the_reference(language_model, name, budget, lengths):
    model, data = trained(language_model), examples(name, lengths)
    result = finish(run_pass(model, PassJob(data, name), budget))
    gradients = [parameter.grad.clone() for parameter in model.adapter.parameters()]
    model.optimizer.clear()
    expected = torch.zeros(())
    for example, logprobs in zip(data, result.logprobs, strict=True):
        logp = reference_logprobs(model, example)
        np.testing.assert_allclose(logprobs, logp.detach().numpy(), atol=1e-5)
        expected = expected + reference_loss(name, logp, example.inputs)
    expected.backward()
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)
    for ours, parameter in zip(gradients, model.adapter.parameters(), strict=True):
        scale = max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=1e-5 * scale)


def test_soft_targets_sum_over_their_alternatives(language_model):
    random = np.random.default_rng(3)
    inputs: dict[str, Any] = {
        "target_tokens": random.integers(0, 256, (6, 3)),
        "weights": random.random((6, 3)).astype(np.float32),
    }
    example = Example(random.integers(0, 256, 6).astype(np.int32), inputs)
    model = trained(language_model)
    result = finish(run_pass(model, PassJob([example], "cross_entropy"), 100))
    with model.adapter.switched_on(language_model.layers):
        logits = language_model.model(torch.tensor(example.tokens_T.astype(np.int64))[None]).logits[
            0
        ]
    logp = logits.log_softmax(-1).gather(-1, torch.tensor(inputs["target_tokens"]))
    np.testing.assert_allclose(result.logprobs[0], logp.detach().numpy(), atol=1e-5)
    expected = -(logp * torch.tensor(inputs["weights"])).sum().item()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_zero_weight_masks_an_infinite_ratio(language_model):
    example = examples("ppo", (4,))[0]
    inputs = dict(example.inputs)
    inputs["logprobs"] = np.array([-1e9, -5, -5, -5], np.float32)
    inputs["weights"] = np.array([0, 1, 1, 1], np.float32)
    model = trained(language_model)
    request = PassJob([Example(example.tokens_T, inputs)], "ppo")
    result = finish(run_pass(model, request, 100))
    assert np.isfinite(result.metrics["loss:sum"])
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.adapter.parameters())


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy"}))
def test_example_with_only_zero_weights_adds_nothing(language_model, name):
    data = examples(name, (4, 6))
    hidden = dict(data[1].inputs)
    hidden["logprobs"] = np.full(6, -300, np.float32)
    hidden["sequence_ratio_mask"] = np.ones(6, np.float32)
    hidden["weights"] = np.zeros(6, np.float32)
    both, one = trained(language_model), trained(language_model)
    request = PassJob([data[0], Example(data[1].tokens_T, hidden)], name)
    expected = finish(run_pass(one, PassJob(data[:1], name), 100)).metrics["loss:sum"]
    assert finish(run_pass(both, request, 100)).metrics["loss:sum"] == pytest.approx(expected)
    for ours, theirs in zip(both.adapter.parameters(), one.adapter.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_passes_accumulate_until_the_step_and_forward_adds_no_gradient(language_model):
    data = examples()
    together, apart = trained(language_model), trained(language_model)
    finish(run_pass(together, PassJob(data, "cross_entropy"), 64))
    for example in data:
        finish(run_pass(apart, PassJob([example], "cross_entropy"), 64))
        finish(run_pass(apart, PassJob(data, "cross_entropy", backward=False), 64))
    for one, other in zip(together.adapter.parameters(), apart.adapter.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_failed_pass_adds_no_gradient(language_model):
    model = trained(language_model)
    finish(run_pass(model, PassJob(examples(), "cross_entropy"), 64))
    before = [parameter.grad.clone() for parameter in model.adapter.parameters()]
    work = run_pass(model, PassJob(examples(seed=5), "cross_entropy"), 16)
    next(work)
    with pytest.raises(RuntimeError):
        work.throw(RuntimeError("out of memory"))
    for gradient, parameter in zip(before, model.adapter.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_twenty_steps_equal_peft_and_torch_adamw(tiny, language_model):
    from peft import LoraConfig, get_peft_model

    spec = LoraSpec(4, seed=2)
    ours = TrainedModel(language_model, Adapter.fresh(language_model.layers, spec, "cpu"))
    names = sorted({name.rpartition(".")[2] for name in ours.adapter.pairs})
    config = LoraConfig(r=4, lora_alpha=int(spec.alpha), target_modules=names)
    theirs = get_peft_model(load(tiny), config)
    theirs.eval()
    modules = dict(theirs.named_modules())
    with torch.no_grad():
        for name, pair in ours.adapter.pairs.items():
            modules[f"base_model.model.{name}"].lora_A["default"].weight.copy_(pair.a)
    parameters = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    options = AdamStep(learning_rate=2e-3, weight_decay=0.01, grad_clip_norm=5.0)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=2e-3,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=0.01,
    )
    data = examples()
    for _ in range(20):
        finish(run_pass(ours, PassJob(data, "cross_entropy"), 32))
        ours.optimizer.step(options)
        for example in data:
            logits = theirs(torch.tensor(example.tokens_T.astype(np.int64))[None]).logits[0]
            targets = torch.tensor(example.inputs["target_tokens"])
            terms = functional.cross_entropy(logits, targets, reduction="none")
            (terms * torch.tensor(example.inputs["weights"])).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, pair in ours.adapter.pairs.items():
        module = modules[f"base_model.model.{name}"]
        torch.testing.assert_close(
            pair.a.data, module.lora_A["default"].weight.data, rtol=0, atol=1e-4
        )
        torch.testing.assert_close(
            pair.b.data, module.lora_B["default"].weight.data, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens_T": np.array([1, 999], np.int32)}, "data.0.model_input"),
        ({"tokens_T": np.zeros(0, np.int32)}, "data.0.model_input"),
        ({"tokens_T": np.zeros(5000, np.int32)}, "data.0.model_input"),
        ({"inputs": {}}, "data.0.target_tokens"),
        ({"inputs": {"target_tokens": np.array([1])}}, "data.0.target_tokens"),
        ({"inputs": {"target_tokens": np.array([1, -1])}}, "data.0.target_tokens"),
        (
            {"inputs": {"target_tokens": np.array([1, 2]), "weights": np.ones(3, np.float32)}},
            "data.0.weights",
        ),
    ],
)
def test_bad_examples_are_refused_by_name(language_model, changes, field):
    good = {"tokens_T": np.array([1, 2], np.int32), "inputs": {"target_tokens": np.array([1, 2])}}
    model = trained(language_model)
    request = PassJob([Example(**(good | changes))], "cross_entropy")
    with pytest.raises(InvalidInputError) as caught:
        finish(run_pass(model, request, 64))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("loss_fn", "config", "field"),
    [
        ("nonsense", {}, "loss_fn"),
        ("ppo", {"beta": 1.0}, "loss_fn_config"),
        ("dro", {"beta": "x"}, "loss_fn_config"),
    ],
)
def test_unknown_losses_and_settings_are_refused(language_model, loss_fn, config, field):
    with pytest.raises(InvalidInputError) as caught:
        finish(run_pass(trained(language_model), PassJob(examples(loss_fn), loss_fn, config), 64))
    assert caught.value.field == field


def test_shards_computed_by_several_engines_end_in_the_same_bits(language_model):
    request = PassJob(examples(lengths=[250, 200, 240, 180, 256, 77] * 3), "cross_entropy")
    assert len(divide(request.examples, 512)) == 7
    home, helper, alone = (trained(language_model) for _ in range(3))
    for _ in range(2):  # the second pass adds to the gradients of the first
        expected = finish(run_pass(alone, request, 512))
        begin_pass(home, request)
        theirs = finish(run_shards(helper, request, [2, 4, 5, 6], 512))
        own = finish(run_shards(home, request, [0, 1, 3], 512))
        result = finish_pass(home, request, [theirs, own])
        assert result.metrics == expected.metrics
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            assert one.tobytes() == other.tobytes()
    for one, other in zip(home.optimizer.parameters, alone.optimizer.parameters, strict=True):
        assert torch.equal(one.grad, other.grad)
