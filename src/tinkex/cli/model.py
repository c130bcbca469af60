"""`tinkex model`: the base models of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .connection import Connection, connected, formatted
from .groups import Group
from .output import Output

if TYPE_CHECKING:
    from .payloads import ModelList

__all__ = ["command"]


@click.group("model", cls=Group)
def command() -> None:
    """Base models."""


@command.command("list")
@click.argument("substring", default="")
@connected
@formatted
def list_models(substring: str, connection: Connection, output: Output) -> None:
    """List the base models of the service; with SUBSTRING, those whose name contains it."""
    with connection.service(patient=False) as service:
        models = service.get_server_capabilities().supported_models
    wanted = [model for model in models if substring.lower() in (model.model_name or "").lower()]
    payload: ModelList = {"models": wanted}
    output.table(
        ["Model", "Context", "Train", "Sample"],
        [
            [
                model.model_name,
                model.max_context_length or "?",
                _yes(model.trainable),
                _yes(model.sampleable),
            ]
            for model in wanted
        ],
        payload,
    )


def _yes(value: bool | None) -> str:
    return "no" if value is False else "yes"
