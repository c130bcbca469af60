"""Constraints on sampled text: a JSON schema, a regular expression or a Lark grammar, by llguidance.

A compiled grammar is kept and copied for every sequence that uses it. Whether it allows one token is quick to tell; the
mask of all allowed tokens takes up to a thousand times as long, so it is computed only if a drawn token is not allowed.

Two things bound the cost of a constraint. The service has it compiled in another process first (`grammar_trial`), which is
killed if that takes too long. And the time spent on following it is measured: a request whose constraint takes too much
of it fails, before it slows down the others in its batch for long.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from .values import Array, Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

__all__ = ["Effort", "Grammars", "Matcher", "allowed_tokens", "schema_complaint"]

#: Compiled grammars that are kept. One may take 30 MB, most a few hundred kB.
_KEPT: Final = 32
#: States of a grammar's lexer; a schema has some hundreds. A hundred thousand take about 30 MB.
_MAX_STATES: Final = 100_000
#: Seconds of computing that the constraint of one request may take: at once, and for every token it draws.
_BURST: Final = 2.0
_PER_TOKEN: Final = 0.005
#: JSON without optional white space: small models otherwise emit it without end.
_JSON_OPTIONS: Final[JsonCompileOptions] = {"whitespace_flexible": False}


class Effort:
    """How much computing the constraint of one request has taken, over all of its sequences."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._tokens = 0

    @property
    def excess(self) -> str:
        """What is wrong, if the constraint has taken too long."""
        if self._seconds <= _BURST + _PER_TOKEN * self._tokens:
            return ""
        return (
            f"following it took {self._seconds:.1f} seconds of computing for {self._tokens} tokens"
        )

    def drew(self) -> None:
        self._tokens += 1

    def measure(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run some work of the constraint. Sequences may do so at the same time, in threads."""
        started = self._clock()
        found = work(*arguments)
        self._seconds += self._clock() - started
        return found


class Matcher:
    """Position of one sequence in its grammar. `ends` are the tokens that end the sequence."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        ends: Collection[int],
        model_ends: Sequence[int],
        effort: Effort,
    ) -> None:
        self._matcher = matcher
        self._effort = effort
        self._vocab_size = vocab_size
        self._ends, self._end_list = frozenset(ends), list(ends)
        self._model_ends = list(model_ends)
        self._error = ""

    @property
    def failure(self) -> RequestFailedError | None:
        """Why the sequence cannot go on: the grammar reached a limit of llguidance, or takes too long."""
        if not self._error:
            return None
        return RequestFailedError(
            f"The constraint cannot be followed further: {self._error}; simplify it.",
            category=RequestErrorCategory.User,
        )

    def accepts(self, token: int) -> bool:
        """Whether a token may come next. An end token of the model that is not in `ends` may not."""
        if self._error:
            return True
        if token in self._ends:
            return self._matcher.is_accepting()
        if token in self._model_ends:
            return False
        return bool(self._effort.measure(self._matcher.validate_tokens, [token]) == 1)

    def take(self, token: int) -> bool:
        """Advance by a drawn token; True if nothing may follow it."""
        if token in self._ends:
            return True
        self._effort.measure(self._matcher.consume_token, token)
        self._effort.drew()
        self._note_error()
        return self._matcher.is_stopped()

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self._error = _first_lines(self._matcher.get_error())
        else:
            self._error = self._effort.excess

    def _fill(self, bits: Array) -> None:
        """Write the mask of the tokens that may come next."""
        if not self._error:
            self._effort.measure(
                self._matcher.unsafe_compute_mask_ptr, bits.ctypes.data, bits.nbytes
            )

    def _allowed(self, bits: Array) -> Array:
        """The tokens that may come next, from the mask of llguidance."""
        self._note_error()
        if self._error:
            bits[:] = -1
        flags = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        allowed = flags.view(np.bool_)
        model_ends = allowed[self._model_ends]
        allowed[self._model_ends] = False  # they end the text only if the request says so
        allowed[self._end_list] = bool(self._error) or self._matcher.is_accepting()
        tokens: Array = np.flatnonzero(allowed)
        return tokens if len(tokens) else np.array(self._model_ends)[model_ends]


def allowed_tokens(matchers: Sequence[Matcher]) -> list[Array]:
    """The tokens that may come next in each sequence, in ascending order; computed in parallel."""
    from llguidance.numpy import allocate_token_bitmask

    bits = allocate_token_bitmask(len(matchers), max(each._vocab_size for each in matchers))
    if len(matchers) == 1:
        matchers[0]._fill(bits[0])
    else:  # in threads of our own, so that each one's time is known; the work itself needs no GIL
        list(_threads().map(Matcher._fill, matchers, bits))
    return [each._allowed(row) for each, row in zip(matchers, bits, strict=True)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tinkex-masks")


class Grammars:
    """The grammars of one base model; reads its tokenizer when a grammar is first needed."""

    def __init__(
        self, directory: Path, vocab_size: int, end_tokens: Sequence[int], kept: int = _KEPT
    ) -> None:
        self._directory = directory
        self._kept = kept
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def read_vocabulary(self) -> None:
        """Read the tokenizer now."""
        self._vocabulary()

    def check(self, constraint: Constraint) -> None:
        """Refuse a constraint that cannot be compiled or that no text matches."""
        self._get(constraint)

    def matcher(
        self, constraint: Constraint, ends: Collection[int], effort: Effort | None = None
    ) -> Matcher:
        """A matcher at the start of the text; `ends` are the tokens that end it, `effort` that of its request."""
        compiled = self._get(constraint).deep_copy()
        return Matcher(compiled, self._vocab_size, ends, self._end_tokens, effort or Effort())

    def _get(self, constraint: Constraint) -> Any:
        if constraint not in self._compiled:
            self._compiled[constraint] = self._compile(constraint)
            if len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return self._compiled[constraint]

    def _compile(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary(), _grammar(constraint), log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refused(constraint, _first_lines(matcher.get_error()))
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise _refused(constraint, "no text matches it")
        return matcher

    def _vocabulary(self) -> Any:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            file = self._directory / "tokenizer.json"
            if not file.is_file():
                raise InvalidInputError(
                    "constrained sampling needs a base model with a tokenizer.json",
                    field="sampling_params",
                )
            self._tokenizer = LLTokenizer(
                str(file),
                n_vocab=self._vocab_size,
                eos_token=self._end_tokens or None,
            )
        return self._tokenizer


def _limits() -> Any:
    from llguidance import LLParserLimits

    # An error with the parser's state would be pages long and repeat the grammar.
    return LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_STATES)


def schema_complaint(schema: str) -> str:
    """Why a JSON schema cannot be followed; empty if it can."""
    from llguidance import LLMatcher

    try:
        complaint = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        complaint = str(error)
    return str(complaint)


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind == "json_schema":
        if not constraint.text.startswith("{"):
            raise _refused(constraint, "must be an object")
        try:
            return str(LLMatcher.grammar_from_json_schema(constraint.text, defaults=_JSON_OPTIONS))
        except ValueError as error:
            raise _refused(constraint, _first_lines(str(error))) from None
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(constraint.text))
    return str(LLMatcher.grammar_from_lark(constraint.text))


def _refused(constraint: Constraint, why: str) -> InvalidInputError:
    return InvalidInputError(why, field=f"sampling_params.{constraint.kind}")


def _first_lines(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or "it is not valid"
