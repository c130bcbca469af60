"""Trains one run with our client or the official one: `python pool_run.py MODULE BASE_URL STEPS NAME`.

Prints a line when a step was sent and reads a line before it waits for the results, so that whoever started it can act
in the middle of every step.
"""

import importlib
import os
import sys

import numpy as np


def batch(types, step):
    """A pass of about 5,000 tokens: enough for several engines."""
    random = np.random.default_rng(step)
    made = []
    for length in random.integers(60, 200, 40):
        tokens = random.integers(0, 256, length).tolist()
        targets = random.integers(0, 256, length).tolist()
        model_input = types.ModelInput.from_ints(tokens)
        made.append(types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets}))
    return made


def main(module, base_url, steps, name):
    os.environ |= {
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": "tml-pool",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    tinker = importlib.import_module(module)
    types = importlib.import_module(f"{module}.types")
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model="tinkex/tiny", rank=8, seed=1)
    for step in range(int(steps)):
        passed = training.forward_backward(batch(types, step), "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        print(f"step {step}", flush=True)
        sys.stdin.readline()
        passed.result()
        stepped.result()
    print(training.save_state(name).result().path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
