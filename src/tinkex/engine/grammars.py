"""Constraints on sampled text: a JSON schema, a regular expression or a Lark grammar, by llguidance.

A compiled grammar is kept and copied for every sequence that uses it. The mask of allowed tokens after a drawn token is
computed in a thread while the model computes the next logits, so a constrained sequence costs the batch almost nothing.
llguidance releases the GIL while it computes.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from .values import Array, Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["Grammars", "Matcher"]

#: Compiled grammars that are kept.
_KEPT: Final = 256
#: JSON without optional white space: small models otherwise emit it without end.
_JSON_OPTIONS: Final[JsonCompileOptions] = {"whitespace_flexible": False}


class Matcher:
    """Position of one sequence in its grammar, and the mask of tokens that may come next."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        ends: Collection[int],
        model_ends: Sequence[int],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._model_ends = np.array(model_ends, np.int64)
        self._ends = np.array(sorted(ends), np.int64)
        self._threads = threads
        self._error = ""
        self._next: Future[Array] = threads.submit(self._compute)

    @property
    def failure(self) -> RequestFailedError | None:
        """Why the sequence cannot go on: the grammar reached a limit of llguidance."""
        if not self._error:
            return None
        return RequestFailedError(
            f"The constraint cannot be followed further: {self._error}; simplify it.",
            category=RequestErrorCategory.User,
        )

    def allowed(self) -> Array:
        """Which tokens may come next, as a boolean array of the vocabulary."""
        return self._next.result()

    def take(self, token: int) -> bool:
        """Advance by a drawn token; True if nothing may follow it."""
        if token in self._ends:
            return True
        self._next.result()  # until then, the thread that computes the mask owns the matcher
        self._matcher.consume_token(token)
        self._note_error()
        if self._matcher.is_stopped():
            return True
        self._next = self._threads.submit(self._compute)
        return False

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self._error = _first_lines(self._matcher.get_error())

    def _compute(self) -> Array:
        """The allowed tokens. Where the text may end, these include the tokens that end this sequence."""
        bits = np.full(-(-self._vocab_size // 32), -1, np.int32)
        if not self._error:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._note_error()
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        mask: Array = allowed.astype(bool)
        model_ends = mask[self._model_ends]
        mask[self._model_ends] = False  # they end the text only if the request says so
        mask[self._ends] = bool(self._error) or self._matcher.is_accepting()
        if not mask.any():
            mask[self._model_ends] = model_ends
        return mask


class Grammars:
    """The grammars of one base model; reads its tokenizer when a grammar is first needed."""

    def __init__(self, directory: Path, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._threads = ThreadPoolExecutor(
            max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="tinkex-masks"
        )

    def check(self, constraint: Constraint) -> None:
        """Refuse a constraint that cannot be compiled or that no text matches."""
        self._get(constraint)

    def matcher(self, constraint: Constraint, ends: Collection[int]) -> Matcher:
        """A matcher at the start of the text; `ends` are the tokens that end the sequence."""
        compiled = self._get(constraint).deep_copy()
        return Matcher(compiled, self._vocab_size, ends, self._end_tokens, self._threads)

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
                str(file), n_vocab=self._vocab_size, eos_token=self._end_tokens or None
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
