"""A training run that prints all of its results: `training_life.py MODULE URL STEPS`.

Runs in the environment of the client MODULE. Prints one JSON line with the results at the end, and each step's number
on stderr to show its progress.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys

if __name__ == "__main__":
    module, url, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"] = url, "tml-local"
    os.environ["TINKER_TELEMETRY"] = "0"
    tinker = importlib.import_module(module)
    service = tinker.ServiceClient()
    training = service.create_lora_training_client("tinkex/tiny", rank=8, seed=7)
    adam = tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0, weight_decay=0.01)
    chance = random.Random(0)
    metrics: list[float] = []
    data = []
    for step in range(steps):
        rows = [[chance.randrange(256) for _ in range(21)] for _ in range(4)]
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * 20},
            )
            for row in rows
        ]
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam)
        metrics += [passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]]
        print(step, file=sys.stderr, flush=True)
    sampler = training.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=12, seed=3)
    sampled = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    final = training.forward(data, "cross_entropy").result()
    outcome = {
        "metrics": metrics,
        "tokens": [list(sequence.tokens) for sequence in sampled.sequences],
        "logprobs": [list(output["logprobs"].data) for output in final.loss_fn_outputs],
    }
    print(json.dumps(outcome), flush=True)
    os._exit(0)
