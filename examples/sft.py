"""Supervised fine-tuning: train on questions and answers, and measure the loss on held-out questions.

python examples/sft.py [--base-url local] [--base-model tinkex/tiny] [--steps 30]
"""

from __future__ import annotations

import random
from typing import Any

import tinkex
from _shared import parsed
from tinkex import data
from tinkex.objectives import completion

BATCH = 8
PEAK = 1e-2


def main() -> None:
    options = parsed(__doc__, steps=30)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=16, seed=0)
        tokenizer = training.get_tokenizer()
        # Facts about an invented island. The held-out questions ask for the same facts in other words.
        lessons, held_out = (lessons_of(kind, tokenizer) for kind in ("train", "test"))
        order = random.Random(0)

        first = mean_loss(training, held_out)
        for step in range(options.steps):
            passed = training.forward_backward(order.sample(lessons, BATCH), "cross_entropy")
            rate = PEAK * (1 - step / options.steps)
            training.optim_step(tinkex.AdamParams(learning_rate=rate))
            if (
                step % 10 == 9
            ):  # takes its turn after the step, like everything on a training client
                print(
                    f"step {step + 1:3}  training {passed.result().metrics['loss:sum'] / BATCH:7.2f}  "
                    f"held out {mean_loss(training, held_out):7.2f}"
                )
        last = mean_loss(training, held_out)
    print(f"Loss of a held-out answer: {first:.2f} before, {last:.2f} after.")
    assert last < 0.75 * first, "the held-out loss did not fall"


def lessons_of(kind: Any, tokenizer: Any) -> list[tinkex.Datum]:
    return [
        completion(tokenizer.encode(f"{each.question} "), tokenizer.encode(f"{each.answer}\n"))
        for each in data.tolmery(kind)
    ]


def mean_loss(training: tinkex.TrainingClient, held_out: list[tinkex.Datum]) -> float:
    """The mean loss of an answer; `forward` does not change gradients."""
    result = training.forward(held_out, "cross_entropy").result()
    return result.metrics["loss:sum"] / len(held_out)


if __name__ == "__main__":
    main()
