"""The local service beside plain transformers + PEFT in float32 and beside the limit: same model, two threads, one run.

The limit is the matrix products of the same work alone, in the type that the service chooses on this machine (see
`training_limit.py` and `sampling_limit.py`).

    python benchmarks/local_service.py [training] [sampling] [overhead] [start] [--rounds 3] [--vllm PATH]

PATH is the Python of an environment with vLLM, which is then sampled from too; `make vllm` makes one under .scratch/vllm.
Every measurement runs in a process of its own, ours and the reference taking turns, and the best of the rounds
counts: these machines are noisy, and noise only ever adds time. Prints a table to stderr and JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = "tinkex/tiny"
RANK, ROWS, WIDTH, NEW = 8, 8, 128, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, metavar="PATH")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(globals()[f"measure_{options.child}"]()))
        return
    parts = options.parts or ["training", "sampling", "overhead", "start"]
    results = {part: globals()[f"compare_{part}"](options.rounds) for part in parts}
    if options.vllm and "sampling" in parts:
        results["vllm"] = compare_vllm(options.vllm, results["sampling"]["service_sampling"])
    print(json.dumps(results, indent=1))


def child(name: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def best(names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """The highest of each figure over the rounds."""
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for _ in range(rounds):
        for name in names:
            for key, value in child(name).items():
                found[name][key] = max(value, found[name].get(key, float("-inf")))
    return found


def show(title: str, rows: list[tuple[str, float, float, float]]) -> None:
    print(f"\n{title}", file=sys.stderr)
    for name, ours, reference, asked in rows:
        ratio = ours / reference
        mark = "ok" if ratio >= asked else "MISSED"
        print(
            f"  {name:38} {ours:9.1f} {reference:9.1f}   {ratio:5.2f} x  (asked {asked}) {mark}",
            file=sys.stderr,
        )


# -- what is trained and sampled ----------------------------------------------------------------------


def batch(lengths: list[int], vocabulary: int = 49_000) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(10, vocabulary, length + 1) for length in lengths]


def even() -> list[int]:
    return [WIDTH] * ROWS


def mixed() -> list[int]:
    return [int(n) for n in np.random.default_rng(1).integers(16, 513, 8)]


# -- the reference ------------------------------------------------------------------------------------


def plain_model(*, adapter: bool):
    import torch
    from transformers import AutoModelForCausalLM

    from tinkex.engine import base_models
    from tinkex.server.service import default_cache_dir

    torch.set_num_threads(2)
    prepared = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
    model = AutoModelForCausalLM.from_pretrained(prepared.directory, dtype=torch.float32)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS))
    return model


def measure_plain_training() -> dict[str, float]:
    import torch

    model = plain_model(adapter=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(rows: list[np.ndarray]) -> None:
        width = max(map(len, rows))
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.from_numpy(row)
            mask[index, : len(row)] = 1
        labels = tokens.masked_fill(mask == 0, -100)
        model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"even": rate(step, batch(even())), "mixed": rate(step, batch(mixed()))}


def rate(step, rows: list[np.ndarray]) -> float:
    """Real tokens a second, after a first step that does not count."""
    step(rows)
    started = time.perf_counter()
    for _ in range(2):
        step(rows)
    return 2 * sum(len(row) - 1 for row in rows) / (time.perf_counter() - started)


def measure_plain_sampling() -> dict[str, float]:
    model = plain_model(adapter=False)
    return {f"base {n}": generate(model, n) for n in (1, 8, 32)}


def measure_plain_adapter_sampling() -> dict[str, float]:
    model = plain_model(adapter=True)
    return {f"adapter {n}": generate(model, n) for n in (1, 8, 32)}


def generate(model, count: int) -> float:
    import torch

    model.eval()
    prompt = torch.from_numpy(batch([31])[0]).repeat(count, 1)
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": True,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    with torch.inference_mode():
        model.generate(prompt, **options)
        started = time.perf_counter()
        model.generate(prompt, **options)
        return count * NEW / (time.perf_counter() - started)


# -- the service --------------------------------------------------------------------------------------


class Served:
    """A service in its own processes, as users have it."""

    def __init__(self, model: str) -> None:
        self._directory = tempfile.TemporaryDirectory()
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", "serve", "--port=0", f"--base-model={model}",
             f"--data-dir={self._directory.name}"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = self.process.stdout.readline().split()[-1]
        self.seconds = time.perf_counter() - started

    def memory(self) -> float:
        """Resident megabytes of the service and its engine."""
        total = 0
        for pid in [self.process.pid, *children(self.process.pid)]:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        return total / 1024

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self._directory.cleanup()


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def connect(served: Served):
    import tinkex

    return tinkex.ServiceClient(base_url=served.url, api_key="tml-local")


def measure_service_training() -> dict[str, float]:
    import tinkex

    with Served(SMOL) as served, connect(served) as service:
        training = service.create_lora_training_client(SMOL, rank=RANK, train_unembed=False)

        def step(rows: list[np.ndarray]) -> None:
            data = [
                tinkex.Datum(
                    model_input=tinkex.ModelInput.from_ints(row[:-1]),
                    loss_fn_inputs={
                        "target_tokens": row[1:],
                        "weights": np.full(len(row) - 1, 1 / (len(row) - 1), np.float32),
                    },
                )
                for row in rows
            ]
            passed = training.forward_backward(data, "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-4)).result()
            passed.result()

        even_rate = rate(step, batch(even()))
        memory = served.memory()
        return {"even": even_rate, "mixed": rate(step, batch(mixed())), "memory": -memory}


def measure_service_sampling() -> dict[str, float]:
    import tinkex

    with Served(SMOL) as served, connect(served) as service:
        training = service.create_lora_training_client(SMOL, rank=RANK, train_unembed=False)
        samplers = {
            "base": service.create_sampling_client(base_model=SMOL),
            "adapter": training.save_weights_and_get_sampling_client(),
        }
        prompt = tinkex.ModelInput.from_ints(batch([31])[0])
        options = tinkex.SamplingParams(max_tokens=NEW, stop=[])

        def together(sampler, requests: int, samples: int) -> float:
            def draw() -> None:
                futures = [sampler.sample(prompt, samples, options) for _ in range(requests)]
                for future in futures:
                    future.result()

            draw()
            started = time.perf_counter()
            draw()
            return requests * samples * NEW / (time.perf_counter() - started)

        found = {
            f"{name} {n}": together(sampler, 1, n)
            for name, sampler in samplers.items()
            for n in (1, 8, 32)
        }
        found["separate 32"] = together(samplers["base"], 32, 1)
        return found


def measure_service_overhead() -> dict[str, float]:
    import tinkex

    with Served(TINY) as served, connect(served) as service:
        training = service.create_lora_training_client(TINY, rank=RANK)
        adam = tinkex.AdamParams(learning_rate=0.0)
        for _ in range(30):
            training.optim_step(adam).result()
        steps = [timed(lambda: training.optim_step(adam).result()) for _ in range(300)]
        for _ in range(30):
            service.health()
        trips = [timed(service.health) for _ in range(300)]  # through the same client
        sampler = service.create_sampling_client(base_model=TINY)
        prompt = tinkex.ModelInput.from_ints([1, 2, 3, 4])
        options = tinkex.SamplingParams(max_tokens=16, stop=[])
        for _ in range(8):
            sampler.sample(prompt, 1, options).result()

        def serial() -> None:
            for _ in range(64):
                sampler.sample(prompt, 1, options).result()

        def at_once() -> None:
            for future in [sampler.sample(prompt, 1, options) for _ in range(64)]:
                future.result()

        at_once()
        return {
            "optim_step": -1e6 * statistics.median(steps),
            "healthz": -1e6 * statistics.median(trips),
            "serial": 64 / timed(serial),
            "at once": 64 / timed(at_once),
        }


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_engine_step() -> dict[str, float]:
    """The engine's own time for an optimizer step, without anything around it."""
    import torch

    from tinkex.engine import base_models
    from tinkex.engine.engine import TorchEngine
    from tinkex.engine.values import AdamStep, LoraSpec
    from tinkex.server.service import default_cache_dir

    torch.set_num_threads(2)
    model = base_models.prepare(base_models.parse_spec(TINY), default_cache_dir())
    engine = TorchEngine([model])
    engine.create_model("m", TINY, LoraSpec(rank=RANK))
    for _ in range(30):
        engine.optim_step("m", AdamStep(learning_rate=0.0))
    steps = [timed(lambda: engine.optim_step("m", AdamStep(learning_rate=0.0))) for _ in range(300)]
    return {"seconds": -1e6 * statistics.median(steps)}


