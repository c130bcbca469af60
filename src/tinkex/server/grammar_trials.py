"""Has constraints compiled on trial before an engine sees them: by a process that may be killed, as an engine may not.

An engine samples for all keys. A constraint that it cannot compile in a second or two would make all of them wait, and one
that fills its memory would end it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from tinkex._python import PYTHON
from tinkex.engine.base_models import PreparedModel
from tinkex.engine.values import Constraint
from tinkex.errors import InternalServerError, InvalidInputError

__all__ = ["GrammarTrials", "Schema"]

T = TypeVar("T")

#: Processes that compile. Each key uses one at a time.
_PROCESSES: Final = 2
#: Answers that are remembered.
_KEPT: Final = 4096
#: Seconds to wait for an answer. It is long: the process itself ends when it has computed for too long.
_PATIENCE: Final = 120.0


@dataclass(frozen=True)
class Schema:
    """A JSON schema of a request, and the field that has it."""

    field: str
    schema: Mapping[str, Any]


class GrammarTrials:
    """The trials of one service. `seconds` of computing is what compiling the constraint of a request may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slots = asyncio.Semaphore(_PROCESSES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._idle: list[Process] = []
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def check(self, owner: str, model: PreparedModel, constraint: Constraint) -> None:
        """Refuse a constraint that an engine cannot compile, or not soon enough."""
        described = {
            "directory": str(model.directory),
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
        }
        asked = {"model": described, "kind": constraint.kind, "text": constraint.text}
        found = await self._tried(owner, json.dumps(asked).encode())
        if found:
            field = found.get("field", f"sampling_params.{constraint.kind}")
            raise InvalidInputError(found["complaint"], field=field)

    async def check_schemas(
        self,
        owner: str,
        schemas: Sequence[Schema],
        in_thread: Callable[..., Awaitable[bytes]],
    ) -> None:
        """Refuse schemas of which one cannot be followed. `in_thread` runs what may take a while."""
        if not schemas:
            return
        found = await self._tried(owner, await in_thread(owner, _question, schemas))
        if found:
            field = schemas[found.get("place", 0)].field
            complaint = f"is not a JSON schema that can be followed: {found['complaint']}"
            raise InvalidInputError(complaint[:400], field=field)

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _tried(self, owner: str, question: bytes) -> dict[str, Any]:
        """The answer to a question: what is wrong, or nothing."""
        digest = sha256(question).digest()
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn:
            if digest not in self._known:
                async with self._slots:
                    self._known[digest] = await self._answer(question)
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(digest)
            return self._known[digest]

    async def _answer(self, question: bytes) -> dict[str, Any]:
        process = self._living() or await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(_PATIENCE):
                with suppress(ConnectionError):
                    process.stdin.write(question + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
        except TimeoutError:
            pass
        finally:
            if line:
                self._idle.append(process)
            else:  # it has ended, or this request was cancelled
                await asyncio.shield(_end(process))
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if process.returncode is not None and process.returncode >= 0:
            raise InternalServerError(
                f"The process that compiles constraints ended with status {process.returncode}."
            )
        return {  # killed by a signal
            "complaint": f"takes more than {self._seconds:g} seconds of computing, or too much memory, to compile; "
            "simplify it. The limit is the service's setting max_grammar_seconds"
        }

    def _living(self) -> Process | None:
        """A process that waits for questions; one that was killed meanwhile would be taken for its question's fault."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def _started(self) -> Process:
        command = *PYTHON, "-m", "tinkex.engine.grammar_trial", str(self._seconds)
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )


def _question(schemas: Sequence[Schema]) -> bytes:
    texts = [json.dumps(each.schema) for each in schemas]
    return json.dumps({"schemas": texts}).encode()


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            # Not `process.kill`: it would take the status of a process that has just ended from asyncio.
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
