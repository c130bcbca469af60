"""Cost of waiting for the disk: create_session, a sample, a step and a save, with and without it.

Two services run side by side and are asked by turns, so that both see the same machine. One commits to SQLite as
always (synchronous=FULL), the other without waiting for the disk (NORMAL).

    python benchmarks/durability.py
    python benchmarks/durability.py --before DIRECTORY    # the other service is that of another `src`
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.api import Api

_SERVE: Final = "from tinkex.cli.main import main; main()"
#: The same, with commits that do not wait for the disk.
_SERVE_LAZILY: Final = (
    "from functools import partialmethod; from tinkex.server.store import Store; "
    "Store._transaction = partialmethod(Store._transaction, durable=False); " + _SERVE
)


def started(stack: ExitStack, code: str, source: Path | None = None) -> Api:
    """A user of a new service; `source` is the `src` that it runs, if not the installed one."""
    data = stack.enter_context(tempfile.TemporaryDirectory())
    options = ["serve", "--port=0", f"--data-dir={data}", "--base-model=tinkex/tiny"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options, "--engine=fake"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ if source is None else {**os.environ, "PYTHONPATH": str(source)},
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    return stack.enter_context(Api(url))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument(
        "--before", type=Path, help="the src of another version, as the first service"
    )
    given = options.parse_args()
    rounds, before = given.rounds, given.before
    first = "without waiting" if before is None else "before"
    with ExitStack() as stack:
        other = _SERVE_LAZILY if before is None else _SERVE
        users = [started(stack, other, before), started(stack, _SERVE)]
        models = [user.model() for user in users]
        samplers = [user.sampler() for user in users]
        work: dict[str, Callable[[int], object]] = {
            "create_session": lambda which: users[which].session(),
            "sample": lambda which: samplers[which].sample(),
            "step": lambda which: models[which].step(),
            "save": lambda which: models[which].save(f"c{time.time_ns()}"),
        }
        for name, do in work.items():
            seconds: tuple[list[float], list[float]] = ([], [])
            for number in range(rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    begun = time.perf_counter()
                    do(which)
                    seconds[which].append(time.perf_counter() - begun)
            without, with_disk = (1000 * statistics.median(each) for each in seconds)
            print(
                f"{name:15} {without:7.2f} ms {first}, {with_disk:7.2f} ms now: "
                f"{with_disk / without:.2f} x"
            )


if __name__ == "__main__":
    main()
