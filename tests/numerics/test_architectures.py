"""Models of other families than the tiny one's: those with a lean body, and those that run as transformers has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinkex.engine.lora import Adapter
from tinkex.engine.sampler import Sampler
from tinkex.engine.trainer import LanguageModel, TrainedModel, run_pass
from tinkex.engine.values import AdamStep, Example, LoraSpec, SampleJob, TrainingPass

from ..running import finish
from .test_sampling import run

PROMPT = np.arange(1, 20, dtype=np.int32)
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "Qwen2": (GROUPED, True),
    "Qwen3": ({**GROUPED, "head_dim": 8}, True),
    "Mistral": ({**GROUPED, "sliding_window": None}, True),
    "GPTNeoX": (SIZES, False),
    "Gemma2": ({**GROUPED, "head_dim": 8, "sliding_window": 8}, False),  # also caps its logits
}


def made(family, dtype):
    options, lean = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    language_model = LanguageModel(model.to(dtype), context_length=128)
    assert (language_model.llama is not None) == lean
    return language_model


def job(**options):
    return SampleJob("s", PROMPT, stop_tokens=(), **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_samples(family, dtype, tolerance):
    language_model = made(family, dtype)
    expected = language_model.model.generate(
        torch.tensor(PROMPT.astype(np.int64))[None],
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :]
    spec = LoraSpec(4, seed=1)
    model = TrainedModel(language_model, Adapter.fresh(language_model.layers, spec, "cpu"))
    text = Example(PROMPT[:-1], {"target_tokens": PROMPT[1:].astype(np.int64)})
    losses = []
    for _ in range(10):
        done = finish(run_pass(model, TrainingPass([text], "cross_entropy"), 512))
        losses.append(done.metrics["loss:sum"])
        model.optimizer.step(AdamStep(learning_rate=5e-3))
    assert losses[-1] < 0.7 * losses[0]
    jobs = {
        "base": job(max_tokens=12, temperature=0.0),
        "adapted": (job(max_tokens=70, num_samples=2, seed=1), model.adapter.frozen_copy()),
    }
    results = run(Sampler(language_model, end_tokens=()), jobs)
    assert results["base"].tokens[0].tolist() == expected.tolist()
    for tokens, logprobs in zip(
        results["adapted"].tokens, results["adapted"].logprobs, strict=True
    ):
        whole = np.concatenate([PROMPT, tokens])
        example = Example(whole[:-1], {"target_tokens": whole[1:].astype(np.int64)})
        request = TrainingPass([example], "cross_entropy", backward=False)
        scored = finish(run_pass(model, request, 512)).logprobs[0]
        np.testing.assert_allclose(logprobs, scored[len(PROMPT) - 1 :], atol=tolerance)
