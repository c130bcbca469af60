"""Trainer and sampler compute the same logprobs in every precision; recomputed layers change no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinkex.engine.devices import has_bfloat16
from tinkex.engine.llama_train import MicroBatchPass, kept_layers
from tinkex.engine.sampler import Sampler
from tinkex.engine.trainer import LanguageModel, run_pass
from tinkex.engine.values import Example, PassJob, SampleJob

from ..running import finish
from .conftest import load
from .test_sampling import run
from .test_training import trained

#: Shapes in the proportions of real models. In much narrower ones a product may depend on the number of its rows.
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 512,
}
PROMPT = np.arange(40, 60, dtype=np.int32)
#: Mean and worst difference. Where bfloat16 is emulated, a product may depend on the number of its rows.
AGREEMENT = {
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (1e-3, 1e-2) if has_bfloat16("cpu") else (0.02, 0.2),
}


@pytest.mark.parametrize("dtype", AGREEMENT)
def test_trainer_and_sampler_agree_on_a_thousand_sampled_tokens(dtype):
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for parameter in network.requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    language = LanguageModel(network.eval().to(dtype), context_length=256)
    model = trained(language)
    job = SampleJob("s", PROMPT, num_samples=8, max_tokens=128, seed=1, stop_tokens=())
    jobs = {"sampled": (job, model.adapter.frozen_copy())}
    result = run(Sampler(language, end_tokens=()), jobs)["sampled"]
    texts = [np.concatenate([PROMPT, tokens]) for tokens in result.tokens]
    data = [Example(text[:-1], {"target_tokens": text[1:].astype(np.int64)}) for text in texts]
    request = PassJob(data, "cross_entropy", backward=False)
    scored = finish(run_pass(model, request, 512)).logprobs
    differences = np.concatenate(
        [
            np.abs(sampled - again[len(PROMPT) - 1 :])
            for sampled, again in zip(result.logprobs, scored, strict=True)
        ]
    )
    mean, worst = AGREEMENT[dtype]
    assert len(differences) == 1024
    assert differences.mean() <= mean
    assert differences.max() <= worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_run_again_in_the_backward_pass_change_no_bit(tiny, dtype):
    language = LanguageModel(load(tiny).to(dtype), context_length=tiny.context_length)
    assert language.llama is not None
    lengths = [130, 70, 70]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 256, sum(lengths)))
    found = []
    for budget in (10**9, 0):
        model = trained(language)
        work = MicroBatchPass(
            language.llama, tokens, lengths, model.adapter, activation_bytes=budget
        )
        hidden = work.forward(backward=True)
        work.backward(torch.ones_like(hidden))
        found.append([hidden, *(parameter.grad for parameter in model.adapter.parameters())])
    for kept, recomputed in zip(*found, strict=True):
        if kept is not None:  # the unembedding has no part in this
            assert torch.equal(kept, recomputed)


def test_the_budget_of_activations_counts_the_layer_that_runs_backward(tiny):
    language = LanguageModel(load(tiny), context_length=tiny.context_length)
    assert language.llama is not None
    layer, rows = language.llama.layers[0], 100
    hidden = layer.out.sizes[0]
    projected = sum(layer.qkv.sizes) + hidden + sum(layer.gate_up.sizes)
    everything = 4 * rows * (2 * hidden + projected)
    count, inputs = len(language.llama.layers), 4 * rows * hidden
    none = count * inputs + 3 * everything
    assert kept_layers(language.llama, rows, none) == 0
    assert kept_layers(language.llama, rows, none + everything - inputs) == 1
    assert kept_layers(language.llama, rows, (count + 3) * everything) == count
    assert kept_layers(language.llama, rows, (count + 3) * everything - 1) == count - 1
    assert kept_layers(language.llama, rows, 10**12) == len(language.llama.layers)
