"""A forward pass without training: the logprobs of a text as arrays, and statistics of them.

python examples/forward_inference.py [--base-url local] [--base-model tinkex/tiny] [--text TEXT]
"""

from __future__ import annotations

import math

import numpy as np

import tinkex
from _shared import parsed
from tinkex.objectives import completion


def main() -> None:
    options = parsed(__doc__, text="The cat sat on the mat.")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        tokens = training.encode(options.text)
        data = [completion(tokens[:1], tokens[1:])]

        result = training.forward(data, "cross_entropy").result()  # computes no gradient
        logprobs = result.loss_fn_outputs[0]["logprobs"].to_numpy()
        pieces = [training.decode([token]) for token in tokens[1:]]

        frozen = service.create_sampling_client(base_model=options.base_model)
        same = frozen.compute_logprobs(tinkex.ModelInput.from_ints(tokens)).result()

    for piece, logprob in zip(pieces, logprobs, strict=True):
        print(f"{piece!r:8} {logprob:8.3f}  {'▪' * round(-4 * float(logprob))}")
    print(f"shape {logprobs.shape}, {logprobs.dtype}; loss {result.loss:.3f}")
    print(f"mean {logprobs.mean():.3f}, least {logprobs.min():.3f}, most {logprobs.max():.3f}")
    print(f"perplexity {math.exp(-float(logprobs.mean())):.1f}")
    # An untrained adapter gives the same logprobs as its base model.
    assert np.allclose(logprobs, np.array(same[1:], np.float32), atol=0.02)


if __name__ == "__main__":
    main()
