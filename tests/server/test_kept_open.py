"""How many adapters an engine keeps open: a number of them, and more while they are small."""

from __future__ import annotations

import pytest

from tinkex.server.kept_open import IN_MEMORY, KEPT_BYTES, KEPT_OPEN, surplus


@pytest.mark.parametrize(
    ("sizes", "closed"),
    [
        ([], 0),
        ([KEPT_BYTES] * KEPT_OPEN, 0),  # this many are kept whatever they weigh
        ([KEPT_BYTES] * (KEPT_OPEN + 3), 3),
        ([1_000_000 // IN_MEMORY] * 500, 0),
        ([KEPT_BYTES // 100 // IN_MEMORY] * 130, 30),
        ([KEPT_BYTES // 40] * 40, 8),  # an open adapter takes more than its files
        ([0] * 10_000, 0),
    ],
)
def test_adapters_are_closed_beyond_the_number_and_the_bytes(sizes, closed):
    assert surplus(sizes) == closed


def test_the_least_recently_used_adapters_are_closed():
    assert surplus([1, 1, 100, 1, 1], least=1, limit=50 * IN_MEMORY) == 3
