"""Sample from worker processes: a sampling client is pickled into each, and goes on in the same sampling session.

python examples/worker_processes.py [--base-url local] [--base-model tinkex/tiny] [--workers 2]

Worth it when what happens to the samples takes the time of a processor: running tests on code, checking proofs.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import tinkex
from _shared import parsed

PROMPTS = [[65, 66, 67], [68, 69], [70, 71, 72, 73], [74]]
PARAMS = tinkex.SamplingParams(max_tokens=8, temperature=0)


def answer(sampler: tinkex.SamplingClient, prompt: list[int]) -> tuple[int, list[int]]:
    """What runs in a worker; the score of a real program would be computed here."""
    drawn = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, PARAMS).result()
    return os.getpid(), drawn.sequences[0].tokens


def main() -> None:
    options = parsed(__doc__, workers=2)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        sampler = service.create_sampling_client(base_model=options.base_model)
        expected = [answer(sampler, prompt)[1] for prompt in PROMPTS]
        context = multiprocessing.get_context("spawn")  # workers share nothing but what is pickled
        with ProcessPoolExecutor(options.workers, context) as pool:
            answers = list(pool.map(partial(answer, sampler), PROMPTS))
    for (worker, tokens), prompt in zip(answers, PROMPTS, strict=True):
        print(f"process {worker}: {prompt} → {tokens}")
    assert [tokens for _, tokens in answers] == expected, "workers sampled from something else"
    assert os.getpid() not in {worker for worker, _ in answers}


if __name__ == "__main__":
    main()
