"""One client package against the stand-in service. Usage: measure_client.py tinker|tinkex PORT [growth]"""

import asyncio
import importlib
import json
import os
import resource
import sys
import time

module, port = sys.argv[1], sys.argv[2]
growth = sys.argv[3:] == ["growth"]
os.environ.update(
    TINKER_API_KEY="tml-bench", TINKER_BASE_URL=f"http://127.0.0.1:{port}", TINKER_TELEMETRY="0"
)
package, types = importlib.import_module(module), importlib.import_module(f"{module}.types")
service = package.ServiceClient()
out = {"memory_after_connect_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
sampler = service.create_sampling_client(base_model="stand/in")
prompt = types.ModelInput.from_ints(list(range(1000, 1256)))
params = types.SamplingParams(max_tokens=64)


def sample_together(count):
    """Seconds and CPU seconds per sample of `count` samples under way at once."""

    async def all_of_them():
        one = lambda: sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=params)  # noqa: E731
        await asyncio.gather(*(one() for _ in range(count)))

    cpu, started = time.process_time(), time.perf_counter()
    asyncio.run(all_of_them())
    return (time.perf_counter() - started) / count, (time.process_time() - cpu) / count


sample_together(50)
if growth:
    small = min(sample_together(2000)[1] for _ in range(3))
    large = min(sample_together(20000)[1] for _ in range(2))
    done = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sample_together(20000)
    print(
        json.dumps(
            {
                "cpu_us_per_sample_at_2000": small * 1e6,
                "cpu_us_per_sample_at_20000": large * 1e6,
                "growth": large / small,
                "peak_memory_mb": done / 1024,
                "more_memory_after_20000_more_mb": (
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - done
                )
                / 1024,
            }
        )
    )
    os._exit(0)
wall, cpu = zip(*(sample_together(2000) for _ in range(3)), strict=True)
out["samples_per_s"] = 1 / min(wall)
out["cpu_us_per_sample"] = min(cpu) * 1e6
latencies = []
for _ in range(200):
    started = time.perf_counter()
    sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    latencies.append(time.perf_counter() - started)
out["sample_p50_ms"] = sorted(latencies)[100] * 1e3
tokens = list(range(4096))
training = service.create_lora_training_client(base_model="stand/in", rank=8)


def data(count, length):
    one = {"target_tokens": tokens[:length], "weights": [1.0] * length}
    return [
        types.Datum(model_input=types.ModelInput.from_ints(tokens[:length]), loss_fn_inputs=one)
        for _ in range(count)
    ]


def step(batch):
    return training.forward_backward(batch, "cross_entropy"), training.optim_step(
        types.AdamParams()
    )


large, times = data(128, 4096), []
for _ in range(4):
    started = time.perf_counter()
    for future in step(large):
        future.result()
    times.append(time.perf_counter() - started)
out["training_mtok_per_s"] = 128 * 4096 / min(times) / 1e6
tiny = data(1, 64)
started = time.perf_counter()
for future in [future for _ in range(200) for future in step(tiny)]:
    future.result()
out["small_steps_per_s"] = 200 / (time.perf_counter() - started)
print(json.dumps(out), flush=True)
os._exit(0)
