"""Tokens used, by purpose, and their cost.

    prices = Prices({"meta-llama/Llama-3.1-8B": Rates(training=0.40, prefill=0.13, sampled=0.40)})
    print(estimate("meta-llama/Llama-3.1-8B", data=data, steps=100, batch_size=32, prices=prices))
    with Usage(prices) as usage:
        train(client)
    print(usage.summary())

The client counts tokens as the service does: every pass over a training example counts the tokens of its input, with
a custom loss twice; a prompt counts once, however many samples are drawn from it.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from itertools import islice
from operator import add, attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import InvalidInputError

from . import bus
from .events import Event, SampleStop, TrainingPass

if TYPE_CHECKING:
    from tinkex.types import BillingEventInfo, BillingUsageResponse, Datum, ModelInput

__all__ = [
    "CallUsage",
    "Estimate",
    "Prices",
    "Rates",
    "Summary",
    "Tokens",
    "Usage",
    "dollars",
    "estimate",
    "kind_of",
    "tokens_of",
    "total_cost",
]

_MILLION: Final = 1_000_000
#: The price of every model that has no price of its own.
ANY_MODEL: Final = "*"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens by kind."""

    training: int = 0
    prefill: int = 0
    cached_prefill: int = 0
    sampled: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


KINDS: Final = tuple(each.name for each in fields(Tokens))


@dataclass(frozen=True, slots=True)
class Rates:
    """Dollars per million tokens of each kind; None if unknown. `cached_prefill` defaults to `prefill`."""

    training: float | None = None
    prefill: float | None = None
    sampled: float | None = None
    cached_prefill: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            rate = getattr(self, each.name)
            if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
                raise InvalidInputError(f"must be a number, not {rate!r:.80}", field=each.name)
            if rate is not None and not 0 <= rate < math.inf:
                raise InvalidInputError(f"must be 0 or more, not {rate}", field=each.name)

    def cost(self, tokens: Tokens) -> float | None:
        """The cost of tokens; None if the price of a kind that occurs is unknown."""
        cached = self.prefill if self.cached_prefill is None else self.cached_prefill
        rates = (self.training, self.prefill, cached, self.sampled)
        used = [(getattr(tokens, kind), rate) for kind, rate in zip(KINDS, rates, strict=True)]
        return total_cost(
            None if rate is None else count * rate / _MILLION for count, rate in used if count
        )


@dataclass(frozen=True)
class Prices:
    """Rates by model; those under `"*"` are for every other model."""

    rates: Mapping[str, Rates] = field(default_factory=dict)

    def cost(self, model: str | None, tokens: Tokens) -> float | None:
        """The cost of a model's tokens; None if a price is unknown."""
        rates = self.rates.get(model or ANY_MODEL) or self.rates.get(ANY_MODEL)
        return (rates or Rates()).cost(tokens)

    @classmethod
    def read(cls, file: str | Path) -> Prices:
        """Read a file with one table per model: JSON if its name ends in `.json`, else TOML.

        ["meta-llama/Llama-3.1-8B"]
        training = 0.40
        prefill = 0.13
        sampled = 0.40
        """
        path = Path(file)
        parse = json.loads if path.suffix == ".json" else tomllib.loads
        try:
            tables = parse(path.read_text("utf-8"))
        except ValueError as error:  # not valid in its format, or not UTF-8
            raise InvalidInputError(f"{path} is not valid: {error}", field="prices") from None
        if not isinstance(tables, dict):
            raise InvalidInputError(f"{path} must contain a table for each model", field="prices")
        return cls({model: _rates(model, table) for model, table in tables.items()})


def _rates(model: str, table: Any) -> Rates:
    if not isinstance(table, dict) or (unknown := table.keys() - set(KINDS)):
        what = (
            "is not a table"
            if not isinstance(table, dict)
            else f"has unknown keys {sorted(unknown)}"
        )
        raise InvalidInputError(f"{model!r} {what}; known are {', '.join(KINDS)}", field="prices")
    try:
        return Rates(**table)
    except InvalidInputError as error:
        raise InvalidInputError(f"{model!r}: {error}", field="prices") from None


