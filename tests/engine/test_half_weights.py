"""Weights that stay in memory as bfloat16, as they are published, while products are float32."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.engine import base_models
from tinkex.engine.engine import TorchEngine
from tinkex.engine.native import kernels_for
from tinkex.engine.shared_weights import SharedWeights
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, SampleJob

from ..running import finish
from .test_llama_files import FAMILIES, saved

LARGE = {
    "vocab_size": 600,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOKENS = np.random.default_rng(0).integers(0, 300, 90)
PROMPT = TOKENS[:40].astype(np.int32)


def rewritten(model, directory, change):
    """The same model in another directory, with other tensors."""
    shutil.copytree(model.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    changed = {name: change(name, tensor) for name, tensor in tensors.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return base_models.read(model.name, directory)


def worked(engine, model):
    """Train two steps and sample their adapter: logprobs, weights, and what was drawn."""
    engine.create_model("m", model.name, LoraSpec(4, seed=1))
    example = Example(TOKENS[:-1].astype(np.int32), {"target_tokens": TOKENS[1:]})
    for _ in range(2):
        done = finish(engine.run_pass("m", PassJob([example], "cross_entropy")))
        engine.optim_step("m", AdamStep(learning_rate=1e-2))
    engine.open_sampler("s", model.name, model_id="m")
    engine.add_sample("job", SampleJob("s", PROMPT, max_tokens=8, seed=1, num_samples=20))
    results = []
    while engine.sampling:
        results += [event.result for event in engine.sample_step() if event.result is not None]
    weights = [part.detach().numpy() for part in engine._model("m").adapter.parameters()]
    return [done.logprobs[0], *weights, *results[0].tokens, *results[0].logprobs]


def types_of(engine, model):
    """The types of matrices and of other weights."""
    engine.load(model)
    weights = list(engine._in_memory(model).language.model.parameters())
    return tuple(
        {weight.dtype for weight in weights if (weight.dim() == 2) is two} for two in (True, False)
    )


needs_products = pytest.mark.skipif(
    not kernels_for(torch.device("cpu"), torch.float32).products.reads_half,
    reason="this processor has no products that read bfloat16",
)


@needs_products
@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_sampling_have_the_bits_of_weights_stored_as_float32(tmp_path, family):
    changes = LARGE | ({"head_dim": 64} if family == "qwen3" else {})
    half = saved(tmp_path / "half", family, torch.bfloat16, **changes)
    wide = rewritten(half, tmp_path / "wide", lambda _, tensor: tensor.float())
    engines = TorchEngine([half]), TorchEngine([wide])
    assert types_of(engines[0], half) == ({torch.bfloat16}, {torch.float32})
    assert types_of(engines[1], wide) == ({torch.float32}, {torch.float32})
    assert engines[0].dtypes == "float32"
    for found, expected in zip(worked(engines[0], half), worked(engines[1], wide), strict=True):
        np.testing.assert_array_equal(found, expected)


@needs_products
def test_engines_share_them(tmp_path):
    model = saved(tmp_path / "half", "llama", torch.bfloat16, **LARGE)
    expected = worked(TorchEngine([model]), model)
    weights = SharedWeights(tmp_path)
    for _ in range(2):  # the first engine writes the file, the second maps it
        engine = TorchEngine([model], shared_weights=weights)
        for found, wanted in zip(worked(engine, model), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_pytorchs_products_get_float32_weights(tmp_path):
    model = saved(tmp_path / "half", "llama", torch.bfloat16)
    assert types_of(TorchEngine([model], native=False), model) == ({torch.float32},) * 2


def test_matrices_of_different_types_all_become_float32(tmp_path):
    half = saved(tmp_path / "half", "llama", torch.bfloat16)
    mixed = rewritten(
        half,
        tmp_path / "mixed",
        lambda name, tensor: (
            tensor.float() if name.endswith("layers.1.self_attn.k_proj.weight") else tensor
        ),
    )
    assert types_of(TorchEngine([mixed]), mixed) == ({torch.float32},) * 2
