"""The training loop: forward_backward, optim_step, the time of each step, and a sample from the trained model.

python examples/training_loop.py [--base-url local] [--base-model tinkex/tiny] [--steps 30]
"""

from __future__ import annotations

import time

import tinkex
from _shared import parsed
from tinkex.objectives import completion

PROMPT, ANSWER = "The cat sat on ", "the mat.\n"


def main() -> None:
    options = parsed(__doc__, steps=30)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=16)
        tokenizer = training.get_tokenizer()
        data = [completion(tokenizer.encode(PROMPT), tokenizer.encode(ANSWER))]

        losses: list[float] = []
        for step in range(options.steps):
            began = time.perf_counter()
            # Submit both before waiting for either: one round trip instead of two.
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(tinkex.AdamParams(learning_rate=1e-2))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
            took = 1000 * (time.perf_counter() - began)
            print(f"step {step:3}  loss {losses[-1]:8.4f}  {took:6.1f} ms")

        saved = training.save_weights_for_sampler("trained").result()
        print(f"Saved as {saved.path}")
        sampler = service.create_sampling_client(model_path=saved.path)
        prompt = tinkex.ModelInput.from_text(PROMPT, tokenizer)
        params = tinkex.SamplingParams(max_tokens=16, temperature=0, stop=["\n"])
        answer = sampler.sample(prompt, 1, params).result().sequences[0]
    text = tokenizer.decode(answer.tokens)
    print(f"{PROMPT}{text}")
    assert losses[-1] < losses[0], "the loss did not fall"
    assert text == ANSWER, "the answer was not learned"


if __name__ == "__main__":
    main()
