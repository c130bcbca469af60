"""Stop strings in a stream: text is held back as long as it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFilter", "overlap"]


class StopFilter:
    """Passes text on up to the first stop string; nothing of the stop string itself is passed on."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def add(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            # The first stop string in the text; of several at the same place the shortest, which was complete first.
            place, self.found = min(places, key=lambda found: (found[0], len(found[1])))
            passed, self._held = self._held[:place], ""
            return passed
        kept = max(overlap(self._held, stop) for stop in self._stops)
        passed, self._held = (
            self._held[: len(self._held) - kept],
            self._held[len(self._held) - kept :],
        )
        return passed

    def end(self) -> str:
        """The text that was held back; call it when no more follows."""
        passed, self._held = self._held, ""
        return passed


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker` but is not all of it."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
