"""Other model families than the tiny model's: those of `LeanDecoder` and those of `PlainDecoder`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinkex.engine import checkpoint
from tinkex.engine.lora import Adapter, adaptable_layers
from tinkex.engine.sampler import Sampler
from tinkex.engine.trainer import LanguageModel, TrainedModel, run_pass
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, SampleJob
from tinkex.errors import InvalidInputError

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
    "GPT2": ({**SIZES, "bos_token_id": 0, "eos_token_id": 0}, False),  # its layers are no nn.Linear
    "Gemma2": ({**GROUPED, "head_dim": 8, "sliding_window": 8}, False),  # also caps its logits
}


def plain(family):
    options, _ = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, kind)(config).eval().requires_grad_(False)


def made(family, dtype):
    language_model = LanguageModel(plain(family).to(dtype), context_length=128)
    assert (language_model.llama is not None) == FAMILIES[family][1]
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
        done = finish(run_pass(model, PassJob([text], "cross_entropy"), 512))
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
        request = PassJob([example], "cross_entropy", backward=False)
        scored = finish(run_pass(model, request, 512)).logprobs[0]
        np.testing.assert_allclose(logprobs, scored[len(PROMPT) - 1 :], atol=tolerance)


PARTS = ("train_attn", "train_mlp", "train_unembed")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_attention_mlp_or_unembedding(family):
    layers = made(family, torch.float32).layers
    parts = [
        adaptable_layers(layers, LoraSpec(4, **{other: other == part for other in PARTS}))
        for part in PARTS
    ]
    assert sorted(name for part in parts for name in part) == sorted(layers)
    assert adaptable_layers(layers, LoraSpec(4)) == list(layers)
    assert [len(part) for part in parts[2:]] == [1]
    assert all("attn" in name or "attention" in name for name in parts[0])
    assert all("mlp" in name for name in parts[1])


def test_part_without_layers_is_refused_by_name():
    torch.manual_seed(0)
    options = {**GROUPED, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}
    config = transformers.Qwen3MoeConfig(**options)
    model = transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    layers = LanguageModel(model, context_length=64).layers
    with pytest.raises(InvalidInputError, match="no such layers") as caught:
        adaptable_layers(layers, LoraSpec(4))
    assert caught.value.field == "lora_config.train_mlp"
    assert adaptable_layers(layers, LoraSpec(4, train_mlp=False))


def test_gpt2_adapter_loads_in_peft_unchanged(tmp_path):
    from peft import PeftModel

    language_model = made("GPT2", torch.float32)
    adapter = Adapter.fresh(language_model.layers, LoraSpec(4, seed=1, train_unembed=False), "cpu")
    for pair in adapter.pairs.values():
        torch.nn.init.normal_(pair.b, 0, 0.05)
    checkpoint.save(tmp_path / "adapter", adapter, "gpt2")
    with pytest.warns(UserWarning, match="fan_in_fan_out"):  # PEFT sets this option and warns
        theirs = PeftModel.from_pretrained(plain("GPT2"), tmp_path / "adapter").eval()
    tokens = torch.tensor(PROMPT.astype(np.int64))[None]
    with torch.no_grad(), adapter.switched_on(language_model.layers):
        ours = language_model.model(tokens).logits
        before = plain("GPT2")(tokens).logits
        torch.testing.assert_close(ours, theirs(tokens).logits)
    assert not torch.allclose(ours, before, atol=1e-3)
