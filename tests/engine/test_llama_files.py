"""Models that are read without transformers, compared with transformers' own reading of the same files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinkex.engine import base_models
from tinkex.engine.engine import TorchEngine
from tinkex.engine.llama_files import read_llama
from tinkex.engine.lora import Adapter
from tinkex.engine.trainer import LanguageModel, TrainedModel, run_pass
from tinkex.engine.values import Example, LoraSpec, PassJob

from ..running import finish

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": STRETCHED}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
}


def saved(directory, family, dtype=torch.float32, **changes):
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | options | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.to(dtype).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return base_models.read(family, directory)


def logprobs(network):
    language = LanguageModel(network, context_length=128)
    model = TrainedModel(language, Adapter.fresh(language.layers, LoraSpec(2, seed=1), "cpu"))
    tokens = np.random.default_rng(0).integers(0, 300, 90)
    example = Example(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]})
    done = finish(run_pass(model, PassJob([example], "cross_entropy"), 512))
    return done.logprobs[0], list(language.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_read_from_its_files_equals_the_one_that_transformers_loads(tmp_path, family):
    prepared = saved(tmp_path, family)
    network = read_llama(prepared, device="cpu", dtype=torch.float32)
    assert network is not None
    ours, our_layers = logprobs(network)
    theirs, their_layers = logprobs(base_models.load(prepared, device="cpu", dtype=torch.float32))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert our_layers == their_layers


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 16}),
    ],
)
def test_unknown_settings_are_left_to_transformers(tmp_path, family, changes):
    prepared = saved(tmp_path, family, **changes)
    assert read_llama(prepared, device="cpu", dtype=torch.float32) is None


@pytest.mark.parametrize("change", [{"intermediate_size": 65}, {"num_hidden_layers": 3}])
def test_files_that_do_not_fit_their_config_are_left_to_transformers(tmp_path, change):
    saved(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    prepared = base_models.read("changed", tmp_path)
    assert read_llama(prepared, device="cpu", dtype=torch.float32) is None


def test_checkpoint_of_another_precision_is_restored_with_a_warning(tmp_path, caplog):
    tiny = base_models.prepare(base_models.parse_spec(base_models.TINY), tmp_path / "models")
    wide = TorchEngine([tiny], dtype="float32")
    wide.create_model("m", base_models.TINY, LoraSpec(2))
    wide.save_state("m", tmp_path / "saved", optimizer=True)
    manifest = json.loads((tmp_path / "saved" / "tinkex.json").read_text())
    assert manifest["dtype"] == "float32"
    wide.restore_model("same", base_models.TINY, tmp_path / "saved", optimizer=True)
    assert not caplog.records
    narrow = TorchEngine([tiny], dtype="bfloat16")
    narrow.restore_model("n", base_models.TINY, tmp_path / "saved", optimizer=True)
    assert "n was trained in float32" in caplog.text
    assert "--dtype float32" in caplog.text


def test_checkpoint_of_other_kernels_is_restored_with_a_warning(tmp_path, caplog, monkeypatch):
    tiny = base_models.prepare(base_models.parse_spec(base_models.TINY), tmp_path / "models")
    native = TorchEngine([tiny])
    native.create_model("m", base_models.TINY, LoraSpec(2))
    native.save_state("m", tmp_path / "saved", optimizer=True)
    monkeypatch.setenv("TINKEX_KERNELS", "torch")
    plain = TorchEngine([tiny])
    plain.restore_model("n", base_models.TINY, tmp_path / "saved", optimizer=True)
    assert (native.kernels, plain.kernels) == ("native", "torch")
    assert "n was trained with native kernels" in caplog.text
