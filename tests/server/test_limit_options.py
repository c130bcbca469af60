"""Limits given on the command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.server.bodies import read_body_limit
from tinkex.server.service import Settings, read_setting

DOCS = Path(__file__).parents[2] / "docs"


def test_body_limits_are_named_by_operation():
    assert read_body_limit("create_session=1000000") == ("create_session", 1_000_000)


@pytest.mark.parametrize("text", ["create_session", "create_session=-1", "healthz=1", "", "=1"])
def test_an_invalid_body_limit_is_refused(text):
    with pytest.raises(ConfigError, match="body_limit"):
        read_body_limit(text)


@pytest.mark.parametrize("name", ["engines", "engine_cpus", "engine_gpus"])
def test_setting_with_an_option_of_its_own_is_refused_by_the_name_of_the_option(name):
    with pytest.raises(ConfigError, match=f"give --{name.replace('_', '-')} 2"):
        read_setting(f"{name}=2")
    with pytest.raises(ConfigError) as refused:
        read_setting("nothing=2")
    assert f"{name}," not in str(refused.value)


def test_every_number_that_can_be_set_is_documented():
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    numbers = [row.name for row in fields(Settings) if type(row.default) in {int, float}]
    assert "kept_results" in numbers
    undocumented = [name for name in numbers if f"`{name}`" not in pages]
    with_an_option_of_their_own = {"snapshot_every", "engines"}
    assert set(undocumented) <= with_an_option_of_their_own
