"""Mixed load at saturation: does memory stay flat, and how long do small requests take meanwhile?

    python benchmarks/load.py [--minutes 30] [--clients 8]

Starts `tinkex serve` with the tiny model and so many client processes, each of which trains, samples, saves, lists
and trains with a loss of its own, all at once and as fast as it can. The service's memory and its engine's are read
from /proc (PSS: shared pages counted once); growth is the mean of the last tenth over the mean of the tenth after
warm-up, which is the first fifth. No error is expected: back-pressure (429) is waited out by the clients and counted
by the service. Prints a table to stderr and JSON to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path
from urllib.request import urlopen

TINY = "tinkex/tiny"
ROWS, WIDTH, SAMPLES, NEW = 8, 64, 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--child", nargs=3, metavar=("URL", "SECONDS", "SEED"))
    options = parser.parse_args()
    if options.child:
        url, seconds, seed = options.child
        print(json.dumps(asyncio.run(Client(url, int(seed)).work(float(seconds)))))
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="tinkex-load-") as directory:
        found = measure(Path(directory), options.minutes * 60, options.clients)
    show(found)
    print(json.dumps(found, indent=1))


# -- one client ------------------------------------------------------------------------------------


class Client:
    def __init__(self, url: str, seed: int) -> None:
        import tinkex

        self.chance = random.Random(seed)
        self.service = tinkex.ServiceClient(base_url=url, api_key="tml-local")
        self.tinkex = tinkex
        self.steps: list[float] = []
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def work(self, seconds: float) -> dict[str, object]:
        self.training = await self.service.create_lora_training_client_async(TINY, rank=8)
        self.sampler = await self.service.create_sampling_client_async(base_model=TINY)
        self.rest = self.service.create_rest_client()
        self.ends = time.monotonic() + seconds
        parts = (self.train, self.sample, self.save, self.list, self.train_with_own_loss)
        await asyncio.gather(*(self.repeat(part) for part in parts))
        return {"steps": self.steps, "done": self.done, "errors": self.errors}

    async def repeat(self, part) -> None:
        while time.monotonic() < self.ends:
            try:
                await part()
                self.done[part.__name__] += 1
            except Exception as error:
                self.errors[f"{part.__name__}: {type(error).__name__}: {error}"[:160]] += 1
                await asyncio.sleep(0.1)

    def data(self):
        tinkex = self.tinkex
        for _ in range(ROWS):
            row = [self.chance.randrange(256) for _ in range(WIDTH + 1)]
            inputs = {"target_tokens": row[1:], "weights": [1.0] * WIDTH}
            yield tinkex.Datum(tinkex.ModelInput.from_ints(row[:-1]), inputs)

    async def train(self) -> None:
        passed = await self.training.forward_backward_async(list(self.data()), "cross_entropy")
        await passed
        began = time.monotonic()
        await (await self.training.optim_step_async(self.tinkex.AdamParams(learning_rate=1e-4)))
        self.steps.append(time.monotonic() - began)

    async def sample(self) -> None:
        prompt = self.tinkex.ModelInput.from_ints([self.chance.randrange(256) for _ in range(32)])
        params = self.tinkex.SamplingParams(max_tokens=NEW, stop=[])
        await asyncio.gather(
            *(self.sampler.sample_async(prompt, 1, params) for _ in range(SAMPLES))
        )

    async def save(self) -> None:
        await (await self.training.save_state_async("latest", overwrite=True))
        await asyncio.sleep(1.0)

    async def list(self) -> None:
        await self.rest.list_training_runs_async()
        await self.rest.list_user_checkpoints_async()
        await asyncio.sleep(0.2)

    async def train_with_own_loss(self) -> None:
        def loss(data, logprobs):
            total = -sum(each.sum() for each in logprobs)
            return total, {"own": float(total.detach())}

        await (await self.training.forward_backward_custom_async(list(self.data()), loss))
        await asyncio.sleep(0.5)


# -- the service under it --------------------------------------------------------------------------


def measure(directory: Path, seconds: float, clients: int) -> dict[str, object]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-m", "tinkex", "serve", "--port=0", f"--data-dir={directory}"]
    service = subprocess.Popen(
        [*command, f"--base-model={TINY}"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert service.stdout is not None
        url = service.stdout.readline().rpartition(" ")[2].strip()
        loads = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", url, str(seconds), str(seed)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for seed in range(clients)
        ]
        over = threading.Event()
        healths: list[float] = []
        probe = threading.Thread(target=ask_for_health, args=(url, over, healths))
        probe.start()
        memory, results = watch(url, service.pid, loads)
        over.set()
        probe.join()
        told = [json.loads(load.communicate()[0].splitlines()[-1]) for load in loads]
        refused = refusals(url)
    finally:
        service.terminate()
        service.wait()
    steps = [step for each in told for step in each["steps"]]
    return {
        "seconds": seconds,
        "clients": clients,
        "done": sum((Counter(each["done"]) for each in told), Counter()),
        "errors": sum((Counter(each["errors"]) for each in told), Counter()),
        "refused": refused,
        "memory": {name: growth(values) for name, values in memory.items()},
        "memory_each_minute": {name: values[::30] for name, values in memory.items()},
        "results_each_minute": results[::30],
        "health": times(healths),
        "optim_step": times(steps),
    }


def ask_for_health(url: str, over: threading.Event, seconds: list[float]) -> None:
    host = url.removeprefix("http://")
    while not over.wait(0.1):
        began = time.monotonic()
        connection = HTTPConnection(host, timeout=60)
        connection.request("GET", "/api/v1/healthz")
        connection.getresponse().read()
        connection.close()
        seconds.append(time.monotonic() - began)


def watch(
    url: str, pid: int, loads: list[subprocess.Popen[str]]
) -> tuple[dict[str, list[float]], list[float]]:
    """Megabytes of the service and its engine, and the results it keeps, every other second of the load."""
    memory: dict[str, list[float]] = {"service": [], "engine": []}
    results: list[float] = []
    while any(load.poll() is None for load in loads):
        time.sleep(2)
        memory["service"].append(megabytes(pid))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        memory["engine"].append(sum(megabytes(int(child)) for child in children))
        results.append(float(re.search(r"^tinkex_results (\S+)", metrics(url), re.MULTILINE)[1]))
    return memory, results


def metrics(url: str) -> str:
    with urlopen(f"{url}/metrics", timeout=60) as page:
        return page.read().decode()


def megabytes(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0.0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def growth(values: list[float]) -> dict[str, float]:
    tenth = max(1, len(values) // 10)
    warm = statistics.mean(values[2 * tenth : 3 * tenth] or values)
    end = statistics.mean(values[-tenth:])
    percent = 100 * (end / warm - 1) if warm else 0.0
    return {"warm_mb": warm, "end_mb": end, "peak_mb": max(values), "growth_percent": percent}


def times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    at = lambda share: 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"count": len(seconds), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


def refusals(url: str) -> dict[str, int]:
    """What the service answered with an error, by its own count; 408 is how a poll says "not yet"."""
    pattern = r'^tinkex_http_requests_total\{operation="(\w+)",status="([45]\d\d)"\} (\S+)'
    found = re.findall(pattern, metrics(url), re.MULTILINE)
    return {
        f"{name} {status}": int(float(count)) for name, status, count in found if status != "408"
    }


def show(found: dict[str, object]) -> None:
    say = lambda *line: print(*line, file=sys.stderr)  # noqa: E731
    say(
        f"{found['clients']} clients, {found['seconds'] / 60:.1f} minutes; done: {dict(found['done'])}"
    )
    say(
        f"errors: {dict(found['errors']) or 'none'}; refused by the service: {found['refused'] or 'none'}"
    )
    for name, values in found["memory"].items():
        say(
            f"{name:>10}: {values['warm_mb']:.0f} MB warm, {values['end_mb']:.0f} MB at the end "
            f"({values['growth_percent']:+.1f} %), {values['peak_mb']:.0f} MB at most"
        )
    for name in ("health", "optim_step"):
        values = found[name]
        say(
            f"{name:>10}: p50 {values['p50_ms']:.1f} ms, p99 {values['p99_ms']:.1f} ms of {values['count']}"
        )


if __name__ == "__main__":
    main()