@dataclass(frozen=True, slots=True)
class CallUsage:
    """One call; `run` is a training run, or a sampling session of other weights."""

    call: int
    operation: str
    run: str | None
    model: str | None
    tokens: Tokens


@dataclass(frozen=True)
class Summary:
    """Tokens and dollars by run and model; a cost is None where a price is missing."""

    rows: tuple[tuple[str | None, str | None, Tokens, float | None], ...]

    @property
    def tokens(self) -> Tokens:
        return sum((row[2] for row in self.rows), Tokens())

    @property
    def cost(self) -> float | None:
        return total_cost(row[3] for row in self.rows)

    def __str__(self) -> str:
        heads = ("run", "model", *KINDS, "cost")
        lines = [_cells(*row) for row in self.rows]
        lines.append(_cells("total", "", self.tokens, self.cost))
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (heads, *lines)
        )


def _cells(
    run: str | None, model: str | None, tokens: Tokens, cost: float | None
) -> tuple[str, ...]:
    counts = (f"{getattr(tokens, kind):,}" for kind in KINDS)
    return (
        "–" if run is None else run,
        "–" if model is None else model,
        *counts,
        dollars(cost),
    )


def total_cost(costs: Iterable[float | None]) -> float | None:
    """The sum; None if one cost is unknown."""
    known = list(costs)
    return None if any(cost is None for cost in known) else sum(filter(None, known), 0.0)


def dollars(cost: float | None) -> str:
    return "unknown" if cost is None else f"${cost:,.4f}"


class Usage(bus.Collector):
    """Counts the tokens of all calls while attached, and keeps the latest `keep_calls` calls one by one."""

    kinds = (SampleStop, TrainingPass)

    def __init__(self, prices: Prices | None = None, *, keep_calls: int = 1000) -> None:
        super().__init__()
        self.prices = prices or Prices()
        self._counts: dict[tuple[str | None, str | None], list[int]] = {}
        self._latest: deque[bus.Unmade] = deque(maxlen=keep_calls)

    def count(self, kind: type[Event], events: list[bus.Unmade]) -> None:
        self._latest.extend(events)
        for run, model, counts in map(_counted, events):
            self._add(run, model, counts)

    def _add(self, run: str | None, model: str | None, counts: Iterable[int]) -> None:
        totals = self._counts.get((run, model)) or [0] * len(KINDS)
        self._counts[run, model] = [*map(add, totals, counts)]

    def add_from_service(self, usage: BillingUsageResponse) -> None:
        """Add the usage that the service reports, by session, such as `RestClient.get_billing_usage` returns."""
        for entry in usage.data:
            tokens = tokens_of(entry.event_info)
            if tokens.total:
                with self._lock:
                    self._add(entry.session_id, entry.base_model, astuple(tokens))

    @property
    def calls(self) -> list[CallUsage]:
        self.flush()
        return sorted(map(_call_usage, list(self._latest)), key=attrgetter("call"))

    @property
    def tokens(self) -> Tokens:
        return self.summary().tokens

    @property
    def cost(self) -> float | None:
        """Dollars for all calls; None if a price is missing."""
        return self.summary().cost

    def by_model(self) -> dict[str | None, Tokens]:
        return self._totals(1)

    def by_run(self) -> dict[str | None, Tokens]:
        return self._totals(0)

    def _totals(self, place: int) -> dict[str | None, Tokens]:
        totals: dict[str | None, Tokens] = {}
        for row in self.summary().rows:
            key = row[0] if place == 0 else row[1]
            totals[key] = totals.get(key, Tokens()) + row[2]
        return totals

    def summary(self, run: str | None = None) -> Summary:
        """The usage so far, of one run or of all."""
        self.flush()
        with self._lock:
            counted = {who: Tokens(*counts) for who, counts in self._counts.items()}
        return Summary(
            tuple(
                (*who, tokens, self.prices.cost(who[1], tokens))
                for who, tokens in counted.items()
                if run is None or who[0] == run
            )
        )


