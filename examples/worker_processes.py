"""Sample from worker processes: each gets a pickled sampling client, which uses the same sampling session.

python examples/worker_processes.py [--base-url local] [--base-model tinkex/tiny] [--workers 2]

Use it if processing the samples needs much CPU time, for example to run tests on code or to check proofs.
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
    """Runs in a worker process. A real program would compute its score here."""
    drawn = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, PARAMS).result()
    return os.getpid(), drawn.sequences[0].tokens


def main() -> None:
    options = parsed(__doc__, workers=2)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        sampler = service.create_sampling_client(base_model=options.base_model)
        expected = [answer(sampler, prompt)[1] for prompt in PROMPTS]
        context = multiprocessing.get_context("spawn")  # workers get only pickled objects
        with ProcessPoolExecutor(options.workers, context) as pool:
            answers = list(pool.map(partial(answer, sampler), PROMPTS))
    for (worker, tokens), prompt in zip(answers, PROMPTS, strict=True):
        print(f"process {worker}: {prompt} → {tokens}")
    assert [tokens for _, tokens in answers] == expected, "workers sampled from something else"
    assert os.getpid() not in {worker for worker, _ in answers}


if __name__ == "__main__":
    main()
