"""The built wheel in environments without the dev extra, as users install it.

Environments are kept under `.scratch` by the hash of what decides their packages; the wheel is built and installed anew in each
run. The extra `[local]` brings torch and takes minutes, so it is only tried by `make wheel`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from ..cli.commands import Outcome, environment

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    home: Path

    def run(self, program: str, *arguments: str, **settings: str) -> Outcome:
        done = subprocess.run(
            [self.home / "bin" / program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            input="",
            cwd=self.home,  # not in the repository: its sources are not to be found
            env=environment(PYTHONPATH="", **settings),
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def tinkex(self, *arguments: str, **settings: str) -> Outcome:
        return self.run("tinkex", *arguments, **settings)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    _pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT))
    (built,) = place.glob("tinkex-*.whl")
    return built


@pytest.fixture(scope="session")
def base(wheel: Path) -> Installed:
    """What `pip install tinkex` gives."""
    return _installed(wheel, "")


@pytest.fixture(scope="session")
def local(wheel: Path, pytestconfig: pytest.Config) -> Installed:
    """What `pip install 'tinkex[local]'` gives."""
    if not pytestconfig.getoption("--wheel"):
        pytest.skip("`make wheel` installs the extra [local], which takes minutes")
    return _installed(wheel, "[local]")


def _installed(wheel: Path, extra: str) -> Installed:
    decided_by = b"".join(
        [
            sys.version.encode(),
            (ROOT / "pyproject.toml").read_bytes(),
            (ROOT / "constraints.txt").read_bytes(),
        ]
    )
    name = f"wheel-{extra.strip('[]') or 'base'}-{hashlib.sha256(decided_by).hexdigest()[:12]}"
    home = ROOT / ".scratch" / name
    home.parent.mkdir(exist_ok=True)
    python = home / "bin" / "python"
    with FileLock(f"{home}.lock"):  # the tests run in more than one process
        if not (home / ".ready").exists():
            venv.create(home, with_pip=True, clear=True)
            constraint = ["--constraint", str(ROOT / "constraints.txt")]
            _pip(python, "install", *constraint, f"{wheel}{extra}")
            (home / ".ready").touch()
        _pip(python, "install", "--no-deps", "--force-reinstall", str(wheel))
    return Installed(home)


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["pip gave no reason"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        if "No matching distribution" in done.stderr or "onnection" in done.stderr:
            pytest.skip(f"the wheel could not be tried without a package index: {reason}")
        pytest.fail(f"pip {arguments[0]} failed: {reason}\n{done.stderr}")
