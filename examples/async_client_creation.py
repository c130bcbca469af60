"""Many clients at once: create training clients and samplers concurrently in one event loop.

python examples/async_client_creation.py [--base-url local] [--base-model tinkex/tiny] [--clients 4]
    [--checkpoint-paths tinker://…,tinker://…]
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace

import tinkex
from _shared import parsed

PROMPT = tinkex.ModelInput.from_ints([65, 66, 67])
PARAMS = tinkex.SamplingParams(max_tokens=4, temperature=0)


async def create(service: tinkex.ServiceClient, options: Namespace) -> None:
    began = time.perf_counter()
    trainings = await asyncio.gather(
        *(
            service.create_lora_training_client_async(options.base_model, rank=4, seed=seed)
            for seed in range(options.clients)
        )
    )
    print(f"{len(trainings)} training clients in {time.perf_counter() - began:.2f} s")

    paths = [path for path in options.checkpoint_paths.split(",") if path]
    if not paths:
        saved = await asyncio.gather(
            *(training.save_weights_for_sampler("async") for training in trainings)
        )
        paths = [each.path for each in saved]
    began = time.perf_counter()
    samplers = await asyncio.gather(
        *(service.create_sampling_client_async(model_path=path) for path in paths),
        service.create_sampling_client_async(base_model=options.base_model),
    )
    print(f"{len(samplers)} samplers in {time.perf_counter() - began:.2f} s")

    # Every future can be awaited. For a failed call the list contains its exception.
    answers = await asyncio.gather(
        *(sampler.sample(PROMPT, 1, PARAMS) for sampler in samplers), return_exceptions=True
    )
    for sampler, answer in zip(samplers, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        print(f"{sampler} → {answer.sequences[0].tokens}")
    assert len({training.model_id for training in trainings}) == options.clients
    assert len(answers) == len(paths) + 1


async def main() -> None:
    options = parsed(__doc__, clients=4, checkpoint_paths="")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        await create(service, options)


if __name__ == "__main__":
    asyncio.run(main())
