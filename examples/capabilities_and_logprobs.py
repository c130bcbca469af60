"""Capabilities and health of a service, and the probability of each token of a prompt.

python examples/capabilities_and_logprobs.py [--base-url local] [--base-model tinkex/tiny] [--text TEXT]
"""

from __future__ import annotations

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__, text="The cat sat on the mat.")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        print(f"health: {service.health().status}")
        models = service.get_server_capabilities().supported_models
        for model in models:
            print(f"model: {model.model_name}, context {model.max_context_length}")

        sampler = service.create_sampling_client(base_model=options.base_model)
        tokenizer = sampler.get_tokenizer()
        prompt = tinkex.ModelInput.from_text(options.text, tokenizer)
        logprobs = sampler.compute_logprobs(prompt).result()
        # The same, with the likeliest alternative tokens.
        params = tinkex.SamplingParams(max_tokens=1)
        answer = sampler.sample(
            prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=1
        ).result()
    likeliest = answer.topk_prompt_logprobs or []
    for token, logprob, best in zip(prompt.to_ints(), logprobs, likeliest, strict=True):
        if logprob is None or best is None:  # the first token has no logprob
            print(f"{tokenizer.decode([token])!r:8}")
        else:
            likely, more = best[0]
            print(
                f"{tokenizer.decode([token])!r:8} {logprob:8.3f}   "
                f"likeliest {tokenizer.decode([likely])!r} {more:.3f}"
            )
            assert more >= logprob - 0.02
    assert logprobs[0] is None
    assert len(logprobs) == prompt.length
    assert models


if __name__ == "__main__":
    main()
