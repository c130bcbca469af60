"""From training to sampling in one call: with an unnamed sampler, or a named one for later use.

python examples/save_weights_and_sample.py [--base-url local] [--base-model tinkex/tiny] [--steps 20]
"""

from __future__ import annotations

import tinkex
from _shared import parsed
from tinkex.objectives import completion

PROMPT, ANSWER = "2 + 2 = ", "4.\n"


def main() -> None:
    options = parsed(__doc__, steps=20)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        tokenizer = training.get_tokenizer()
        data = [completion(tokenizer.encode(PROMPT), tokenizer.encode(ANSWER))]
        before = training.save_weights_and_get_sampling_client()
        for _ in range(options.steps):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-2))

        # A sampler is a snapshot: `before` does not change. Unnamed samplers are not listed and end with the session.
        after = training.save_weights_and_get_sampling_client()
        kept = training.save_weights_for_sampler("sums", ttl_seconds=3600).result()
        named = service.create_sampling_client(model_path=kept.path)

        prompt = tinkex.ModelInput.from_text(PROMPT, tokenizer)
        params = tinkex.SamplingParams(max_tokens=4, temperature=0, stop=["\n"])
        said = {}
        for name, sampler in {"before": before, "after": after, kept.path: named}.items():
            answer = sampler.sample(prompt, 1, params).result().sequences[0]
            said[name] = tokenizer.decode(answer.tokens)
            print(f"{name}: {PROMPT}{said[name]!r}")
        listed = service.create_rest_client().list_checkpoints(training.model_id).result()
    assert said["after"] == said[kept.path] == ANSWER
    assert said["before"] != ANSWER
    assert [each.tinker_path for each in listed.checkpoints] == [kept.path]


if __name__ == "__main__":
    main()
