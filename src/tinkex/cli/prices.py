"""Options for the prices of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tinkex.telemetry import Prices

__all__ = ["priced"]


def priced(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--prices` and `--price`, as one argument `prices`."""

    @click.option(
        "--prices",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with dollars per million tokens, a table per model; TOML, or .json.",
    )
    @click.option(
        "--price",
        "given",
        multiple=True,
        metavar="KIND=DOLLARS",
        help="Price for models that are not in the file; KIND is training, prefill, cached_prefill or sampled.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, file: Path | None, given: Sequence[str], **options: Any) -> Any:
        return command(*args, prices=_prices(file, given), **options)

    return wrapped


def _prices(file: Path | None, given: Sequence[str]) -> Prices:
    from tinkex.telemetry.usage import ANY_MODEL, Prices, Rates

    rates = {} if file is None else dict(Prices.read(file).rates)
    if given:
        rates[ANY_MODEL] = replace(rates.get(ANY_MODEL, Rates()), **dict(map(_price, given)))
    return Prices(rates)


def _price(text: str) -> tuple[str, float]:
    from tinkex.telemetry.usage import KINDS

    kind, _, dollars = text.partition("=")
    try:
        if kind in KINDS:
            return kind, float(dollars)
    except ValueError:
        pass
    raise click.BadParameter(
        f"{text!r} is not KIND=DOLLARS, where KIND is one of {', '.join(KINDS)}",
        param_hint="--price",
    )
