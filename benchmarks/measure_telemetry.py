"""Cost of subscribers: CPU per sample with each subscriber. Usage: measure_telemetry.py PORT [SAMPLES ROUNDS]

All cases run in turns in one process, because the machine is noisy; the least of all rounds counts.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import time

port = sys.argv[1]
samples, rounds = (int(text) for text in (sys.argv[2:4] or ("2000", "5")))
os.environ.update(TINKER_API_KEY="tml-bench", TINKER_BASE_URL=f"http://127.0.0.1:{port}")

import tinkex  # noqa: E402
from tinkex import telemetry, types  # noqa: E402

logging.getLogger("tinkex").addHandler(logging.NullHandler())
prompt = types.ModelInput.from_ints(list(range(1000, 1256)))
params = types.SamplingParams(max_tokens=64)


@contextlib.contextmanager
def logger():
    number = telemetry.attach_logger(logging.DEBUG)
    yield
    telemetry.detach(number)


@contextlib.contextmanager
def all_of(*parts):
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        yield


def progress():
    return tinkex.progress(samples=samples, file=io.StringIO())


def sampled_traces(share):
    """OpenTelemetry with an SDK that keeps a share of the traces and throws them away."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    return telemetry.OpenTelemetry(TracerProvider(sampler=TraceIdRatioBased(share)))


#: Whether the client reports to the service, and the subscriber.
CASES = {
    "nobody": (False, contextlib.nullcontext),
    "nobody, once more": (False, contextlib.nullcontext),  # shows the noise of the machine
    "the report (the default)": (True, contextlib.nullcontext),
    "metrics": (False, telemetry.Metrics),
    "usage": (False, telemetry.Usage),
    "progress": (False, progress),
    "report, metrics, usage, progress": (
        True,
        lambda: all_of(telemetry.Metrics(), telemetry.Usage(), progress()),
    ),
    "logger, level not shown": (False, logger),
    "traces, 1 % kept": (False, lambda: sampled_traces(0.01)),
    "traces, all kept": (False, lambda: sampled_traces(1.0)),
}


def cpu_per_sample(sampler):
    async def all_of_them():
        one = lambda: sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=params)  # noqa: E731
        await asyncio.gather(*(one() for _ in range(samples)))

    cpu = time.process_time()
    asyncio.run(all_of_them())
    return (time.process_time() - cpu) / samples


best = {}
for _ in range(rounds):
    for name, (reporting, listening) in CASES.items():
        with tinkex.ServiceClient(telemetry_enabled=reporting) as client:
            sampler = client.create_sampling_client(base_model="stand/in")
            cpu_per_sample(sampler)  # connections are opened, caches filled
            with listening():
                best[name] = min(best.get(name, 1.0), cpu_per_sample(sampler))
print(json.dumps({name: value * 1e6 for name, value in best.items()}))
