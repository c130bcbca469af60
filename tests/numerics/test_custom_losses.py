"""Custom losses through the real service, compared with built-in losses, with PyTorch + PEFT, and by their effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tinkex
from tinkex import objectives
from tinkex.regularizers import L2, Entropy, KLDivergence
from tinkex.testing import RunningService
from tinkex.types import AdamParams, Datum, ModelInput, RegularizerSpec

from .conftest import load

STEP = AdamParams(learning_rate=5e-3)
NAMES = (f"weights-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def client(tinkex_tiny: RunningService) -> Iterator[tinkex.ServiceClient]:
    with tinkex_tiny.client() as client:
        yield client


def new_model(client: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return client.create_lora_training_client("tinkex/tiny", rank=4, seed=7)


def saved(model: tinkex.TrainingClient, service: RunningService) -> Path:
    """Save the model; return the checkpoint's directory, a PEFT adapter."""
    name = next(NAMES)
    model.save_state(name).result(60)
    (weights,) = service.data_dir.rglob(f"{name}/adapter_model.safetensors")
    return weights.parent


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def completions(count: int = 4, seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [
        objectives.completion(
            random.integers(0, 256, random.integers(2, 6)).tolist(),
            random.integers(0, 256, random.integers(2, 9)).tolist(),
        )
        for _ in range(count)
    ]


def test_custom_cross_entropy_gives_the_same_weights_as_the_built_in(client, tinkex_tiny):
    data, (built_in, custom) = completions(), (new_model(client), new_model(client))
    for _ in range(5):
        expected = built_in.forward_backward(data, "cross_entropy")
        found = custom.forward_backward_custom(data, objectives.cross_entropy)
        for model in (built_in, custom):
            model.optim_step(STEP)
        assert found.result(60).loss == pytest.approx(expected.result(60).loss, rel=1e-5)
    ours, theirs = (tensors(saved(model, tinkex_tiny)) for model in (custom, built_in))
    assert ours.keys() == theirs.keys()
    assert any(ours[name].abs().max() > 1e-3 for name in ours if "lora_B" in name)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_ten_custom_steps_equal_peft_and_autograd(client, tinkex_tiny, tiny):
    from peft import PeftModel

    data, loss_fn = completions(), objectives.simpo(beta=2.0, gamma=0.5)
    keep_small = RegularizerSpec(L2(center=-4.0, reduction="mean"), 0.1, "keep")
    ours = new_model(client)
    theirs = PeftModel.from_pretrained(load(tiny), saved(ours, tinkex_tiny), is_trainable=True)
    theirs.eval()
    parameters = [each for each in theirs.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=STEP.learning_rate,
        betas=(STEP.beta1, STEP.beta2),
        eps=STEP.eps,
        weight_decay=0.0,
    )
    for _ in range(10):
        found = ours.forward_backward_custom(data, loss_fn, regularizers=[keep_small])
        ours.optim_step(STEP)
        logprobs = [target_logprobs(theirs, datum) for datum in data]
        loss = (
            loss_fn(data, logprobs)[0]
            + 0.1 * L2(center=-4.0, reduction="mean").compute(data, logprobs)[0]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found.result(60).loss == pytest.approx(loss.item(), abs=1e-4)
    modules = dict(theirs.named_modules())
    for name, tensor in tensors(saved(ours, tinkex_tiny)).items():
        layer, factor = name.removesuffix(".weight").rsplit(".", 1)
        expected = getattr(modules[layer], factor)["default"].weight.data
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-4)


def target_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    tokens = torch.tensor(datum.model_input.to_ints())
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


# -- effect of regularizers ----------------------------------------------------------------------

TOKENS = np.array([65, 66, 67, 65, 66, 67, 65, 66, 67], np.int32)


@pytest.fixture(scope="module")
def everything(client, tiny) -> Datum:
    """A datum whose targets are the whole vocabulary, with the untrained model's logprobs of them."""
    vocabulary = np.tile(np.arange(tiny.vocab_size), (len(TOKENS) - 1, 1))
    plain = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": vocabulary})
    output = new_model(client).forward([plain], "cross_entropy").result(60)
    inputs = {**plain.loss_fn_inputs, "reference_logprobs": output.loss_fn_outputs[0]["logprobs"]}
    return Datum(plain.model_input, inputs)


def next_token(
    data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross entropy of the actual next tokens."""
    targets = torch.tensor(TOKENS[1:].astype(np.int64))
    return -logprobs[0].gather(-1, targets[:, None]).mean(), {}


def trained(client: tinkex.ServiceClient, datum: Datum, *terms: RegularizerSpec) -> torch.Tensor:
    """Logprobs of the whole vocabulary after 30 steps."""
    model = new_model(client)
    for _ in range(30):
        last = model.forward_backward_custom([datum], next_token, regularizers=terms)
        model.optim_step(STEP)
    last.result(60)
    output = model.forward([datum], "cross_entropy").result(60)
    return output.loss_fn_outputs[0]["logprobs"].to_torch()


@pytest.fixture(scope="module")
def without(client, everything) -> torch.Tensor:
    return trained(client, everything)


def entropy(logp: torch.Tensor) -> float:
    return -(logp.exp() * logp).sum(-1).mean().item()


def test_entropy_bonus_keeps_entropy_high(client, everything, without):
    bonus = RegularizerSpec(Entropy(mode="maximize"), 1.0, "entropy")
    assert entropy(trained(client, everything, bonus)) > 1.2 * entropy(without)


def test_divergence_term_keeps_the_model_near_its_reference(client, everything, without):
    reference = everything.loss_fn_inputs["reference_logprobs"].to_torch()
    pull = RegularizerSpec(KLDivergence(reference_field="reference_logprobs"), 1.0, "kl")

    def divergence(logp: torch.Tensor) -> float:
        return float((logp.exp() * (logp - reference)).sum(-1).mean())

    assert divergence(trained(client, everything, pull)) < 0.8 * divergence(without)
