"""The names that a checkpoint may have."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tinkex.errors import InvalidInputError
from tinkex.server.names import validate_name


@given(st.text("AZaz09._-", min_size=1, max_size=255))
def test_a_valid_name_is_returned_unchanged(name):
    assume(not name.startswith("."))
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "a\\b",
        "a b",
        "a\n",
        "é",
        "٣",
        "a\0",
        "tinker://r/w/n",
        "n" * 256,
    ],
)
def test_an_invalid_name_is_refused(name):
    with pytest.raises(InvalidInputError, match="1 to 255 of the characters") as caught:
        validate_name(name)
    assert caught.value.field == "path"
