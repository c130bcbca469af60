"""Figures of the dashboard: sizes, first paint, delay of a new step, long plots, many checkpoints, memory of the page.

python benchmarks/dashboard.py [--quick] [--updates NUMBER] [--only memory]

What an open page costs training is measured by page_cost.py.

Needs playwright and a Chromium browser for what a page does; without them those figures are left out.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import tinkex
from tinkex import types
from tinkex.server.dashboard import live, static
from tinkex.server.dashboard.columns import Column
from tinkex.server.dashboard.store import MetricPoint, RunMetrics
from tinkex.server.dashboard.thinning import POINT
from tinkex.server.serve import ServiceThread
from tinkex.server.service import Settings
from tinkex.server.store import CheckpointRow, RunRow, SessionRow, Store

BASE = "tinkex/tiny"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
LORA = {
    "rank": 8,
    "alpha": 16,
    "seed": 1,
    "train_attn": True,
    "train_mlp": True,
    "train_unembed": True,
}


def show(name: str, found: float, unit: str, wanted: float | None = None) -> None:
    limit = "" if wanted is None else f"   (at most {wanted:g})"
    print(f"{name:<62} {found:10.3f} {unit}{limit}", flush=True)


def milliseconds(work: Callable[[], object], times: int = 20) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1000


# -- data ------------------------------------------------------------------------------------------


def fill(data: Path, runs: int, steps: int, checkpoints: int) -> list[str]:
    """Runs with metrics, and checkpoints of the first, written as a service leaves them."""
    store = Store(f"sqlite:///{data / 'tinkex.db'}")
    store.open()
    now, session = datetime.now(UTC), uuid.uuid4().hex
    row = SessionRow(
        session, "local", now, now, ["bench"], None, "1", None, None, {"type": "active"}
    )
    store.add_session(row)
    ids = [f"{session}:train:{number}" for number in range(runs)]
    for number, run_id in enumerate(ids):
        made = now - timedelta(minutes=number)
        store.add_run(
            RunRow(run_id, session, "local", BASE, LORA, {"name": f"run {number}"}, made, made)
        )
        metrics = RunMetrics(data / "metrics" / "of-local" / run_id)
        values = np.exp(-np.arange(steps) / steps * 3) + np.random.default_rng(number).normal(
            0, 0.05, steps
        )
        for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second"):
            metrics.append([MetricPoint(name, 1, 1, 1, 1.0)])
            points = np.zeros(steps, POINT)
            points["step"] = np.arange(2, steps + 2)
            points["tokens"] = points["step"] * 100
            points["time"] = time.time() - steps + points["step"]
            points["value"] = values
            metrics._columns[name].append(points)
    for number in range(checkpoints):
        made = now - timedelta(seconds=number)
        store.put_checkpoint(
            CheckpointRow(ids[0], "training", f"step-{number:05d}", "local", made, 1 << 20)
        )
    store.close()
    return ids


def opened(data: Path) -> ServiceThread:
    return ServiceThread(
        Settings(data_dir=data, base_models=(BASE,), engine="fake", engine_in_process=True)
    )


# -- figures -----------------------------------------------------------------------------------------


def sizes() -> None:
    total = sum(len(asset.compressed) for asset in static.assets().values())
    show("all files of the page, compressed", total / 1000, "kB", 150)


def long_plot(directory: Path, steps: int) -> None:
    column = Column(directory / "0")
    for start in range(0, steps, 100_000):
        points = np.zeros(100_000, POINT)
        points["step"] = np.arange(start, start + 100_000)
        points["value"] = np.random.default_rng(1).normal(size=100_000)
        column.append(points)
    show(
        f"plot of {steps:,} steps, whole, in the store",
        milliseconds(lambda: column.read("step", None, None, 600)),
        "ms",
        50,
    )
    middle = steps / 2
    show(
        "the same, a part of 2,000 steps",
        milliseconds(lambda: column.read("step", middle, middle + 2000, 600)),
        "ms",
        50,
    )
    one = np.zeros(1, POINT)
    show("append of one point", milliseconds(lambda: column.append(one), 200), "ms")


def calls(url: str, ids: list[str]) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        show(
            f"list of {len(ids)} runs, answered",
            milliseconds(lambda: http.get("/local/runs")),
            "ms",
        )
        show(
            "plots of one run, answered",
            milliseconds(lambda: http.get(f"/local/runs/{ids[1]}/metrics?width=600")),
            "ms",
            50,
        )
        show(
            "1,000 checkpoints, answered",
            milliseconds(lambda: http.get(f"/local/runs/{ids[0]}/checkpoints")),
            "ms",
            500,
        )


@contextmanager
def a_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


def browse(url: str, ids: list[str]) -> None:
    with a_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.wait_for_selector("td.name")
        taken = []
        for _ in range(5):
            fresh = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            fresh.goto(url, wait_until="commit")
            fresh.wait_for_selector("td.name")
            taken.append(time.perf_counter() - start)
            fresh.close()
        show(
            f"first look at {len(ids)} runs with 10,000 steps, new page",
            statistics.median(taken),
            "s",
            1,
        )
        start = time.perf_counter()
        page.goto(f"{url}/#/run/{ids[0]}/checkpoints")
        page.wait_for_selector(".checkpoints td.name")
        show("1,000 checkpoints on the screen", time.perf_counter() - start, "s", 0.5)
        _delay(url, page)


def _step(training: Any, data: list[types.Datum]) -> None:
    training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def _data() -> list[types.Datum]:
    tokens = list(range(1, 200))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return [types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)] * 4


#: Resolves in the page when a number of steps is on the screen, and the loss with it.
_SEEN = """async (number) => {
  const seen = () => document.querySelector('figure[aria-label^="loss,"]') && [...document.querySelectorAll('.facts dd')][1]?.textContent === number;
  while (!seen()) await new Promise(requestAnimationFrame);
}"""


def _delay(url: str, page: Any) -> None:
    with tinkex.ServiceClient(base_url=url, api_key="tml-local") as client:
        training = client.create_lora_training_client(BASE, rank=8)
        page.goto(f"{url}/#/run/{training.model_id}")
        taken = []
        for number in range(1, 11):
            _step(training, _data())
            start = time.perf_counter()
            page.evaluate(_SEEN, str(number))
            taken.append(time.perf_counter() - start)
        show("a new step on the screen after its result, median", statistics.median(taken), "s", 1)
        show("the same, slowest of 10", max(taken), "s", 1)


#: The page waits two seconds between two readings of long curves; by this clock they pass in twenty milliseconds.
_HASTE = "const now = performance.now.bind(performance); performance.now = () => now() * 100;"
#: Parts of all updates after which the heap is measured. By the first, plots have as many points as they can have.
_PARTS = (0.3, 0.5, 0.75, 1.0)


def _memory(browser: Any, updates: int) -> None:
    """The heap of a page that shows a run which makes steps all the time, after garbage collection."""
    live.SPACING = 0.01  # type: ignore[misc]  # an hour of updates in two minutes
    live.WAITS["metrics"] = 0.005
    with tempfile.TemporaryDirectory() as scratch:
        service = opened(Path(scratch))
        url = service.start()
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(_HASTE)
        read: list[str] = []
        page.on(
            "response",
            lambda answer: read.append(answer.url) if "/metrics?" in answer.url else None,
        )
        halt = threading.Event()
        try:
            with tinkex.ServiceClient(base_url=url, api_key="tml-local") as client:
                training = client.create_lora_training_client(BASE, rank=8)
                page.goto(f"{url}/#/run/{training.model_id}")
                worker = threading.Thread(target=_steps_until, args=(halt, training))
                worker.start()
                for part in _PARTS:
                    while len(read) < updates * part:
                        page.wait_for_timeout(500)
                    _show_heap(page, len(read))
                halt.set()
                worker.join()
        finally:
            halt.set()
            service.close()
            page.close()


def _steps_until(halt: threading.Event, training: Any) -> None:
    data = _data()
    while not halt.is_set():
        _step(training, data)


def _show_heap(page: Any, updates: int) -> None:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    session.send("HeapProfiler.collectGarbage")
    found = {
        each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]
    }
    session.detach()
    show(f"heap of the page after {updates:,} updates", found["JSHeapUsedSize"] / 1e6, "MB")
    nodes, listeners = found["Nodes"], found["JSEventListeners"]
    print(f"  {nodes:.0f} nodes of the document, {listeners:.0f} listeners", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer runs and steps")
    parser.add_argument("--updates", type=int, default=3600, help="updates while memory is watched")
    parser.add_argument("--only", choices=("memory",), help="one figure of a live page")
    options = parser.parse_args()
    has_browser = shutil.which("chromium") is not None and find_spec("playwright") is not None
    if not has_browser:
        print("there is no chromium, or no playwright: no figures of a page")
    if options.only is not None:
        with a_browser() as browser:
            _memory(browser, options.updates)
        return
    runs, steps = (10, 1_000) if options.quick else (100, 10_000)
    sizes()
    with tempfile.TemporaryDirectory() as scratch:
        long_plot(Path(scratch), 100_000 if options.quick else 1_000_000)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        service = opened(data)
        service.start()  # makes the database
        service.close()
        ids = fill(data, runs, steps, 1_000)
        service = opened(data)
        url = service.start()
        try:
            calls(url, ids)
            if has_browser:
                browse(url, ids)
        finally:
            service.close()
    if has_browser:
        with a_browser() as browser:
            _memory(browser, options.updates)


if __name__ == "__main__":
    main()
