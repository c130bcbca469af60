"""How many functions of tinkex a sample and a training step call, against the stand-in service: python benchmarks/hops.py

With `-v` it lists the functions. Calls do not depend on the machine, so two commits can be compared at any time.
"""

import os
import subprocess
import sys
import threading
import time
from collections import Counter

from clients import free_port
from side_by_side import HERE

_CALLED: list[str] = []
_counting = threading.Event()
_deepest = 0


def watch(frame, event, _):
    """Note a call; a coroutine that continues is not a call."""
    global _deepest
    code = frame.f_code
    if not _counting.is_set() or event != "call" or "/tinkex/" not in code.co_filename:
        return
    coroutine = code.co_flags & 0x2A0  # a generator, a coroutine or an asynchronous generator
    if not coroutine or frame.f_lasti <= 6:
        _CALLED.append(f"{code.co_filename.rpartition('/tinkex/')[2]}: {code.co_qualname}")
    depth, below = 0, frame
    while below is not None:
        depth, below = depth + ("/tinkex/" in below.f_code.co_filename), below.f_back
    _deepest = max(_deepest, depth)


def count(name, work):
    global _deepest
    for _ in range(3):
        work()
    time.sleep(0.2)
    _CALLED.clear()
    _deepest = 0
    _counting.set()
    work()
    time.sleep(0.1)  # what our own thread still does after the result
    _counting.clear()
    print(f"{name}: {len(_CALLED)} calls of {len(set(_CALLED))} functions, {_deepest} deep")
    if "-v" in sys.argv:
        for function, calls in Counter(_CALLED).items():
            print(f"{calls:6} {function}")


def main(port):
    os.environ.update(
        TINKER_API_KEY="tml-bench", TINKER_BASE_URL=f"http://127.0.0.1:{port}", TINKER_TELEMETRY="0"
    )
    threading.setprofile(watch)
    sys.setprofile(watch)
    import tinkex
    from tinkex import types

    service = tinkex.ServiceClient()
    sampler = service.create_sampling_client(base_model="stand/in")
    training = service.create_lora_training_client(base_model="stand/in", rank=8)
    tokens = list(range(64))
    prompt, params = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=64)
    inputs = {"target_tokens": tokens, "weights": [1.0] * 64}
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]

    def step():
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams())
        passed.result()
        stepped.result()

    count("a sample", lambda: sampler.sample(prompt, 1, params).result())
    count("a step", step)


if __name__ == "__main__":
    port = free_port()
    stand_in = subprocess.Popen(
        [sys.executable, str(HERE / "stand_in.py"), port], stdout=subprocess.PIPE, text=True
    )
    assert stand_in.stdout is not None
    stand_in.stdout.readline()
    try:
        main(port)
    finally:
        stand_in.terminate()
        stand_in.wait()
