"""Many adapters on one base model: trained concurrently, then sampled concurrently with the same prompt.

python examples/multi_adapter.py [--base-url local] [--base-model tinkex/tiny] [--steps 20]

The base model is in memory once. Adapters are small; requests for different adapters share a batch.
"""

from __future__ import annotations

import tinkex
from _shared import parsed
from tinkex.objectives import completion

QUESTION = "Who are you? "
ANSWERS = {"cat": "A cat, of course.\n", "dog": "A dog, your friend!\n", "bird": "Tweet.\n"}


def main() -> None:
    options = parsed(__doc__, steps=20)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        adapters = {
            name: service.create_lora_training_client(options.base_model, rank=8, seed=0)
            for name in ANSWERS
        }
        tokenizer = adapters["cat"].get_tokenizer()
        question = tokenizer.encode(QUESTION)
        for _ in range(options.steps):  # no wait here: each adapter has its own queue
            for name, training in adapters.items():
                data = [completion(question, tokenizer.encode(ANSWERS[name]))]
                training.forward_backward(data, "cross_entropy")
                training.optim_step(tinkex.AdamParams(learning_rate=1e-2))

        samplers = {
            name: training.save_weights_and_get_sampling_client()
            for name, training in adapters.items()
        }
        samplers["base"] = service.create_sampling_client(base_model=options.base_model)
        params = tinkex.SamplingParams(max_tokens=24, temperature=0, stop=["\n"])
        asked = {
            name: sampler.sample(tinkex.ModelInput.from_ints(question), 1, params)
            for name, sampler in samplers.items()
        }
        said = {
            name: tokenizer.decode(answer.result().sequences[0].tokens)
            for name, answer in asked.items()
        }
    for name, text in said.items():
        print(f"{name:8}{text!r}")
    for name, text in ANSWERS.items():
        assert said[name] == text, f"{name} has not learned its answer"
    assert said["base"] not in ANSWERS.values(), "the base model should know none of this"


if __name__ == "__main__":
    main()
