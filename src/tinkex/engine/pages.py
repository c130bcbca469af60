"""Pages of the cache of keys and values: which are free, which are in use, and which texts they hold.

Pure bookkeeping without torch. A page holds a fixed number of positions. Several sequences can use one page, because
a page is never changed once it is full. A page that nobody uses keeps its content until it is needed for another
text: a later prompt that begins with the same tokens uses it again. The least recently used page is evicted first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from .values import Array

__all__ = ["PagePool", "chain"]


def chain(start: bytes, tokens_T: Array, size: int) -> Iterator[bytes]:
    """A key for each full page of a text; it identifies the page's tokens, all tokens before them, and `start`."""
    key = start
    for end in range(size, len(tokens_T) + 1, size):
        key = hashlib.blake2b(key + tokens_T[end - size : end].tobytes(), digest_size=16).digest()
        yield key


class PagePool:
    """Pages 1, 2, …; `budget` limits how many hold something.

    Page 0 is never given out: it stays zero and pads tables of pages.
    """

    def __init__(self, size: int, budget: float) -> None:
        self.size, self.budget = size, budget
        self._created = 0
        self._unused: list[int] = []
        self._users: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and unused, oldest first

    @property
    def used(self) -> int:
        return len(self._users)

    @property
    def held(self) -> int:
        """Pages that hold something: those in use, and those that later texts may use again."""
        return len(self._users) + len(self._idle)

    def needed(self, length: int) -> int:
        """Number of pages for `length` positions."""
        return -(-length // self.size)

    def take(self, count: int) -> list[int]:
        """Give out pages whose content is undefined; exceeds the budget only if the pages in use do."""
        while self._idle and self.held + count > self.budget:
            evicted, _ = self._idle.popitem(last=False)
            self._retract(evicted)
            self._unused.append(evicted)
        pages = [self._unused.pop() if self._unused else self._new() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def _new(self) -> int:
        self._created += 1
        return self._created

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self._idle.pop(page, None)

    def give_back(self, pages: Sequence[int], *, keep: bool = True) -> None:
        """End one use of each page; without `keep`, their content is not offered to later texts either."""
        # Backwards: the end of a text is evicted before its beginning, without which it cannot be found.
        for page in reversed(pages):
            self._users[page] -= 1
            if not keep:
                self._retract(page)
            if self._users[page] == 0:
                del self._users[page]
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._unused.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Offer a full page to later texts."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages that hold the beginning of a text, up to the first one that is missing."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def _retract(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
