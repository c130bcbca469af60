"""Direct preference optimisation: learn which of two answers is preferred.

python examples/dpo.py [--base-url local] [--base-model tinkex/tiny] [--steps 20]
"""

from __future__ import annotations

import tinkex
from _shared import parsed
from tinkex.objectives import completion, dpo, with_reference

#: prompt, preferred answer, other answer
PREFERENCES = [
    ("How are you?", " Fine, thank you!", " Go away."),
    ("Can you help me?", " Gladly!", " No."),
    ("Is it late?", " A little, yes.", " Who cares."),
]


def main() -> None:
    options = parsed(__doc__, steps=20)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        encode = training.get_tokenizer().encode
        pairs = [
            completion(encode(prompt), encode(answer))
            for prompt, *answers in PREFERENCES
            for answer in answers
        ]
        reference = service.create_sampling_client(base_model=options.base_model)
        data = with_reference(pairs, reference)
        for step in range(options.steps):
            result = training.forward_backward_custom(data, dpo(beta=0.1))
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
            metrics = result.result().metrics
            print(
                f"step {step:3}  loss {metrics['loss:sum']:.4f}  "
                f"accuracy {metrics['accuracy:mean']:.2f}  margin {metrics['margin:mean']:+.3f}"
            )
    assert metrics["accuracy:mean"] == 1.0, "not every preference was learned"
    print(f"All {len(PREFERENCES)} preferences learned.")


if __name__ == "__main__":
    main()
