"""What the benchmarks share: the official SDK in its own environment, and tables of ratios.

Every figure is taken from both packages in one run, because the machines these run on are noisy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
OFFICIAL_VERSION = "0.36.0"


def official_python() -> str:
    """The interpreter of an environment with the official SDK, made the first time."""
    environment = ROOT / ".scratch" / f"bench-tinker-{OFFICIAL_VERSION}"
    python = environment / "bin" / "python"
    if not (environment / ".ready").exists():
        print(f"installing tinker=={OFFICIAL_VERSION} …", file=sys.stderr)
        venv.create(environment, with_pip=True, clear=True)
        wanted = [f"tinker=={OFFICIAL_VERSION}", "uvloop", "httptools"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (environment / ".ready").touch()
    return str(python)


def measure(python: str, script: str, *arguments: str) -> dict[str, float]:
    """Run a measuring script and read the JSON line it ends with."""
    run = subprocess.run(
        [python, str(HERE / script), *arguments], capture_output=True, text=True, timeout=900
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{script} printed no figures:\n{run.stderr[-3000:]}")
    return json.loads(lines[-1])


def both(script: str, *arguments: str, rounds: int = 2) -> tuple[dict, dict]:
    """The best of a few rounds for each package, taken in turns."""
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    interpreters = {"tinker": official_python(), "tinkex": sys.executable}
    for _ in range(rounds):
        for module, best in (("tinker", theirs), ("tinkex", ours)):
            for name, value in measure(interpreters[module], script, module, *arguments).items():
                better = max if name.endswith("_per_s") else min
                best[name] = better(best.get(name, value), value)
    return ours, theirs


def table(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Print the figures; a ratio above 1 is in our favour."""
    print(f"{'figure':34}{'official':>12}{'tinkex':>12}{'times better':>14}")
    for name in ours:
        mine, other = ours[name], theirs.get(name)
        if other is None:
            print(f"{name:34}{'':>12}{mine:>12.3f}")
            continue
        ratio = (mine / other if name.endswith("_per_s") else other / mine) if mine and other else 0
        print(f"{name:34}{other:>12.3f}{mine:>12.3f}{ratio:>14.2f}")
