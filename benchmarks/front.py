"""One front and many simulated engines: are the engines busy, are keys served equally, what does a request cost the front?

    python benchmarks/front.py [--engines 64] [--models 200] [--keys 50] [--step 2.0] [--seconds 40]
    python benchmarks/front.py --rate passes|samples [--seconds 15]

The service is real (HTTP, journal, database, scheduling, pool, encoding of calls and replies); an engine only waits as
long as a step would take. With `--rate` it does not wait, so the front is the limit. The load comes from another
process, so the processor time of this one is that of the front.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from tinkex.engine import calls
from tinkex.engine.base_models import PreparedModel, parse_spec, prepare
from tinkex.engine.interface import Engines
from tinkex.engine.process import Ready, Setup, encode_frame
from tinkex.engine.shared_memory import SharedMemory
from tinkex.engine.values import PassResult, SampledResult, SampleJob
from tinkex.server import service as service_module
from tinkex.server.auth import Keys
from tinkex.server.members import Member
from tinkex.server.pool import EnginePool
from tinkex.server.serve import ServiceThread
from tinkex.server.service import Settings, default_cache_dir
from tinkex.server.supervisor import Supervisor
from tinkex.server.worker import Worker

TINY = "tinkex/tiny"
#: Seconds that writing a model out of one engine and reading it into another take.
MOVING = 0.1


# -- the engines -----------------------------------------------------------------------------------


class Account:
    """Seconds of engines by model, and how often models moved, since `begin`."""

    def __init__(self) -> None:
        self.began, self.ended = 0.0, float("inf")
        self.seconds: Counter[str] = Counter()
        self.steps = self.moves = 0

    def add(self, model_id: str, started: float, ended: float) -> None:
        within = min(ended, self.ended) - max(started, self.began)
        if self.began and within > 0:
            self.seconds[model_id] += within  # type: ignore[assignment]


class SimulatedWorker(Worker):
    """An engine that takes its time and computes nothing."""

    def __init__(self, name: str, model: PreparedModel, step: float, account: Account) -> None:
        super().__init__(Setup((TINY,), default_cache_dir(), "fake"), name=name)
        self._model, self._step, self._account = model, step, account
        self._line = asyncio.Lock()

    async def start(self) -> Ready:
        self.ready = Ready([self._model], "none", "float32")
        return self.ready

    async def stop(self) -> None: ...

    async def call(self, call: Any) -> Any:
        encode_frame(call)
        if isinstance(call, calls.MoveOut):
            self._account.moves += 1
            await asyncio.sleep(MOVING)
        elif isinstance(call, calls.RestoreSnapshot):
            await self._work(call.model_id, MOVING)
        elif isinstance(call, calls.OptimStep):
            await self._work(call.model_id, self._step * 0.1)
            self._account.steps += 1
            return _sent({})
        elif isinstance(call, calls.RunPass):  # a pass takes most of a step, the optimizer little
            await self._work(call.model_id, self._step * 0.9)
            logprobs = [
                np.zeros(len(example.tokens_T), np.float32) for example in call.request.examples
            ]
            return _sent(PassResult(logprobs, {"loss:sum": 1.0, "tokens:sum": 1.0}))
        return None

    async def _work(self, model_id: str, seconds: float) -> None:
        if not self._step:
            return
        seconds *= random.uniform(0.9, 1.1)
        async with self._line:
            started = time.monotonic()
            await asyncio.sleep(seconds)
            self._account.add(model_id, started, time.monotonic())

    async def sample(self, job: SampleJob, on_token: object = None) -> SampledResult:
        encode_frame(job)
        count = job.max_tokens or 1
        await asyncio.sleep(0)
        return _sent(SampledResult([np.arange(count)], [np.zeros(count, np.float32)], ["length"]))


def _sent(value: Any) -> Any:
    """A reply as it comes out of the pipe."""
    return pickle.loads(pickle.dumps(value, protocol=5))


# -- the load --------------------------------------------------------------------------------------


class Connection:
    """One kept-alive connection; the smallest client there is, because it shares the machine with the front."""

    def __init__(self, url: str, key: int) -> None:
        self._address = urlsplit(url)
        self._key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: dict[str, Any] | bytes) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            status, answer = await self._exchange(path, content)
            if status == 408:  # a poll that found nothing yet
                continue
            if status != 200:
                raise RuntimeError(f"{path}: {status} {answer!r:.300}")
            return json.loads(answer)

    async def result(self, promise: dict[str, Any]) -> Any:
        return await self.ask("retrieve_future", {"request_id": promise["request_id"]})

    async def _exchange(self, path: str, content: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            address = self._address
            self._streams = await asyncio.open_connection(address.hostname, address.port)
        reader, writer = self._streams
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: front\r\nx-api-key: tml-number-{self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), await reader.readexactly(int(headers["content-length"]))


class Load:
    """Clients that train or sample as fast as they are served, until the front closes their standard input."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url, self._options = url, options
        self._stop = False
        self._left = options.models
        self.done = 0

    async def run(self) -> None:
        options = self._options
        threading.Thread(target=self._wait_for_end, daemon=True).start()
        opened = [Connection(self._url, key) for key in range(options.keys)]
        body = {"tags": [], "sdk_version": "0.36.0", "type": "create_session"}
        made = await asyncio.gather(*(each.ask("create_session", body) for each in opened))
        self._sessions = [each["session_id"] for each in made]
        client = self._sample if options.rate == "samples" else self._train
        await asyncio.gather(*(client(number) for number in range(options.models)))

    def _wait_for_end(self) -> None:
        sys.stdin.read()
        self._stop = True

    def _started(self) -> None:
        """Each client calls this once; the front is told when all of them run."""
        self._left -= 1
        if not self._left:
            print("running", flush=True)

    async def _train(self, number: int) -> None:
        options, key = self._options, number % self._options.keys
        http = Connection(self._url, key)
        body = {
            "session_id": self._sessions[key],
            "model_seq_id": number // options.keys,
            "base_model": TINY,
            "lora_config": {"rank": 8},
        }
        model = (await http.result(await http.ask("create_model", body)))["model_id"]
        print(f"model {model} {key}", flush=True)
        tokens = list(range(options.tokens))
        targets = {"data": tokens, "dtype": "int64", "shape": [len(tokens)]}
        chunk = {"tokens": tokens, "type": "encoded_text"}
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": targets}}
        inputs = {"data": [datum] * options.rows, "loss_fn": "cross_entropy"}
        asked = {"model_id": model, "seq_id": 0, "forward_backward_input": inputs}
        before, after = json.dumps(asked).encode().split(b'"seq_id": 0')
        seq = 1
        while not self._stop:
            numbered = before + b'"seq_id": %d' % seq + after
            passed = await http.ask("forward_backward", numbered)
            step = {
                "model_id": model,
                "seq_id": seq + 1,
                "adam_params": {"learning_rate": 1e-4},
            }
            stepped = await http.ask("optim_step", step)
            if seq == 1:
                self._started()
            await http.result(passed)
            await http.result(stepped)
            seq += 2
            self.done += 1

    async def _sample(self, number: int) -> None:
        key = number % self._options.keys
        http = Connection(self._url, key)
        made = await http.ask(
            "create_sampling_session",
            {
                "session_id": self._sessions[key],
                "sampling_session_seq_id": number,
                "base_model": TINY,
            },
        )
        asked = {
            "sampling_session_id": made["sampling_session_id"],
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": list(range(64)), "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 64, "seed": 1, "stop": []},
            "type": "sample",
        }
        self._started()
        while not self._stop:
            self.done += 1
            promise = await http.ask("asample", asked | {"seq_id": self.done})
            await http.result(promise)


