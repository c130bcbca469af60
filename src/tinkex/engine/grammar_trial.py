"""Compiles constraints in a process of its own, to find out whether an engine can: `python -m tinkex.engine.grammar_trial`.

A schema of half a kilobyte can keep llguidance busy for minutes or fill the memory, and nothing can interrupt it. Here
the kernel does: it kills this process when one question has taken more seconds of computing than allowed, or when the
process has too much memory. Whoever waits for the answer sees the end of the pipe.

Questions and answers are lines of JSON on standard input and output.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tinkex.errors import InvalidInputError

from .grammars import Grammars, schema_complaint
from .values import Constraint

__all__ = ["main"]

#: Bytes of this process, of which its vocabularies take some ten million each.
_MEMORY: Final = 2 << 30


class _Trial:
    """Answers questions: whether a constraint can be compiled for a base model, or which of some schemas cannot be."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._grammars: dict[str, Grammars] = {}

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is wrong; empty if nothing is."""
        try:
            grammars = self._of(asked["model"]) if "model" in asked else None
            # Seconds of computing, not of waiting: a busy machine makes no difference.
            signal.setitimer(signal.ITIMER_PROF, self._seconds)
            if grammars is None:
                return _schemas(asked["schemas"])
            grammars.check(Constraint(asked["kind"], asked["text"]))
        except InvalidInputError as error:
            return {"complaint": str(error).removeprefix(f"{error.field}: "), "field": error.field}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {}

    def _of(self, model: Mapping[str, Any]) -> Grammars:
        directory = model["directory"]
        if directory not in self._grammars:
            made = Grammars(Path(directory), model["vocab_size"], model["eos_token_ids"], kept=1)
            made.read_vocabulary()
            self._grammars[directory] = made
        return self._grammars[directory]


def _schemas(schemas: list[str]) -> dict[str, Any]:
    for place, schema in enumerate(schemas):
        if complaint := schema_complaint(schema):
            return {"complaint": complaint, "place": place}
    return {}


def main() -> None:
    """Answer questions until standard input ends; the argument is the seconds of computing that each may take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles Ctrl-C, then closes the pipe
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trial = _Trial(float(sys.argv[1]))
    for line in sys.stdin.buffer:
        answer = trial.answer(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
