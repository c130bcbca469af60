"""Fine-tune with cross entropy alone, and with regularizers that keep the model near its base.

python examples/structured_regularizers.py [--base-url local] [--base-model tinkex/tiny] [--steps 20]
"""

from __future__ import annotations

from typing import Any

import torch

import tinkex
from _shared import parsed
from tinkex.objectives import REFERENCE, completion, cross_entropy, with_reference
from tinkex.regularizers import L2, Consistency, CustomLossOutput, RegularizerSpec

SENTENCES = [("The cat sat on ", "the mat."), ("One, two, ", "three, four.")]


async def length(data: list[tinkex.Datum], logprobs: list[torch.Tensor]) -> Any:
    """A regularizer may be any function, also an async one."""
    return torch.stack([each.sum().square() for each in logprobs]).mean(), {"data": len(data)}


TERMS = [
    RegularizerSpec(Consistency(REFERENCE), weight=1.0, name="stay near base"),
    RegularizerSpec(L2(target="probs", reduction="mean"), weight=0.1, name="small probs"),
    RegularizerSpec(length, weight=0, name="only measured", is_async=True),
]


def trained(
    service: tinkex.ServiceClient, base_model: str, steps: int, *, regularized: bool
) -> CustomLossOutput:
    training = service.create_lora_training_client(base_model, rank=8, seed=1)
    tokenizer = training.get_tokenizer()
    texts = [
        completion(tokenizer.encode(prompt), tokenizer.encode(answer))
        for prompt, answer in SENTENCES
    ]
    data = with_reference(texts, service.create_sampling_client(base_model=base_model))
    # A term with weight 0 is measured but does not affect training.
    terms = [
        RegularizerSpec(each.fn, each.weight * regularized, each.name, each.is_async)
        for each in TERMS
    ]
    for _ in range(steps):
        result = training.forward_backward_custom(
            data, cross_entropy, regularizers=terms, track_grad_norms=True
        )
        training.optim_step(tinkex.AdamParams(learning_rate=5e-3))
    parts = result.result().custom_loss
    assert parts is not None
    return parts


def main() -> None:
    options = parsed(__doc__, steps=20)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        free, held = (
            trained(service, options.base_model, options.steps, regularized=regularized)
            for regularized in (False, True)
        )
    print(f"{'':16}{'free':>10}{'regularized':>12}{'its gradient':>14}")
    assert free.base_loss is not None
    assert held.base_loss is not None
    print(f"{'cross entropy':16}{free.base_loss.value:10.3f}{held.base_loss.value:12.3f}")
    for name, term in held.regularizers.items():
        value = free.regularizers[name].value
        print(f"{name:16}{value:10.3f}{term.value:12.3f}{term.grad_norm:14.3f}")
    assert held.regularizers["stay near base"].value < free.regularizers["stay near base"].value
    print("The regularized model stayed nearer to its base.")


if __name__ == "__main__":
    main()
