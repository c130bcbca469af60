"""Constraints that an engine should never see: they fail their own request, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal

import pytest

from tinkex.engine import base_models
from tinkex.engine.grammars import Effort, Grammars, allowed_tokens
from tinkex.engine.values import Constraint
from tinkex.errors import InternalServerError, InvalidInputError
from tinkex.server import grammar_trials
from tinkex.server.grammar_trials import GrammarTrials, Schema

#: Half a kilobyte that llguidance compiles for longer than anyone has waited.
BOMB = {
    "allOf": [
        {"type": "string", "pattern": f".*{letter}.{{30}}{letter}"}
        for letter in "abcdefghijklmnopqrst"
    ]
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    spec = base_models.parse_spec(base_models.TINY)
    return base_models.prepare(spec, tmp_path_factory.mktemp("models"))


def trial(work, seconds=1.0):
    async def run():
        trials = GrammarTrials(seconds)
        try:
            return await work(trials)
        finally:
            await trials.close()

    return asyncio.run(run())


async def _at_once(_, work, *arguments):
    return work(*arguments)


def test_constraint_that_compiles_too_long_is_refused_by_name(tiny):
    bomb = Constraint("json_schema", json.dumps(BOMB))

    async def work(trials):
        with pytest.raises(InvalidInputError, match="max_grammar_seconds") as caught:
            await trials.check("a", tiny, bomb)
        return caught.value.field

    assert trial(work) == "sampling_params.json_schema"


def test_schema_that_compiles_too_long_is_refused_by_its_place(tiny):
    async def work(trials):
        good = Schema("tools.0", {"type": "object"})
        with pytest.raises(InvalidInputError, match="max_grammar_seconds"):
            await trials.check_schemas("a", [good, Schema("tools.1", BOMB)], _at_once)
        # The next question finds a new process.
        await trials.check_schemas("a", [good], _at_once)
        with pytest.raises(InvalidInputError) as caught:
            await trials.check_schemas("a", [good, Schema("tools.1", {"type": "x"})], _at_once)
        return caught.value.field

    assert trial(work) == "tools.1"


def test_one_key_waits_for_itself_and_not_for_another(tiny):
    """A key that asks for one thing after another uses one process; another key is answered meanwhile."""
    order = []

    async def ask(trials, owner, text):
        with contextlib.suppress(InvalidInputError):
            await trials.check(owner, tiny, Constraint("json_schema", text))
        order.append(owner)

    async def work(trials):
        bomb = json.dumps(BOMB)
        floods = [ask(trials, "hostile", bomb + " " * count) for count in range(3)]
        await asyncio.gather(*floods, ask(trials, "victim", '{"type": "string"}'))

    trial(work)
    assert order.index("victim") <= 1


def test_cancelled_question_ends_its_process(tiny):
    async def work(trials):
        good = [Schema("x", {"type": "object"})]
        await trials.check_schemas("a", good, _at_once)
        (before,) = trials._idle
        asking = asyncio.ensure_future(trials.check_schemas("a", [Schema("x", BOMB)], _at_once))
        for _ in range(10):  # its process has the question now
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await trials.check_schemas("a", [Schema("y", {"type": "array"})], _at_once)
        return before.returncode

    assert trial(work, seconds=60.0) == -signal.SIGKILL


def test_grammar_that_takes_too_long_to_follow_fails_its_sequence(tiny):
    """Every token of an ambiguous grammar takes longer than the one before."""
    grammars = Grammars(tiny.directory, tiny.vocab_size, tiny.eos_token_ids)
    now = iter(range(10_000))
    slow = Effort(clock=lambda: float(next(now)))
    ambiguous = Constraint("grammar", 'start: s\ns: s s | "a" | "b"')
    first = grammars.matcher(ambiguous, tiny.eos_token_ids, slow)
    second = grammars.matcher(ambiguous, tiny.eos_token_ids, slow)
    other = grammars.matcher(ambiguous, tiny.eos_token_ids)
    for _ in range(2):
        *_, (token, *_) = allowed_tokens([first, second, other])
        for each in (first, second, other):
            each.take(int(token))
    assert "seconds of computing" in str(first.failure)
    assert "seconds of computing" in str(second.failure)  # of the same request
    assert other.failure is None


def test_schema_that_is_no_json_is_refused_by_name(tiny):
    grammars = Grammars(tiny.directory, tiny.vocab_size, tiny.eos_token_ids)
    with pytest.raises(InvalidInputError) as caught:
        grammars.check(Constraint("json_schema", '{"a":' * 300 + "1" + "}" * 300))
    assert caught.value.field == "sampling_params.json_schema"


def test_process_that_does_not_start_is_not_the_users_fault(monkeypatch, tiny):
    monkeypatch.setattr(grammar_trials, "PYTHON", [shutil.which("false")])

    async def work(trials):
        with pytest.raises(InternalServerError, match="ended with status 1"):
            await trials.check("a", tiny, Constraint("regex", "a"))

    trial(work)


def test_process_that_is_killed_while_it_waits_is_replaced(tiny):
    async def work(trials):
        await trials.check("a", tiny, Constraint("regex", "a+"))
        (waiting,) = trials._idle
        os.kill(waiting.pid, signal.SIGKILL)
        await waiting.wait()
        await trials.check("a", tiny, Constraint("regex", "b+"))
        (other,) = trials._idle
        return waiting.pid != other.pid

    assert trial(work)
