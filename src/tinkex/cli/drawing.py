"""How tokens are drawn: the options that `tinkex sample` and `tinkex chat` share."""

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
                ("temperature", click.FloatRange(0), temperature, "0 takes the likeliest token."),
                ("top-k", click.IntRange(-1), -1, "Only the k likeliest tokens; -1: all."),
                (
                    "top-p",
                    click.FloatRange(0, 1),
                    1.0,
                    "Only the likeliest tokens, up to this probability.",
                ),
            )
        ):
            option = click.option(
                f"--{name}", type=type_, default=default, show_default=True, help=help_
            )
            command = option(command)
        return command

    return decorate
