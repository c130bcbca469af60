"""Times, sizes, tables and pages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tinkex.cli.human import ago, size
from tinkex.cli.output import Output, laid_out
from tinkex.cli.paging import fetch_all

NOW = datetime(2025, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "just now"),
        (59, "just now"),
        (60, "1 minute ago"),
        (7200, "2 hours ago"),
        (86_400, "1 day ago"),
        (14 * 86_400, "2 weeks ago"),
        (31 * 86_400, "2025-05-01"),
        (-30, "in less than a minute"),
        (-90, "in 1 minute"),
        (-40 * 86_400, "2025-07-11"),
    ],
)
def test_times_as_people_say_them(seconds, told):
    moment = NOW - timedelta(seconds=seconds)
    assert ago(moment, NOW) == told
    assert ago(moment.isoformat(), NOW) == told


def test_missing_or_unreadable_time_is_shown_as_text():
    assert ago(None) == "Never"
    assert ago("some day") == "some day"


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (None, "N/A"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KB"),
        (1536 << 10, "1.5 MB"),
        (3 << 40, "3.0 TB"),
        (5000 << 40, "5000.0 TB"),
    ],
)
def test_sizes(count, told):
    assert size(count) == told


def test_table_neither_truncates_nor_interprets_cells(capsys):
    long = "tinker://" + "x" * 300
    Output("table").table(["Path", "Advice"], [[long, "pip install 'tinkex[local]'"], ["a", 1]], {})
    head, first, second = capsys.readouterr().out.splitlines()
    assert head == f"{'Path':309}  Advice"
    assert first == f"{long}  pip install 'tinkex[local]'"
    assert second == f"{'a':309}  1"


# -- pages -----------------------------------------------------------------------------------------


def pages(count: int, *, total: bool = True, cap: int = 1000):
    """A service with `count` items, which returns at most `cap` at once; and the requests that it got."""
    asked: list[tuple[int, int]] = []

    def page(limit: int, offset: int) -> tuple[list[int], int | None]:
        asked.append((limit, offset))
        return list(range(count))[offset : offset + min(limit, cap)], count if total else None

    return page, asked


@pytest.mark.parametrize("total", [True, False])
def test_all_pages_are_fetched(total, capsys):
    page, asked = pages(250, total=total)
    items, _ = fetch_all(page, "runs", limit=0, offset=0, page_size=100)
    assert items == list(range(250))
    assert asked == [(100, 0), (100, 100), (100, 200)]
    assert f"Fetching runs: 100/{250 if total else '?'}" in capsys.readouterr().err


def test_no_more_entries_are_fetched_than_the_limit():
    page, asked = pages(250)
    assert fetch_all(page, "runs", limit=20, offset=5, page_size=100) == (list(range(5, 25)), 250)
    assert asked == [(20, 5)]
    page, asked = pages(250)
    assert len(fetch_all(page, "runs", limit=120, offset=0, page_size=100)[0]) == 120
    assert asked == [(100, 0), (20, 100)]


def test_a_service_may_give_smaller_pages_than_it_was_asked_for():
    page, asked = pages(250, cap=100)
    assert len(fetch_all(page, "checkpoints", limit=0, offset=0, page_size=1000)[0]) == 250
    assert len(asked) == 3


def test_empty_page_ends_a_list_before_its_total():
    asked = []

    def page(limit: int, offset: int) -> tuple[list[int], int | None]:
        asked.append(offset)
        return ([1] if not offset else []), 10  # nine were deleted meanwhile

    assert fetch_all(page, "runs", limit=0, offset=0, page_size=100) == ([1], 10)
    assert asked == [0, 1]


def test_a_table_wider_than_the_terminal_is_stacked():
    columns, rows = ("Path", "Size", "Created"), [["x" * 30, "1 KB", "just now"], ["y", "2 KB", ""]]
    head, lines = laid_out(columns, rows, None)
    assert head == [f"{'Path':30}  Size  Created"]
    assert laid_out(columns, rows, len(lines[0])) == (head, lines)
    head, lines = laid_out(columns, rows, 40)
    assert head == []
    assert lines == ["x" * 30, "    Size: 1 KB, Created: just now", "y", "    Size: 2 KB"]
    assert laid_out(columns, rows, 30)[1][1:3] == ["    Size: 1 KB", "    Created: just now"]
