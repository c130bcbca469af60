"""Environments of their own for packages that the project itself does not depend on, under `.scratch`."""

from __future__ import annotations

import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]


def environment(
    name: str, *packages: str, without: Sequence[str] = (), constrained: bool = True
) -> Path:
    """The Python interpreter of an environment with these packages. Created once, kept until `make clean`.

    `without` are packages that others bring and that are removed; `constrained` keeps the versions of the project.
    """
    home = ROOT / ".scratch" / name
    python, ready = home / "bin" / "python", home / ".ready"
    home.parent.mkdir(exist_ok=True)
    with FileLock(f"{home}.lock"):  # tests run in several processes
        if not ready.exists():
            _install(home, python, packages, constrained=constrained)
            if without:
                pip = [str(python), "-m", "pip"]
                subprocess.run([*pip, "uninstall", "--quiet", "--yes", *without], check=True)
            ready.touch()
    return python


def _install(home: Path, python: Path, packages: tuple[str, ...], *, constrained: bool) -> None:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    constraint = ["--constraint", str(ROOT / "constraints.txt")] if constrained else []
    install = subprocess.run(
        [python, "-m", "pip", "install", *constraint, *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if install.returncode:
        said = install.stderr.strip().splitlines() or ["pip gave no reason"]
        # pip may print advice to upgrade after the actual error.
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        pytest.skip(f"{', '.join(packages)} could not be installed: {reason}")