# -- the measurement -------------------------------------------------------------------------------


def main(options: argparse.Namespace) -> None:
    model = prepare(parse_spec(TINY), default_cache_dir())
    account = Account()
    step = 0.0 if options.rate else options.step

    def simulated(*_: object, **__: object) -> Engines:
        workers = [
            SimulatedWorker(f"engine-{number:02d}", model, step, account)
            for number in range(options.engines)
        ]
        return EnginePool([Member(Supervisor(worker)) for worker in workers], SharedMemory())

    service_module.make_engines = simulated
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch, "keys")
        keys.write_text(
            "".join(f"k{number}: tml-number-{number}\n" for number in range(options.keys))
        )
        settings = Settings(
            Path(scratch, "data"), (TINY,), keys=Keys.from_file(keys), snapshot_every=1e9
        )
        running = ServiceThread(settings)
        url = running.start()
        try:
            command = [sys.executable, __file__, *sys.argv[1:], "--load", url]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as loader:
                assert loader.stdin is not None
                assert loader.stdout is not None
                owners = {}
                for line in loader.stdout:
                    if line.strip() == "running":
                        break
                    _, model_id, key = line.split()
                    owners[model_id] = int(key)
                time.sleep(options.warm)
                passed, cpu, count, moves = measure(url, account, options.seconds)
                loader.stdin.close()
                loader.wait()
        finally:
            running.close()
    per_second = count / passed
    print(
        f"{options.engines} engines, {options.models} clients, {options.keys} keys: {per_second:.0f} requests/s, "
        f"front {cpu / passed:.0%} of a core, {1000 * cpu / count:.2f} ms a request"
    )
    if options.rate:
        return
    used: Counter[int] = Counter(dict.fromkeys(range(options.keys), 0))
    for model_id, seconds in account.seconds.items():
        used[owners[model_id]] += seconds  # type: ignore[assignment]
    mean = sum(used.values()) / len(used)
    print(
        f"steps of {options.step} s: busy {sum(used.values()) / passed / options.engines:.1%}, "
        f"{account.steps / passed:.1f} steps/s, shares of keys {min(used.values()) / mean - 1:+.1%} to "
        f"{max(used.values()) / mean - 1:+.1%} of the mean, {moves} moves"
    )


def measure(url: str, account: Account, seconds: float) -> tuple[float, float, int, int]:
    """Seconds that passed, processor seconds of this process, requests that it answered, models that moved."""
    counted, cpu = answered(url), time.process_time()
    account.began, account.steps, moves = time.monotonic(), 0, account.moves
    time.sleep(seconds)
    account.ended = time.monotonic()
    cpu = time.process_time() - cpu
    return account.ended - account.began, cpu, answered(url) - counted, account.moves - moves


def answered(url: str) -> int:
    """HTTP requests that the service has answered."""
    asked = Request(f"{url}/metrics", headers={"x-api-key": "tml-number-0"})
    with urlopen(asked) as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("tinkex_http_requests_total")
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--keys", type=int, default=50)
    parser.add_argument("--step", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm", type=float, default=8.0)
    parser.add_argument("--rate", choices=["passes", "samples"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        asyncio.run(Load(arguments.load, arguments).run())
    else:
        main(arguments)