def measure_plain_start() -> dict[str, float]:
    """From the start of a process to a loaded model, told by the process itself."""
    script = (
        "import sys, torch, transformers; torch.set_num_threads(2); "
        "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)"
    )
    from tinkex.engine import base_models
    from tinkex.server.service import default_cache_dir

    model = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
    command = [sys.executable, "-c", script, str(model.directory)]
    return {"seconds": -timed(lambda: subprocess.run(command, check=True))}


def measure_service_start() -> dict[str, float]:
    with Served(SMOL) as served:
        return {"seconds": -served.seconds}


# -- the limit ----------------------------------------------------------------------------------------


def service_dtype():
    """The type that the service chooses on this machine."""
    from tinkex.engine.devices import dtype_for

    return dtype_for("auto", "cpu", parameters=135_000_000)


def measure_limit_training() -> dict[str, float]:
    import torch

    from tinkex.server.service import default_cache_dir
    from training_limit import Products, TorchEngine, base_models

    torch.set_num_threads(2)
    prepared = base_models.prepare(base_models.parse_spec(SMOL), default_cache_dir())
    engine = TorchEngine([prepared], dtype=service_dtype())
    products = Products(engine, engine.token_budget)
    return {"even": products.rows / products.seconds()}


def measure_limit_sampling() -> dict[str, float]:
    from sampling_limit import Bench

    bench = Bench(service_dtype(), rounds=1)
    found = {}
    for count in (1, 8, 32):
        seconds = min(bench.products_of(count) for _ in range(5))
        found |= {f"base {count}": count / seconds, f"adapter {count}": count / seconds}
    return found


