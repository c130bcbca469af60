"""What an open page of the dashboard costs training: time and CPU of a step with it and without it, by turns.

python benchmarks/page_cost.py [--model NAME] [--tokens NUMBER] [--pairs NUMBER] [--seconds SECONDS] [--fill STEPS]
    [--engine torch|fake] [--pause SECONDS]

Service, client and browser are processes of their own, and no debugger is attached to the browser: one would see every
request of the page and take time itself. On a machine without a graphics card the browser paints in software, which costs
more than on a screen. Beside other work only the CPU is worth reading, best of all with an engine that computes nothing
(`--engine fake --model tinkex/tiny --pause 0.7`). Needs a Chromium browser.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tinkex
from tinkex import types

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
]
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(address: str, method: str = "GET") -> bytes:
    request = urllib.request.Request(address, method=method)
    answer: bytes = _HTTP.open(request, timeout=20).read()
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(command: list[str], address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers at an address, ended at the end."""
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                get(address)
                break
            except OSError:
                if time.monotonic() > deadline or started.poll() is not None:
                    raise
                time.sleep(0.2)
        yield started
    finally:
        started.terminate()
        started.wait()


class Tab:
    """A page in a browser, opened and closed through the browser's own address for that."""

    def __init__(self, browser: str, address: str) -> None:
        self._browser = browser
        self._address = address.replace("#", "%23")
        self._opened: str | None = None

    def show(self, wanted: bool) -> None:
        if wanted and self._opened is None:
            said = json.loads(get(f"{self._browser}/json/new?{self._address}", "PUT"))
            self._opened = said["id"]
            time.sleep(3)  # it has loaded
        elif not wanted and self._opened is not None:
            get(f"{self._browser}/json/close/{self._opened}")
            self._opened = None
            time.sleep(1)


# -- CPU ------------------------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, to_do = [], [root]
    while to_do:
        found.append(to_do.pop())
        to_do += children.get(found[-1], [])
    return found


def cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: the CPU clock of a process
    except OSError:
        return 0.0


def part_of_browser(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "browser: gone"
    kind = re.search(r"--utility-sub-type=([a-z]+)", line) or re.search(r"--type=([a-z]+)", line)
    return f"browser: {kind.group(1) if kind else 'main'}"


# -- turns ----------------------------------------------------------------------------------------


def a_datum(tokens: int) -> types.Datum:
    numbers = list(range(1, tokens + 2))
    inputs = {"target_tokens": numbers[1:], "weights": [1.0] * tokens}
    return types.Datum(types.ModelInput.from_ints(numbers[:-1]), inputs)


def step(training: Any, datum: types.Datum) -> None:
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()


def turn(
    training: Any, datum: types.Datum, names: dict[int, str], seconds: float, pause: float
) -> Counter[str]:
    """Milliseconds of time and CPU of one step."""
    before = {pid: cpu_seconds(pid) for pid in names}
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step(training, datum)
        time.sleep(pause)
        steps += 1
    found: Counter[str] = Counter({"time": (time.perf_counter() - start) / steps * 1000})
    for pid, name in names.items():
        found[name] += (cpu_seconds(pid) - before[pid]) / steps * 1000
    return found


def report(closed: list[Counter[str]], opened: list[Counter[str]]) -> None:
    def median(turns: list[Counter[str]], name: str) -> float:
        return statistics.median(each[name] for each in turns)

    whole = median(closed, "time")
    print(f"{'ms per step':<26}{'closed':>10}{'open':>10}{'more':>10}{'% of a step':>14}")
    added = 0.0
    for name in sorted({name for each in closed + opened for name in each}):
        without, with_page = median(closed, name), median(opened, name)
        more = with_page - without
        added += more if name == "service" or name.startswith("browser") else 0.0
        print(f"{name:<26}{without:10.2f}{with_page:10.2f}{more:10.2f}{more / whole * 100:14.2f}")
    print(f"{'service and browser':<46}{added:10.2f}{added / whole * 100:14.2f}")
    ratios = [page["time"] / none["time"] for none, page in zip(closed, opened, strict=True)]
    print("pairs:", " ".join(f"{(ratio - 1) * 100:+.1f} %" for ratio in ratios))
    print(f"slower with the page open: {(statistics.median(ratios) - 1) * 100:+.1f} % (at most 2)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--engine", default="torch", choices=("torch", "fake"))
    parser.add_argument("--tokens", type=int, default=1024, help="of one step")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one turn")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--fill", type=int, default=0, help="steps before the first turn")
    options = parser.parse_args()
    service, browser = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tinkex_command = str(Path(sys.executable).with_name("tinkex"))
        serve = [tinkex_command, "serve", "--port", service.rpartition(":")[2]]
        serve += ["--data-dir", str(scratch / "data"), "--base-model", options.model]
        serving = stack.enter_context(
            process([*serve, "--engine", options.engine], f"{service}/api/v1/healthz")
        )
        browse = [shutil.which("chromium") or "chromium", *FLAGS]
        browse += [f"--remote-debugging-port={browser.rpartition(':')[2]}"]
        browse += [f"--user-data-dir={scratch / 'profile'}", "about:blank"]
        browsing = stack.enter_context(process(browse, f"{browser}/json/version"))
        client = stack.enter_context(
            tinkex.ServiceClient(base_url=service, api_key="tml-local", telemetry_enabled=False)
        )
        training, datum = (
            client.create_lora_training_client(options.model, rank=8),
            a_datum(options.tokens),
        )
        for _ in range(options.fill + 3):
            step(training, datum)
        tab = Tab(browser, f"{service}/#/run/{training.model_id}")
        closed: list[Counter[str]] = []
        opened: list[Counter[str]] = []
        for number in range(2 * options.pairs):
            watched = number % 2 == (number // 2) % 2  # each kind is as often the first of its pair
            tab.show(watched)
            step(training, datum)
            names = {pid: part_of_browser(pid) for pid in descendants(browsing.pid)}
            names |= dict.fromkeys(descendants(serving.pid), "engine")
            names |= {serving.pid: "service", os.getpid(): "client"}
            found = turn(training, datum, names, options.seconds, options.pause)
            (opened if watched else closed).append(found)
        report(closed, opened)


if __name__ == "__main__":
    main()
