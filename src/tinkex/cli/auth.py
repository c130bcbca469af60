"""`tinkex auth`: the key that is used when neither an option nor the environment gives one.

The key is stored in the file and format of the official command line, so that one login serves both.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from tinkex.config import read_env
from tinkex.errors import InvalidInputError, TinkerError

from .connection import Connection, connected, formatted
from .groups import Group
from .output import Output, plain
from .wording import told

if TYPE_CHECKING:
    from tinkex.types import ApiKeyInfoResponse

    from .payloads import AuthLogin, AuthLogout, AuthStatus

__all__ = ["command"]

_EMPTY: Final[dict[str, Any]] = {"version": 1, "default": None, "keys": {}}


@click.group("auth", cls=Group)
def command() -> None:
    """The API key for a service."""


@command.command("login")
@connected
@formatted
def login(connection: Connection, output: Output) -> None:
    """Store a key, if the service accepts it.

    The key is prompted for, or read from standard input: other users could see a command-line argument.
    """
    given = replace(connection, api_key=connection.api_key or _asked())
    found = _described(given)
    entry = {"type": "manual", "key": given.api_key, **plain(found)}
    stored = _read()
    stored["keys"][str(found.key_id)] = entry
    _write(stored | {"default": str(found.key_id)})
    payload: AuthLogin = {
        "key_id": found.key_id,
        "name": found.name,
        "email": found.details.user_details.email,
        "organization": found.details.org_details.name,
    }
    output.done(f"Logged in as {payload['email']} with the key {found.name}.", payload)


@command.command("logout")
@connected
@formatted
def logout(connection: Connection, output: Output) -> None:
    """Delete the stored key; a key that a login generated is also revoked at the service."""
    stored = _read()
    entry = stored["keys"].pop(str(stored["default"]), None)
    payload: AuthLogout = {"forgotten": entry is not None, "revoked": False}
    if entry is None:
        output.done("No key is stored.", payload)
        return
    if entry.get("type") == "generated":
        with replace(connection, api_key=entry["key"]).service(patient=False) as service:
            service.api.raw("delete_api_key").result()
        payload["revoked"] = True
    _write(stored | {"default": None})
    output.done("The stored key is deleted.", payload)


@command.command("status")
@connected
@formatted
def status(connection: Connection, output: Output) -> None:
    """Where the key comes from, and whether the service accepts it."""
    payload: AuthStatus = {
        "source": _source(connection),
        "base_url": "",
        "accepted": False,
        "error": None,
    }
    try:
        payload["base_url"] = connection.config().base_url
        _described(connection)
        payload["accepted"] = True
    except TinkerError as error:
        payload["error"] = told(error, click.get_current_context().command)[0]
    accepted = "yes" if payload["accepted"] else f"no: {payload['error']}"
    facts = {"Service": payload["base_url"] or "?", "Key": payload["source"], "Accepted": accepted}
    output.record(facts, payload)
    if not payload["accepted"]:
        raise click.exceptions.Exit(1)


@command.command("whoami")
@connected
@formatted
def whoami(connection: Connection, output: Output) -> None:
    """Show the user and organization of your key."""
    with connection.rest() as rest:
        found = rest.whoami().result()
    facts = {"User": found.user_urn, "Organization": found.org_urn, "Email": found.email or "?"}
    output.record(facts, plain(found))


def _asked() -> str:
    if sys.stdin.isatty():
        key: str = click.prompt("Key", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not key.strip():
        raise InvalidInputError("no key was given", field="api_key")
    return key.strip()


def _described(connection: Connection) -> ApiKeyInfoResponse:
    """What the service knows about a key."""
    from tinkex.types import ApiKeyInfoResponse

    # `raw` sends the key itself; `call` would first exchange it for a token where the service has these.
    with connection.service(patient=False) as service:
        found: ApiKeyInfoResponse = (
            service.api.raw("get_api_key").result().parse(ApiKeyInfoResponse)
        )
        return found


def _source(connection: Connection) -> str:
    from tinkex._client.auth import stored_key

    if connection.api_key:
        return "argument"
    if read_env("TINKER_API_KEY"):
        return "environment"
    if read_env("TINKER_CREDENTIAL_CMD"):
        return "command"
    return "none" if stored_key() is None else "stored"


# -- the file ----------------------------------------------------------------------------------------


def _read() -> dict[str, Any]:
    from tinkex._client.auth import credentials_file

    try:
        stored = json.loads(credentials_file().read_text())
    except FileNotFoundError:
        stored = {}
    except ValueError:
        raise InvalidInputError(
            f"{credentials_file()} is damaged; remove it", field="credentials"
        ) from None
    return {**_EMPTY, **stored, "keys": dict(stored.get("keys", {}))}


def _write(stored: dict[str, Any]) -> None:
    """Replace the file in one step; only its owner can read it at any time."""
    from tinkex._client.auth import credentials_file

    file = credentials_file()
    file.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as content:
            json.dump(stored, content, indent=2)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
