"""Constraints on sampled text: a JSON schema, a regular expression or a Lark grammar, by llguidance.

A compiled grammar is kept and copied for every sequence that uses it. Whether it allows one token is quick to tell; the
mask of all allowed tokens takes up to a thousand times as long, so it is computed only if a drawn token is not allowed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from .values import Array, Constraint

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher
    from llguidance._lib import JsonCompileOptions

__all__ = ["Grammars", "Matcher", "allowed_tokens"]

#: Compiled grammars that are kept.
_KEPT: Final = 256
#: JSON without optional white space: small models otherwise emit it without end.
_JSON_OPTIONS: Final[JsonCompileOptions] = {"whitespace_flexible": False}


class Matcher:
    """Position of one sequence in its grammar. `ends` are the tokens that end the sequence."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ends: Collection[int], model_ends: Sequence[int]
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends, self._end_list = frozenset(ends), list(ends)
        self._model_ends = list(model_ends)
        self._error = ""

    @property
    def failure(self) -> RequestFailedError | None:
        """The error if the grammar reached a limit of llguidance, so that the sequence cannot continue."""
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
        return token not in self._model_ends and self._matcher.validate_tokens([token]) == 1

    def take(self, token: int) -> bool:
        """Advance by a drawn token; True if nothing may follow it."""
        if token in self._ends:
            return True
        self._matcher.consume_token(token)
        self._note_error()
        return self._matcher.is_stopped()

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self._error = _first_lines(self._matcher.get_error())

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
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    bits = allocate_token_bitmask(len(matchers), max(each._vocab_size for each in matchers))
    sound = [(each._matcher, row) for row, each in enumerate(matchers) if not each._error]
    fill_next_token_bitmask_par(_executor(), sound, bits)
    return [each._allowed(row) for each, row in zip(matchers, bits, strict=True)]


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(os.cpu_count() or 1)


class Grammars:
    """The grammars of one base model; reads its tokenizer when a grammar is first needed."""

    def __init__(self, directory: Path, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def check(self, constraint: Constraint) -> None:
        """Refuse a constraint that cannot be compiled or that no text matches."""
        self._get(constraint)

    def matcher(self, constraint: Constraint, ends: Collection[int]) -> Matcher:
        """A matcher at the start of the text; `ends` are the tokens that end the sequence."""
        compiled = self._get(constraint).deep_copy()
        return Matcher(compiled, self._vocab_size, ends, self._end_tokens)

    def _get(self, constraint: Constraint) -> Any:
        if constraint not in self._compiled:
            self._compiled[constraint] = self._compile(constraint)
            if len(self._compiled) > _KEPT:
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
    return LLParserLimits(verbose_errors=False)


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind == "json_schema":
        if not constraint.text.startswith("{"):
            raise _refused(constraint, "must be an object")
        grammar: str = LLMatcher.grammar_from_json_schema(constraint.text, defaults=_JSON_OPTIONS)
        return grammar
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(constraint.text))
    return str(LLMatcher.grammar_from_lark(constraint.text))


def _refused(constraint: Constraint, why: str) -> InvalidInputError:
    return InvalidInputError(why, field=f"sampling_params.{constraint.kind}")


def _first_lines(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or "it is not valid"
