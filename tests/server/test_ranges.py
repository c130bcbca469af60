from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.ranges import asked_range

TAG = '"tag"'


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-", range(100)),
        ("bytes=40-", range(40, 100)),
        ("bytes=40-49", range(40, 50)),
        ("bytes=40-4000", range(40, 100)),
        ("bytes=-10", range(90, 100)),
        ("bytes=-1000", range(100)),
        ("bytes=0-0", range(1)),
    ],
)
def test_a_valid_range_is_returned(asked, expected):
    assert asked_range({"range": asked}, 100, TAG) == expected
    assert asked_range({"range": asked, "if-range": TAG}, 100, TAG) == expected


@pytest.mark.parametrize("asked", ["bytes=100-", "bytes=200-300", "bytes=-0"])
def test_a_range_beyond_the_end_is_empty(asked):
    found = asked_range({"range": asked}, 100, TAG)
    assert found is not None
    assert not found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"range": ""},
        {"range": "bytes=-"},
        {"range": "bytes=9-5"},
        {"range": "bytes=0-1,5-6"},
        {"range": "lines=1-2"},
        {"range": "bytes=" + "9" * 5000 + "-"},
        {"range": "bytes=5-", "if-range": '"other"'},
        {"range": "bytes=5-", "if-range": f"W/{TAG}"},
        {"range": "bytes=5-", "if-range": "Wed, 01 Jan 2025 00:00:00 GMT"},
    ],
)
def test_unsupported_or_stale_ranges_return_the_whole_file(headers):
    assert asked_range(headers, 100, TAG) is None


@given(text=st.text(max_size=40), size=st.integers(0, 1 << 50))
def test_any_range_lies_inside_the_file(text, size):
    for header in (text, f"bytes={text}"):
        found = asked_range({"range": header}, size, TAG)
        assert not found or 0 <= found.start < found.stop <= size
