"""All or nothing for a pass that a client splits into several requests.

Gradients of completed parts are held here until the last part succeeds. They are dropped when a part fails or is
missing, when another backward pass begins, and by an optimizer step. The held gradients depend only on the order of
the calls that succeeded, so a replay after a crash gives the same state.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from tinkex._wire.pass_parts import PASS_HEADER, PassPart
from tinkex.errors import InvalidInputError

__all__ = ["PendingPass"]

G = TypeVar("G")


class PendingPass(Generic[G]):
    """Gradients of the completed parts of one unfinished pass."""

    def __init__(self) -> None:
        self._last: PassPart | None = None
        self._gradients: G | None = None

    def take(self, part: PassPart | None) -> G | None:
        """Remove and return the gradients of all parts before `part`.

        Returns None for the first part and for a pass of one request. Raises if an earlier part is missing.
        """
        last, gradients = self._last, self._gradients
        self.drop()
        if part is None or part.index == 0:
            return None
        if last is None or not part.follows(last):
            raise InvalidInputError(
                f"request {part.index + 1} of {part.count}: an earlier request of this pass failed or never "
                "arrived, so no gradient of the pass is kept",
                field=PASS_HEADER,
            )
        return gradients

    def keep(self, part: PassPart, gradients: G) -> None:
        """Hold the gradients of all parts up to `part` until the next part arrives."""
        self._last, self._gradients = part, gradients

    def drop(self) -> None:
        self._last = self._gradients = None
