"""Official clients, each in its own environment under `.scratch`, with one JSON line per question and answer."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .. import environments

HELPER = Path(__file__).with_name("official_side.py")
#: One release per dialect: JSON with gaps, JSON with protobuf results, protobuf throughout, the newest.
RELEASES = ("0.7.0", "0.18.2", "0.25.0", "0.36.0")


def environment(version: str) -> Path:
    """The Python interpreter with `tinker==version`."""
    return environments.environment(f"tinker-{version}", f"tinker=={version}")


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
