"""One front and many simulated engines: are the engines busy, are keys served equally, what does a request cost the front?

    python benchmarks/front.py [--engines 64] [--models 200] [--keys 50] [--step 2.0] [--seconds 30]

The service is real (HTTP, journal, database, scheduling, pool); an engine only waits as long as a step would take. The
load comes from another process, so the processor time of this one is that of the front.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tinkex.engine import calls
from tinkex.engine.base_models import PreparedModel, parse_spec, prepare
from tinkex.engine.interface import Engines
from tinkex.engine.process import Ready, Setup
from tinkex.engine.values import PassResult
from tinkex.server import service as service_module
from tinkex.server.auth import Keys
from tinkex.server.members import Member
from tinkex.server.pool import Pool
from tinkex.server.serve import ServiceThread
from tinkex.server.service import Settings, default_cache_dir
from tinkex.server.shared_memory import SharedMemory
from tinkex.server.supervisor import Supervisor
from tinkex.server.worker import Worker

TINY = "tinkex/tiny"


class SimulatedWorker(Worker):
    """An engine that takes its time and computes nothing."""

    def __init__(self, name: str, model: PreparedModel, step: float) -> None:
        super().__init__(Setup((TINY,), default_cache_dir(), "fake"), name=name)
        self._model, self._step = model, step
        self._line = asyncio.Lock()

    async def start(self) -> Ready:
        self.ready = Ready([self._model], "none", "float32")
        return self.ready

    async def stop(self) -> None: ...

    async def call(self, call: Any) -> Any:
        if not isinstance(call, calls.RunPass | calls.OptimStep):
            return None
        # A pass takes most of a step, the optimizer little.
        seconds = self._step * (0.9 if isinstance(call, calls.RunPass) else 0.1)
        async with self._line:
            await asyncio.sleep(seconds)
            self.busy_seconds += seconds
        if isinstance(call, calls.OptimStep):
            return {}
        logprobs = [example.tokens_T * 0.0 for example in call.request.examples]
        return PassResult(logprobs, {"loss:sum": 1.0, "tokens:sum": 1.0})


async def load(url: str, keys: int, models: int, seconds: float) -> None:
    """Each model trains as fast as it is served: a pass and a step are always in flight. Prints passes by key."""
    done: Counter[int] = Counter()
    limits = httpx.Limits(max_connections=600)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as http:

        async def told(key: int, path: str, body: dict[str, Any]) -> Any:
            answer = await http.post(
                f"/api/v1/{path}", json=body, headers={"x-api-key": f"tml-number-{key}"}
            )
            answer.raise_for_status()
            return answer.json()

        async def result(key: int, promise: dict[str, Any]) -> Any:
            while True:
                asked = {"request_id": promise["request_id"]}
                answer = await http.post(
                    "/api/v1/retrieve_future",
                    json=asked,
                    headers={"x-api-key": f"tml-number-{key}"},
                )
                if answer.status_code != 408:
                    return answer.json()

        session_body = {"tags": [], "sdk_version": "0.36.0", "type": "create_session"}
        sessions = [
            (await told(key, "create_session", session_body))["session_id"] for key in range(keys)
        ]
        chunk = {"tokens": list(range(64)), "type": "encoded_text"}
        targets = {"data": list(range(64)), "dtype": "int64", "shape": [64]}
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": targets}}
        inputs = {"data": [datum] * 4, "loss_fn": "cross_entropy"}
        until = time.monotonic() + seconds + 5

        async def train(number: int) -> None:
            key = number % keys
            body = {
                "session_id": sessions[key],
                "model_seq_id": number // keys,
                "base_model": TINY,
                "lora_config": {"rank": 8},
            }
            model = (await result(key, await told(key, "create_model", body)))["model_id"]
            seq = 1
            while time.monotonic() < until:
                named = {"model_id": model}
                passed = await told(
                    key,
                    "forward_backward",
                    named | {"seq_id": seq, "forward_backward_input": inputs},
                )
                stepped = await told(
                    key,
                    "optim_step",
                    named | {"seq_id": seq + 1, "adam_params": {"learning_rate": 1e-4}},
                )
                await result(key, passed)
                await result(key, stepped)
                done[key] += 1
                seq += 2

        await asyncio.gather(*(train(number) for number in range(models)))
    print(" ".join(str(done[key]) for key in range(keys)))


def main(options: argparse.Namespace) -> None:
    model = prepare(parse_spec(TINY), default_cache_dir())

    def simulated(*_: object, **__: object) -> Engines:
        workers = [
            SimulatedWorker(f"engine-{number}", model, options.step)
            for number in range(options.engines)
        ]
        return Pool([Member(Supervisor(worker)) for worker in workers], SharedMemory())

    service_module.make_engines = simulated
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch, "keys")
        keys.write_text(
            "".join(f"k{number}: tml-number-{number}\n" for number in range(options.keys))
        )
        running = ServiceThread(
            Settings(Path(scratch, "data"), (TINY,), keys=Keys.from_file(keys), snapshot_every=1e9)
        )
        url = running.start()
        try:
            arguments = [options.keys, options.models, options.seconds]
            command = [sys.executable, __file__, "--load", url, *map(str, arguments)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loader:
                time.sleep(5)  # the models are being made
                before, busy, cpu = time.monotonic(), _busy(url), time.process_time()
                time.sleep(options.seconds)
                passed = time.monotonic() - before
                busy, cpu = _busy(url) - busy, time.process_time() - cpu
                assert loader.stdout is not None
                counts = list(map(int, loader.stdout.read().split()))
        finally:
            running.close()
    steps = busy / options.step
    print(
        f"{options.engines} engines, {options.models} models, {options.keys} keys, step {options.step} s: "
        f"busy {busy / passed / options.engines:.1%}, {steps / passed:.0f} steps/s, "
        f"front {cpu / passed:.0%} of a core, {1000 * cpu / max(1.0, steps):.1f} ms a step; "
        f"steps per key {min(counts)} to {max(counts)}"
    )


def _busy(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"x-api-key": "tml-number-0"}, trust_env=False).text
    (line,) = [
        each for each in text.splitlines() if each.startswith("tinkex_engine_busy_seconds_total")
    ]
    return float(line.split()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        asyncio.run(load(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--keys", type=int, default=50)
    parser.add_argument("--step", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    main(parser.parse_args())
