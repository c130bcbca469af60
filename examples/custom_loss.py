"""Train with a custom loss: cross entropy that weights the tokens most that the model finds hardest.

python examples/custom_loss.py [--base-url local] [--base-model tinkex/tiny] [--steps 20]
"""

from __future__ import annotations

import torch

import tinkex
from _shared import parsed
from tinkex.objectives import completion

SENTENCES = [("The cat sat on ", "the mat."), ("One, two, ", "three, four.")]


def focal(
    data: list[tinkex.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """−(1 − p)² · log p of every counted token, averaged."""
    weights = torch.cat([datum.loss_fn_inputs["weights"].to_torch() for datum in data])
    logp = torch.cat(logprobs)
    loss = -(weights * (1 - logp.exp()).square() * logp).sum() / weights.sum()
    return loss, {"p": float((weights * logp.exp()).sum().detach() / weights.sum())}


def main() -> None:
    options = parsed(__doc__, steps=20)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        tokenizer = training.get_tokenizer()
        data = [
            completion(tokenizer.encode(prompt), tokenizer.encode(answer))
            for prompt, answer in SENTENCES
        ]
        losses = []
        for step in range(options.steps):
            result = training.forward_backward_custom(data, focal)
            training.optim_step(tinkex.AdamParams(learning_rate=5e-3))
            metrics = result.result().metrics
            losses.append(metrics["loss:sum"])
            print(f"step {step:3}  loss {losses[-1]:.4f}  mean probability {metrics['p']:.3f}")
    assert losses[-1] < losses[0], "the loss did not fall"
    print(f"The loss fell from {losses[0]:.3f} to {losses[-1]:.3f}.")


if __name__ == "__main__":
    main()
