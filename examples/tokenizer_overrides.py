"""Tokenizers whose name differs from the model's name (Llama 3, Kimi K2), and the tokenizer of `--base-model`.

python examples/tokenizer_overrides.py [--base-url local] [--base-model tinkex/tiny]

All `meta-llama/Llama-3…` models use one tokenizer that needs no licence agreement. `moonshotai/Kimi-K2-Thinking` is
loaded from one pinned revision, because its tokenizer runs its own code. Models that the service lacks are skipped.
"""

from __future__ import annotations

import tinkex
from _shared import parsed

TEXT = "The cat sat on the mat."
SPECIAL = ("meta-llama/Llama-3.1-8B", "moonshotai/Kimi-K2-Thinking")


def main() -> None:
    options = parsed(__doc__)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        models = service.get_server_capabilities().supported_models
        offered = {model.model_name for model in models}
        for name in (options.base_model, *SPECIAL):
            if name not in offered and name != options.base_model:
                print(f"{name}: skipped, the service does not have it")
                continue
            sampler = service.create_sampling_client(base_model=name)
            try:
                tokenizer = sampler.get_tokenizer()
            except OSError as error:
                if name == options.base_model:
                    raise
                print(f"{name}: skipped, its tokenizer cannot be loaded: {error}")
                continue
            ids = tokenizer.encode(TEXT, add_special_tokens=False)
            print(f"{name}: {len(ids)} tokens {ids[:8]} …")
            params = tinkex.SamplingParams(max_tokens=8, seed=1)
            drawn = sampler.sample(tinkex.ModelInput.from_ints(ids), 1, params).result()
            print(f"  continues with {tokenizer.decode(drawn.sequences[0].tokens)!r}")
            assert tokenizer.decode(ids) == TEXT, "decoding does not undo encoding"


if __name__ == "__main__":
    main()
