"""Where people and programs find a trained model: the dashboard, the OpenAI-compatible API, a line for curl."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from tinkex.config import LOCAL, read_env

__all__ = ["Addresses", "can_press_a_key", "found_here", "wait_for_key"]


@dataclass(frozen=True)
class Addresses:
    """The addresses of one run on a tinkex service."""

    url: str
    run_id: str

    @property
    def dashboard(self) -> str:
        """The page of the run, with its curves."""
        return f"{self.url}/#/run/{self.run_id}"

    @property
    def openai(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.url}/v1"

    def curl(self, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> str:
        """A shell command that prints the most likely answer of a model, for a service that needs no key."""
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        return (
            f"curl {self.openai}/chat/completions -H 'content-type: application/json' \\\n"
            f"  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )


def found_here(base_url: str, run_id: str) -> Addresses | None:
    """The addresses of a run on the service of this machine's data directory.

    None for any other service: it may have no dashboard.
    """
    from tinkex._local import running

    here = running()
    if here is not None and base_url in {LOCAL, here}:
        return Addresses(here, run_id)
    return None


def can_press_a_key() -> bool:
    """Whether a person reads stdout on a terminal and can press a key; in CI nobody can, even with a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and read_env("CI") is None


def wait_for_key(prompt: str) -> None:
    """Wait for any key, or Ctrl-C, or the end of the terminal."""
    click.pause(prompt, err=True)
