"""Sampling options that `tinkex sample` and `tinkex chat` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["drawn"]


def drawn(*, max_tokens: int, fewest: int, temperature: float) -> Callable[..., Any]:
    """Give a command `--max-tokens`, `--temperature`, `--top-k` and `--top-p`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, type_, default, help_ in reversed(
            (
                ("max-tokens", click.IntRange(fewest), max_tokens, "Longest answer in tokens."),
                (
                    "temperature",
                    click.FloatRange(0),
                    temperature,
                    "0 always takes the most likely token.",
                ),
                (
                    "top-k",
                    click.IntRange(-1),
                    -1,
                    "Sample from the k most likely tokens; -1 means all.",
                ),
                (
                    "top-p",
                    click.FloatRange(0, 1),
                    1.0,
                    "Sample from the most likely tokens up to this total probability.",
                ),
            )
        ):
            option = click.option(
                f"--{name}", type=type_, default=default, show_default=True, help=help_
            )
            command = option(command)
        return command

    return decorate
