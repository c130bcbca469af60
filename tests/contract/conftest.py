"""Official clients, each in its own environment under `.scratch`, with one JSON line per question and answer."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
HELPER = Path(__file__).with_name("official_side.py")
#: One release per dialect: JSON with gaps, JSON with protobuf results, protobuf throughout, the newest.
RELEASES = ("0.7.0", "0.18.2", "0.25.0", "0.36.0")


def environment(version: str) -> Path:
    """The Python interpreter with `tinker==version`. Created once, kept until `make clean`."""
    home = ROOT / ".scratch" / f"tinker-{version}"
    python, ready = home / "bin" / "python", home / ".ready"
    home.parent.mkdir(exist_ok=True)
    with FileLock(f"{home}.lock"):  # tests run in several processes
        if not ready.exists():
            _install(home, python, version)
            ready.touch()
    return python


def _install(home: Path, python: Path, version: str) -> None:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    constraint = ROOT / "constraints.txt"
    install = subprocess.run(
        [python, "-m", "pip", "install", "--constraint", constraint, f"tinker=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if install.returncode:
        said = install.stderr.strip().splitlines() or ["pip gave no reason"]
        # pip may print advice to upgrade after the actual error.
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        pytest.skip(f"official client {version} could not be installed: {reason}")


class OfficialClient:
    """A process with the official package loaded. `ask` calls a function in `official_side.py`."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.python = environment(version)
        self._process = subprocess.Popen(
            [self.python, HELPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": ""},
            text=True,
        )

    def ask(self, question: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([question, *arguments]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        assert "error" not in answer, f"tinker {self.version}, {question}: {answer['error']}"
        return answer["value"]

    def run(self, script: str, **variables: str) -> str:
        """Run `script` in a new interpreter of this environment; returns its output."""
        finished = subprocess.run(
            [self.python, "-c", script],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return finished.stdout

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def official() -> Iterator[Callable[[str], OfficialClient]]:
    clients: dict[str, OfficialClient] = {}

    def client(version: str) -> OfficialClient:
        if version not in clients:
            clients[version] = OfficialClient(version)
        return clients[version]

    yield client
    for started in clients.values():
        started.close()


@pytest.fixture(scope="session")
def oldest(official: Callable[[str], OfficialClient]) -> OfficialClient:
    return official("0.7.0")


@pytest.fixture(scope="session")
def newest(official: Callable[[str], OfficialClient]) -> OfficialClient:
    return official("0.36.0")


if sys.platform == "win32":  # pragma: no cover
    pytest.skip("the environments are laid out for POSIX", allow_module_level=True)
