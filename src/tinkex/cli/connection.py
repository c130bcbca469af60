"""Options that many commands share: which service, and in what form to print."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from .output import Output

if TYPE_CHECKING:
    from tinkex._client.rest import RestClient
    from tinkex._client.service import ServiceClient
    from tinkex.config import Config

__all__ = ["Connection", "connected", "formatted"]

#: Retries of a request while a person waits: about a second in all, not minutes.
_IMPATIENT: Final = {"max_retries": 2, "retry_window": 0}


@dataclass(frozen=True)
class Connection:
    """How a command reaches its service; missing values come from the environment."""

    base_url: str | None
    api_key: str | None
    timeout: float | None

    @contextmanager
    def rest(self) -> Iterator[RestClient]:
        from tinkex._client.rest import RestClient

        client = RestClient(config=self.config(**_IMPATIENT))
        try:
            yield client
        finally:
            client.close().result()

    @contextmanager
    def service(self, *, patient: bool = True, **options: Any) -> Iterator[ServiceClient]:
        """A client for long work, or with `patient=False` for a command whose user waits for the answer.

        Long work survives an outage of minutes. It fails at once if the service is down at the start.
        """
        from tinkex._client.service import ServiceClient

        if patient:
            self._reach()
        else:
            options |= _IMPATIENT
        with ServiceClient(config=self.config(**options)) as client:
            yield client

    def _reach(self) -> None:
        """Raise if the service cannot be reached; any answer counts as reachable."""
        from tinkex._client.service import ServiceClient
        from tinkex.config import LOCAL
        from tinkex.errors import APIStatusError

        config = self.config(**_IMPATIENT)
        if config.base_url != LOCAL:  # the local service is started on demand
            with ServiceClient(config=config) as client, suppress(APIStatusError):
                client.health()

    def config(self, **options: Any) -> Config:
        from tinkex._client.auth import config_with_login

        given = {"base_url": self.base_url, "api_key": self.api_key, "timeout": self.timeout}
        return config_with_login(
            **options, **{name: value for name, value in given.items() if value is not None}
        )


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--base-url`, `--api-key` and `--timeout`, as one argument `connection`."""

    @click.option("--base-url", help='URL of the service; "local" starts a private one.')
    @click.option("--api-key", help="The API key. Safer: set TINKER_API_KEY.")
    @click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds per call."
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        base_url: str | None,
        api_key: str | None,
        timeout: float | None,
        **options: Any,
    ) -> Any:
        return command(*args, connection=Connection(base_url, api_key, timeout), **options)

    return wrapped


def formatted(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--format`, as one argument `output`."""

    @click.option(
        "--format",
        "-f",
        "form",
        type=click.Choice(["table", "json"]),
        default=None,
        help="Form of the output.  [default: table]",
    )
    @click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
    @functools.wraps(command)
    def wrapped(*args: Any, form: str | None, as_json: bool, **options: Any) -> Any:
        overall = (click.get_current_context().obj or {}).get("format")
        chosen = "json" if as_json else form or overall or "table"
        return command(*args, output=Output(chosen), **options)

    return wrapped
