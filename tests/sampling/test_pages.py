"""Pages of the cache: given out, shared, published, found again and evicted."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.pages import PagePool, chain


def keys(*tokens: int, size: int = 2, start: bytes = b"base") -> list[bytes]:
    return list(chain(start, np.array(tokens, np.int64), size))


def test_key_depends_on_start_and_on_all_tokens_before():
    assert keys(1, 2, 3, 4)[0] == keys(1, 2, 9, 9)[0]
    assert keys(1, 2, 3, 4)[1] != keys(9, 2, 3, 4)[1]
    assert keys(1, 2) != keys(1, 2, start=b"adapter")
    assert len(keys(1, 2, 3)) == 1  # only full pages have a key


def test_published_page_is_found_until_it_is_evicted():
    pool = PagePool(2, budget=3)
    pages = pool.take(2)
    for page, key in zip(pages, keys(1, 2, 3, 4), strict=True):
        pool.publish(page, key)
    pool.give_back(pages)
    assert (pool.used, pool.held) == (0, 2)
    assert pool.find(keys(1, 2, 3, 4, 5, 6)) == pages
    assert pool.find(keys(1, 2, 9, 9)) == pages[:1]
    pool.take(2)  # the end of the text is evicted first: without its beginning it cannot be found
    assert pool.find(keys(1, 2, 3, 4)) == pages[:1]
    pool.take(1)
    assert pool.find(keys(1, 2, 3, 4)) == []
    assert pool.held == 3


def test_least_recently_used_text_is_evicted_first():
    pool = PagePool(2, budget=2)
    for tokens in ((1, 2), (3, 4)):
        (page,) = pool.take(1)
        pool.publish(page, keys(*tokens)[0])
        pool.give_back([page])
    again = pool.find(keys(1, 2))
    pool.share(again)
    pool.give_back(again)
    pool.take(1)
    assert pool.find(keys(1, 2)) == again
    assert pool.find(keys(3, 4)) == []


def test_page_without_key_or_of_a_failed_request_is_not_found():
    pool = PagePool(2, inf)
    page, other = pool.take(2)
    pool.publish(page, keys(1, 2)[0])
    pool.give_back([page, other], keep=False)
    assert pool.find(keys(1, 2)) == []
    assert (pool.used, pool.held) == (0, 0)


def test_second_copy_of_a_text_does_not_replace_the_first():
    pool = PagePool(2, inf)
    first, second = pool.take(2)
    for page in (first, second):
        pool.publish(page, keys(1, 2)[0])
    pool.give_back([second])
    assert pool.find(keys(1, 2)) == [first]
    assert pool.held == 1


@given(data=st.data())
def test_page_is_never_given_out_while_it_is_used_and_budget_holds(data: Any) -> None:
    pool, texts = PagePool(1, budget=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)
    running: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        text = data.draw(texts)
        if running and data.draw(st.booleans()):
            chosen = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pool.give_back(chosen, keep=data.draw(st.booleans()))
            continue
        own = keys(*text, size=1)
        found = pool.find(own)
        if pool.used + len(own) > 6:
            continue
        pool.share(found)
        new = pool.take(len(own) - len(found))
        assert not {page for pages in running for page in pages} & set(new)
        assert 0 not in new
        for page, key in zip([*found, *new], own, strict=True):
            pool.publish(page, key)
        running.append([*found, *new])
        assert pool.held <= 6
        assert pool.used == len({page for pages in running for page in pages})
