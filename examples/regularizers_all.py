"""Every built-in penalty in one training run, each with a small weight and each reported separately.

python examples/regularizers_all.py [--base-url local] [--base-model tinkex/tiny] [--steps 15]
"""

from __future__ import annotations

from typing import Any

import torch

import tinkex
from _shared import parsed
from tinkex.objectives import REFERENCE, completion, cross_entropy, with_reference
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    JensenShannon,
    KLDivergence,
    Orthogonality,
    OutputMagnitude,
    RegularizerSpec,
)


def steepness(data: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The function whose gradient norm the penalty limits."""
    return torch.cat(logprobs).exp().sum()


PENALTIES = {
    L1(reduction="mean"): 0.01,
    L2(reduction="mean"): 0.005,
    ElasticNet(reduction="mean"): 0.002,
    Entropy(mode="maximize"): 0.01,
    KLDivergence(reference_field=REFERENCE): 0.01,
    JensenShannon(reference_field=REFERENCE): 0.01,
    Consistency(pair_field=REFERENCE): 0.02,
    Orthogonality(): 0.003,
    OutputMagnitude(): 0.002,
    GradientPenalty(loss_fn=steepness): 0.001,
}
TERMS = [RegularizerSpec(penalty, weight, penalty.name) for penalty, weight in PENALTIES.items()]
SENTENCES = [("The cat sat on ", "the mat."), ("The dog lay in ", "the sun.")]


def main() -> None:
    options = parsed(__doc__, steps=15)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        encode = training.get_tokenizer().encode
        texts = [completion(encode(prompt), encode(answer)) for prompt, answer in SENTENCES]
        base = service.create_sampling_client(base_model=options.base_model)
        data = with_reference(texts, base)  # adds the base model's logprobs of the same tokens

        results = []
        for _ in range(options.steps):
            results.append(
                training.forward_backward_custom(data, cross_entropy, regularizers=TERMS)
            )
            training.optim_step(tinkex.AdamParams(learning_rate=5e-3))
        first, *_, last = (each.result().metrics for each in results)

    print(f"{'':34}{'first':>12}{'last':>12}")
    for name in ("loss:sum", "base_loss:sum", *(f"regularizers/{each.name}:sum" for each in TERMS)):
        print(f"{name:34}{first[name]:12.4f}{last[name]:12.4f}")
    added = sum(last[f"regularizers/{each.name}:sum"] for each in TERMS)
    assert abs(last["base_loss:sum"] + added - last["loss:sum"]) < 1e-2
    assert last["base_loss:sum"] < first["base_loss:sum"], "the loss did not fall"


if __name__ == "__main__":
    main()
