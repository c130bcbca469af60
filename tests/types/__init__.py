# ruff: noqa: A005  (`types` is what these tests are about)
"""Assertions about refused values: an error names the field first, then the problem."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tinkex.errors import InvalidInputError


def refuses(field: str, words: str = "") -> Any:
    """tinkex itself refuses the value; `words` is a pattern."""
    return pytest.raises(InvalidInputError, match=f"^{re.escape(field)}: .*{words}")


def refuses_field(field: str, words: str = "") -> Any:
    """Refused by a model, in the words of pydantic; `field` is the path to it, `words` a pattern.

    The constructors of request models raise tinkex's own error, all other ways into a model pydantic's.
    """
    return pytest.raises(
        (InvalidInputError, ValidationError),
        match=rf"(?s)(?:^{re.escape(field)}: |\n{re.escape(field)}\n).*{words}",
    )