# -- comparisons --------------------------------------------------------------------------------------


def compare_training(rounds: int) -> dict:
    found = best(["plain_training", "service_training", "limit_training"], rounds)
    plain, ours = found["plain_training"], found["service_training"]
    limit = found["limit_training"]
    show(
        "training, tokens/s: service, transformers + PEFT",
        [
            (f"{ROWS} x {WIDTH}", ours["even"], plain["even"], 1.0),
            ("8 rows of 16 to 512", ours["mixed"], plain["mixed"], 1.5),
        ],
    )
    show("training, tokens/s: service, limit", [("8 x 128", ours["even"], limit["even"], 0.6)])
    print(
        f"  memory of the service: {-ours['memory']:.0f} MB (target: at most 2000)", file=sys.stderr
    )
    return found


def compare_sampling(rounds: int) -> dict:
    names = ["plain_sampling", "plain_adapter_sampling", "service_sampling", "limit_sampling"]
    found = best(names, rounds)
    plain = found["plain_sampling"] | found["plain_adapter_sampling"]
    ours = found["service_sampling"]
    asked = {"base 1": 1.0, "base 8": 1.2, "base 32": 1.5}
    show(
        "sampling, tokens/s: service, generate",
        [(name, ours[name], plain[name], asked.get(name, 1.3)) for name in plain],
    )
    limit = found["limit_sampling"]
    show(
        "sampling, tokens/s: service, limit",
        [(name, ours[name], limit[name], 0.7) for name in limit],
    )
    show(
        "32 requests of one, against one of 32",
        [("tokens/s", ours["separate 32"], ours["base 32"], 0.85)],
    )
    return found


def compare_vllm(python: Path, ours: dict[str, float]) -> dict[str, float]:
    """vLLM's own `generate` in the type of the service, without adapters."""
    from vllm import Offline  # our benchmark of this name

    offline = Offline(python, str(service_dtype()).removeprefix("torch."), loras=False)
    found = {}
    for count in (1, 8, 32):
        offline.seconds(count, 2)
        seconds = min(offline.seconds(count, NEW) for _ in range(2))
        found[f"base {count}"] = count * NEW / seconds
    offline.close()
    show(
        "sampling, tokens/s: service, vLLM",
        [(name, ours[name], theirs, 1.0) for name, theirs in found.items()],
    )
    return found


def compare_overhead(rounds: int) -> dict:
    found = best(["service_overhead", "engine_step"], rounds)
    ours, engine = found["service_overhead"], found["engine_step"]
    allowed = -engine["seconds"] - 4 * ours["healthz"]
    print(
        f"\noptim_step on {TINY}: {-ours['optim_step']:.0f} us; engine {-engine['seconds']:.0f} us "
        f"+ 4 healthz of {-ours['healthz']:.0f} us = {allowed:.0f} us allowed",
        file=sys.stderr,
    )
    show("64 samples, requests/s", [("at once, serial", ours["at once"], ours["serial"], 5.0)])
    return found


def compare_start(rounds: int) -> dict:
    found = best(["plain_start", "service_start"], rounds)
    ours, plain = -found["service_start"]["seconds"], -found["plain_start"]["seconds"]
    print(
        f"\nstart to ready: {ours:.1f} s, plain script {plain:.1f} s: {ours / plain:.2f} x (asked 1.3)",
        file=sys.stderr,
    )
    return found


if __name__ == "__main__":
    main()
