"""Import, building and encoding of one package. Usage: measure_foundation.py tinker|tinkex"""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

module = sys.argv[1]
COUNT, LENGTH = 128, 4096


def best(action, rounds=7):
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def start(code):
    """Seconds of a process that runs `code`, with bytecode on disk as after an installation by pip."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    return best(lambda: subprocess.run(command, check=True, env=environment), 5)


FIRST_USE = f"import {module}; {module}.ServiceClient; {module}.types.Datum"
out = {"first_use_s": start(FIRST_USE) - start("pass")}
types = importlib.import_module(f"{module}.types")
tokens = np.random.default_rng(0).integers(0, 150_000, LENGTH).tolist()
weights = [1.0] * LENGTH


def from_lists():
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": tokens, "weights": weights},
        )
        for _ in range(COUNT)
    ]


def request(data):
    inputs = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return types.ForwardBackwardRequest(
        forward_backward_input=inputs, model_id="run:train:0", seq_id=1
    )


if module == "tinkex":
    from tinkex._wire.proto_codec import encode_forward_backward_request as serialize
else:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    def serialize(value):
        return forward_backward_request_to_proto(value).SerializeToString()


def encode(data):
    return serialize(request(data))


def memory(field):
    """A value of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field}")


out["build_128x4096_from_lists_s"] = best(from_lists)
data = from_lists()
if module == "tinkex":
    int32, int64 = np.array(tokens, np.int32), np.array(tokens, np.int64)
    float32 = np.array(weights, np.float32)

    def from_numpy():
        return [
            types.Datum(
                types.ModelInput.from_ints(int32), {"target_tokens": int64, "weights": float32}
            )
            for _ in range(COUNT)
        ]

    out["build_128x4096_from_numpy_s"] = best(from_numpy)
    out["numpy_over_lists"] = (
        out["build_128x4096_from_numpy_s"] / out["build_128x4096_from_lists_s"]
    )
out["encode_128x4096_s"] = best(lambda: encode(data))
if Path("/proc/self/clear_refs").exists():
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory("VmRSS")
    size = len(encode(data))
    out["encode_peak_over_size"] = (memory("VmHWM") - before) / size
print(json.dumps(out))
