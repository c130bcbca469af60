"""Sample from a model: connect to a service, create a sampler, send a prompt, decode the text.

python examples/sampling_basic.py [--base-url local] [--base-model tinkex/tiny] [--prompt TEXT] [--num-samples 3]
    [--max-tokens 64] [--temperature 0.7] [--timeout 60]
"""

from __future__ import annotations

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(
        __doc__,
        prompt="The cat sat on ",
        num_samples=3,
        max_tokens=64,
        temperature=0.7,
        timeout=60.0,
    )
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        sampler = service.create_sampling_client(base_model=options.base_model)
        tokenizer = sampler.get_tokenizer()
        prompt = tinkex.ModelInput.from_text(options.prompt, tokenizer)
        params = tinkex.SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=1
        )
        drawn = sampler.sample(
            prompt, options.num_samples, params, timeout=options.timeout
        ).result()
    for number, sequence in enumerate(drawn.sequences):
        mean = sum(sequence.logprobs or []) / len(sequence.tokens)
        print(
            f"{number}: {tokenizer.decode(sequence.tokens)!r}\n"
            f"   {len(sequence.tokens)} tokens, ended by {sequence.stop_reason}, mean logprob {mean:.2f}"
        )
    assert len(drawn.sequences) == options.num_samples
    assert all(0 < len(each.tokens) <= options.max_tokens for each in drawn.sequences)


if __name__ == "__main__":
    main()
