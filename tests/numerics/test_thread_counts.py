"""A training step has the same bits for any number of threads, and so on any number of engines of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinkex.engine.devices import has_bfloat16
from tinkex.engine.trainer import LanguageModel, TrainedModel, run_pass
from tinkex.engine.values import AdamStep, Example, PassJob

from ..running import finish
from .test_training import trained

#: Wide enough that PyTorch would divide a product among threads.
SIZES: dict[str, Any] = {
    "vocab_size": 12_000,
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
THREADS = (1, 2, 3, 8)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def language(request: pytest.FixtureRequest) -> LanguageModel:
    if request.param == torch.bfloat16 and not has_bfloat16("cpu"):
        pytest.skip("this processor has no bfloat16")
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for parameter in network.requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    return LanguageModel(network.eval().to(request.param), context_length=512)


def stepped(language: LanguageModel, lengths: list[int], threads: int) -> TrainedModel:
    torch.set_num_threads(threads)
    model: TrainedModel = trained(language)
    random = np.random.default_rng(0)
    data = [
        Example(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]})
        for tokens in (random.integers(0, SIZES["vocab_size"], length + 1) for length in lengths)
    ]
    finish(run_pass(model, PassJob(data, "cross_entropy"), 512))
    model.optimizer.step(AdamStep(learning_rate=1e-2, grad_clip_norm=0.1))
    return model


@pytest.mark.parametrize("lengths", [[9], [100, 3], [300, 211]])
def test_the_number_of_threads_changes_no_bit_of_a_step(language, lengths):
    one, *several = (stepped(language, lengths, threads) for threads in THREADS)
    for model in several:
        for name, pair in model.adapter.pairs.items():
            assert torch.equal(pair.a, one.adapter.pairs[name].a), name
            assert torch.equal(pair.b, one.adapter.pairs[name].b), name
