"""Errors in the words of the command line."""

from __future__ import annotations

import pickle

import click
import pytest

from tinkex.cli.wording import worded
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    AuthenticationError,
    ConfigError,
    HTTPRequest,
    HTTPResponse,
    InvalidInputError,
)

COMMAND = click.Command(
    "save",
    params=[
        click.Argument(["checkpoint_path"]),
        click.Option(["--output", "directory"]),
        click.Option(["--ttl"]),
    ],
)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("output", "--output: wrong"),
        ("tinker_path", "CHECKPOINT_PATH: wrong"),
        ("ttl_seconds", "--ttl: wrong; --remove keeps it forever"),
        ("rank", "rank: wrong"),
        (None, "wrong"),
    ],
)
def test_error_names_a_field_by_its_option_or_argument(field, told):
    assert worded(InvalidInputError("wrong", field=field), COMMAND) == told


def test_advice_for_python_is_replaced_or_kept():
    error = InvalidInputError("missing", field="api_key", advice="pass api_key=…")
    assert str(error) == "api_key: missing; pass api_key=…"
    assert "api_key=" not in worded(error, COMMAND)
    kept = InvalidInputError("missing", field="hf_token", advice="set HF_TOKEN")
    assert worded(kept) == "hf_token: missing; set HF_TOKEN"
    assert worded(pickle.loads(pickle.dumps(kept))) == worded(kept)


def test_a_malformed_key_is_explained_without_showing_it():
    with pytest.raises(ConfigError) as refused:
        Config(api_key="sk-secret")
    told = worded(refused.value)
    assert 'must start with "tml-"' in told
    assert "sk-secret" not in told


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8/api/v1/x", "http://127.0.0.1:8 "),
        ("https://ada:secret@host/x?y", "https://host "),
        ("http://[::1]:8/x", "http://[::1]:8 "),
    ],
)
def test_the_service_is_named_without_path_or_password(url, shown):
    down = worded(APIConnectionError(HTTPRequest("GET", url), "Connection failed: refused"))
    refused = worded(
        AuthenticationError("Invalid key.", HTTPResponse(401, {}, HTTPRequest("GET", url)))
    )
    assert down.startswith(f"{shown}cannot be reached: Connection failed")
    assert refused.startswith(f"{shown}refuses the key: Invalid key.")
    assert "secret" not in down + refused
    # `tinkex serve` is no help for a service elsewhere.
    assert ("tinkex serve" in down) == url.startswith("http:")


def test_error_of_another_host_is_not_blamed_on_the_service():
    assert "tinkex serve" not in worded(APIConnectionError(message="the hub cannot be reached"))
