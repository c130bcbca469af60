from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import tinkex

from .commands import Outcome, payload, process, run

TINY = "tinkex/tiny"


@dataclass(frozen=True)
class Here:
    """A real service in a separate process, and the commands that users run against it."""

    url: str
    data_dir: Path
    client: tinkex.ServiceClient
    numbers: Iterator[int] = field(default_factory=count)

    def type(self, *arguments: Any, **options: Any) -> Outcome:
        """Run a command in a process of its own; the service is in its environment."""
        return process(*arguments, TINKER_BASE_URL=self.url, **options)

    def ask(self, *arguments: Any, code: int = 0, **options: Any) -> Any:
        """Run a command line with `--format json`; return its output after checking it."""
        command, *rest = arguments
        outcome = self.type(*command.split(), *rest, "--format", "json", **options)
        return payload(command, outcome, code)

    def quick(self, *arguments: Any, **options: Any) -> Outcome:
        """The same in this process, for the many small cases."""
        return run(*arguments, "--base-url", self.url, **options)

    def trained(self) -> Any:
        """A new run."""
        return self.client.create_lora_training_client(TINY, rank=4, seed=next(self.numbers))


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    place = tmp_path_factory.mktemp("service")
    with tinkex.local([TINY], data_dir=place) as client:
        yield Here(client.url, place, client)