def kind_of(billed: BillingEventInfo) -> str | None:
    """The token kind of an entry of the service's bill; None if the entry is not about tokens."""
    return _BILLED.get((billed.type, getattr(billed, "cached", False)))


def tokens_of(billed: BillingEventInfo) -> Tokens:
    """The tokens of an entry of the service's bill."""
    kind = kind_of(billed)
    return Tokens() if kind is None else Tokens(**{kind: getattr(billed, "token_count", 0)})


#: Keys: type of the entry, and whether it came from a cache.
_BILLED: Final = {
    ("training", False): "training",
    ("sampling_prefill", False): "prefill",
    ("sampling_prefill", True): "cached_prefill",
    ("sampling_sample", False): "sampled",
}


def _counted(event: bus.Unmade) -> tuple[str | None, str | None, tuple[int, int, int, int]]:
    known, facts = event.keywords["metadata"], event.args
    run = known.get("model_id") or known.get("sampling_session_id")
    if event.func is TrainingPass:
        counts = (facts[_TRAINED], 0, 0, 0)
    else:
        prompt, cached, sampled = facts[_SAMPLED]
        counts = (0, prompt - cached, cached, sampled)
    return run, known.get("base_model"), counts


_TRAINED: Final = TrainingPass.places["tokens"]
_SAMPLED: Final = slice(SampleStop.places["prompt_tokens"], SampleStop.places["sampled_tokens"] + 1)


def _call_usage(unmade: bus.Unmade) -> CallUsage:
    event: Any = unmade()
    run, model, counts = _counted(unmade)
    return CallUsage(event.id, event.operation, run, model, Tokens(*counts))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected usage of a job; `sampled` is an upper bound, because samples may stop early."""

    tokens: Tokens
    cost: float | None

    def __str__(self) -> str:
        counts = ", ".join(
            f"{getattr(self.tokens, kind):,} {kind.replace('_', ' ')}"
            for kind in KINDS
            if getattr(self.tokens, kind)
        )
        most = "at most " if self.tokens.sampled and self.cost is not None else ""
        return f"{counts or 'no'} tokens; cost {most}{dollars(self.cost)}"


def estimate(
    base_model: str,
    *,
    data: Iterable[Datum] = (),
    steps: int | None = None,
    batch_size: int | None = None,
    custom_loss: bool = False,
    prompts: Iterable[ModelInput] = (),
    num_samples: int = 1,
    max_tokens: int = 0,
    rounds: int = 1,
    prices: Prices | None = None,
) -> Estimate:
    """Price a job before it starts; nothing is sent.

    Each of `steps` trains on the next `batch_size` examples and starts over after the last one. Without `steps` the
    data are used once; without `batch_size` each step uses all of them. Each of `rounds` draws `num_samples` of up to
    `max_tokens` from every prompt.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size), ("num_samples", num_samples)):
        if value is not None and value < 1:
            raise InvalidInputError(f"must be 1 or more, not {value}", field=name)
    lengths = [datum.model_input.length for datum in data]
    if lengths and steps is not None:
        epochs, rest = divmod(steps * (batch_size or len(lengths)), len(lengths))
        trained = epochs * sum(lengths) + sum(islice(lengths, rest))
    else:
        trained = sum(lengths)
    asked = [prompt.length for prompt in prompts]
    tokens = Tokens(
        training=trained * (2 if custom_loss else 1),
        prefill=rounds * sum(asked),
        sampled=rounds * len(asked) * num_samples * max_tokens,
    )
    return Estimate(tokens, (prices or Prices()).cost(base_model, tokens))
