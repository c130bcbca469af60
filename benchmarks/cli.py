"""Time of `--help` and `version` of both command lines: python benchmarks/cli.py

Both run in turns in one run, and the best of some rounds counts, because the machines these run on are noisy. The target is half
of the official time.
"""

import subprocess
import sys
import time
from pathlib import Path

from side_by_side import official_python, table

ROUNDS = 15
ASKED = {"help_ms": ["--help"], "version_ms": ["version"]}


def milliseconds(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return (time.perf_counter() - start) * 1000


if __name__ == "__main__":
    programs = {
        "official": str(Path(official_python()).parent / "tinker"),
        "tinkex": str(Path(sys.executable).parent / "tinkex"),
    }
    best = {name: dict.fromkeys(ASKED, float("inf")) for name in programs}
    for _ in range(ROUNDS):
        for figure, arguments in ASKED.items():
            for name, program in programs.items():
                taken = milliseconds([program, *arguments])
                best[name][figure] = min(best[name][figure], taken)
    table(best["tinkex"], best["official"])
