"""Recovery time after a crash, and the cost of snapshots.

    python benchmarks/recovery.py [--model HuggingFaceTB/SmolLM2-135M-Instruct] [--rank 32] [--seconds 120]

Recovery: a run of steps of 4 x 64 tokens, then `kill -9` of the engine, later of the service, which is started again;
the seconds from the kill to the next result are counted, with everything that has to be done again.

Snapshots: three services take turns, step by step: one never writes any, one every 30 seconds of work, which is the
default, one all the time. Single steps are noisy and snapshots rare, so the price is told in two ways: as the
difference of the first two in all their steps, and as what one snapshot adds where they are many, spread over 30
seconds; the latter also in seconds of the processor, which do not depend on what else the machine does. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import tinkex

ROWS, WIDTH = 4, 64
DEFAULT, NEVER = 30.0, 1e9
ADAM = tinkex.AdamParams(learning_rate=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120.0, help="of work for each service")
    parser.add_argument("--steps", type=int, default=20, help="to be done again after a crash")
    options = parser.parse_args()
    found = {
        "model": options.model,
        "rank": options.rank,
        "tokens": ROWS * WIDTH,
        "recovery": recovery(options),
        "snapshots": snapshots(options),
    }
    print(json.dumps(found, indent=1))


class Served:
    """A service that can be killed and comes back at the same address, and one run of it."""

    def __init__(self, options: Any, snapshot_every: float) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tinkex-recovery-")
        self._data = Path(self._directory.name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "tinkex", "serve", f"--port={port}"),
            *(f"--base-model={options.model}", f"--data-dir={self._data}"),
            f"--snapshot-every={snapshot_every}",
        ]
        self.start()
        self._client = tinkex.ServiceClient(
            base_url=f"http://127.0.0.1:{port}", api_key="tml-local", telemetry_enabled=False
        )
        self._training = self._client.create_lora_training_client(options.model, options.rank)
        self._chance = random.Random(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close().result()
        self._process.terminate()
        self._process.wait()
        self._directory.cleanup()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def kill_service(self) -> None:
        self._process.kill()
        self._process.wait()
        self.start()

    def kill_engine(self) -> None:
        for child in self._children():
            os.kill(child, signal.SIGKILL)

    def _children(self) -> list[int]:
        pid = self._process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    @property
    def processor_seconds(self) -> float:
        ticks = 0
        for pid in (self._process.pid, *self._children()):
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
        return ticks / os.sysconf("SC_CLK_TCK")

    def step(self) -> float:
        """Train a step; the seconds it took."""
        rows = [[self._chance.randrange(256) for _ in range(WIDTH + 1)] for _ in range(ROWS)]
        data = [
            tinkex.Datum(
                tinkex.ModelInput.from_ints(row[:-1]),
                {"target_tokens": row[1:], "weights": [1.0] * WIDTH},
            )
            for row in rows
        ]
        began = time.perf_counter()
        self._training.forward_backward(data, "cross_entropy")
        self._training.optim_step(ADAM).result()
        return time.perf_counter() - began

    @property
    def snapshot(self) -> int:
        """After how many changes the last snapshot was taken; 0 if there is none."""
        for current in self._data.glob("snapshots/*/current.json"):
            return int(json.loads(current.read_text())["changes"])
        return 0

    @property
    def snapshot_bytes(self) -> int:
        return sum(
            file.stat().st_size for file in self._data.glob(f"snapshots/*/{self.snapshot}/*")
        )


def recovery(options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Served(options, NEVER) as served:  # the whole run is replayed
        served.step()
        steps: list[float] = []
        for what, kill in (("engine", served.kill_engine), ("service", served.kill_service)):
            steps += [served.step() for _ in range(options.steps)]
            began = time.perf_counter()
            kill()
            served.step()
            found[what] = {
                "seconds_to_next_result": round(time.perf_counter() - began, 2),
                "steps_done_again": len(steps),
                "which_took": round(sum(steps), 2),
            }
            steps.append(statistics.median(steps))  # in place of the step that waited
    return found


def snapshots(options: Any) -> dict[str, Any]:
    kinds = {"never": NEVER, "default": DEFAULT, "always": 0.0}
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    taken: dict[str, set[int]] = {kind: set() for kind in kinds}
    with ExitStack() as running:
        services = {
            kind: running.enter_context(Served(options, every)) for kind, every in kinds.items()
        }
        for served in services.values():
            served.step()
        spent = {kind: -served.processor_seconds for kind, served in services.items()}
        order = list(kinds)
        while sum(steps["default"]) < options.seconds:
            random.shuffle(order)
            for kind in order:
                steps[kind].append(services[kind].step())
                taken[kind].add(services[kind].snapshot)
        for kind, served in services.items():
            spent[kind] += served.processor_seconds
        size = services["always"].snapshot_bytes
    mean = {kind: statistics.fmean(seconds) for kind, seconds in steps.items()}
    median = {kind: statistics.median(seconds) for kind, seconds in steps.items()}
    counted = {kind: len(numbers - {0}) for kind, numbers in taken.items()}
    many = max(1, counted["always"])
    extra = (median["always"] - median["never"]) * len(steps["always"]) / many
    extra_spent = (spent["always"] - spent["never"]) / many
    of_processor = spent["never"] / sum(steps["never"])  # cores in use, on average
    return {
        "steps_each": len(steps["never"]),
        "snapshots": counted,
        "snapshot_megabytes": round(size / 1e6, 1),
        "ms_per_step": {kind: round(1000 * value, 1) for kind, value in mean.items()},
        "median_ms_per_step": {kind: round(1000 * value, 1) for kind, value in median.items()},
        "share_as_measured": round(mean["default"] / mean["never"] - 1, 4),
        "seconds_per_snapshot": round(extra, 3),
        "share_by_snapshot": round(extra / DEFAULT, 4),
        "processor_seconds_per_step": round(spent["never"] / len(steps["never"]), 3),
        "processor_seconds_per_snapshot": round(extra_spent, 3),
        "share_by_processor": round(extra_spent / (DEFAULT * of_processor), 4),
    }


if __name__ == "__main__":
    main()
