"""The tag that joins the requests of one pass."""

from __future__ import annotations

import pytest

from tinkex._wire.pass_parts import PASS_HEADER, PassPart
from tinkex.errors import InvalidInputError


def test_tag_round_trips():
    part = PassPart("a1-b2", 2, 5)
    assert str(part) == "a1-b2 3/5"
    assert PassPart.of({PASS_HEADER: str(part)}) == part
    assert PassPart.of({}) is None


@pytest.mark.parametrize(
    "text",
    ["", "a", "a 1", "a 0/2", "a 3/2", "a -1/2", "a 1/2 ", "é 1/2", "a 1/2\n", "x" * 101 + " 1/2"],
)
def test_invalid_tag_is_refused(text):
    with pytest.raises(InvalidInputError, match=PASS_HEADER):
        PassPart.parse(text)


def test_parts_follow_each_other_within_one_pass():
    first, second, third = (PassPart("p", index, 3) for index in range(3))
    assert second.follows(first)
    assert third.follows(second)
    assert not third.follows(first)
    assert not second.follows(PassPart("q", 0, 3))
    assert not second.follows(PassPart("p", 0, 4))
    assert [each.is_last for each in (first, second, third)] == [False, False, True]
