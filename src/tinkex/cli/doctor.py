"""`tinkex doctor`: find what is missing, and say how to fix it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import click

from tinkex.config import LOCAL
from tinkex.errors import AuthenticationError, InvalidInputError, TinkerError

from .connection import Connection, connected, formatted
from .human import size
from .output import Output
from .wording import told

if TYPE_CHECKING:
    from tinkex.config import Config

    from .payloads import Doctor, DoctorFinding

__all__ = ["command"]

_PACKAGES = ("torch", "transformers", "peft", "sqlalchemy", "starlette", "uvicorn")
_LEAST_DISK = 2 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    found: str
    advice: str = ""


@click.command("doctor")
@connected
@formatted
def command(connection: Connection, output: Output) -> None:
    """Check settings, key, service, packages and disk, and say what to fix."""
    findings = list(_examine(connection))
    payload: Doctor = {"findings": [cast("DoctorFinding", asdict(one)) for one in findings]}
    output.table(
        ["", "What", "Found", "What to do"],
        [["ok" if f.ok else "NO", f.name, f.found, f.advice] for f in findings],
        payload,
    )
    if not all(finding.ok for finding in findings):
        raise click.exceptions.Exit(1)


def _examine(connection: Connection) -> Iterator[Finding]:
    """All checks that are possible, even with wrong settings."""
    config: Config | None = None
    try:
        config = connection.config()
    except InvalidInputError as error:
        yield Finding("settings", False, *told(error, click.get_current_context().command))
    else:
        yield Finding("settings", True, config.shown_base_url)
    yield from _packages(needed=config is not None and config.base_url == LOCAL)
    yield _disk()
    if config is not None:
        yield from _service(connection)


def _packages(*, needed: bool) -> Iterator[Finding]:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        advice = "pip install 'tinkex[local]' for the local service"
        yield Finding("packages", not needed, f"without {', '.join(missing)}", advice)
    else:
        yield Finding("packages", True, "the local service can run")


def _disk() -> Finding:
    from tinkex._local import data_directory

    place = data_directory()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    advice = "" if free >= _LEAST_DISK else "free some space, or set TINKEX_DATA_DIR"
    return Finding("disk", free >= _LEAST_DISK, f"{size(free)} free for {place}", advice)


def _service(connection: Connection) -> Iterator[Finding]:
    try:
        with connection.service(patient=False) as service:
            models = service.get_server_capabilities().model_names()
    except TinkerError as error:
        name = "key" if isinstance(error, AuthenticationError) else "service"
        yield Finding(name, False, *told(error))
    else:
        yield Finding("service", True, "answers")
        yield Finding("key", True, "accepted")
        advice = "" if models else "start the service with --base-model"
        yield Finding("base models", bool(models), ", ".join(models) or "none", advice)
