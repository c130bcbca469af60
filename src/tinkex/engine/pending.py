"""All or nothing for a pass that arrives in several requests.

The gradients of the parts that have run wait here until the last part has succeeded. They are dropped when a part
fails, when a part is missing, when another backward pass begins, and by an optimizer step. What is pending depends
only on the order of the calls that succeeded, so running these calls again after a crash gives the same state.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from tinkex._wire.pass_parts import PASS_HEADER, PassPart
from tinkex.errors import InvalidInputError

__all__ = ["PendingPass"]

G = TypeVar("G")


class PendingPass(Generic[G]):
    """The gradients of the first parts of one pass."""

    def __init__(self) -> None:
        self._last: PassPart | None = None
        self._gradients: G | None = None

    def take(self, part: PassPart | None) -> G | None:
        """The gradients of all parts before `part`; from now on nothing is pending until `keep`.

        None for the first part and for a pass of one request. Raises if a part before this one is missing.
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
        """Hold the gradients up to `part` until the next part comes."""
        self._last, self._gradients = part, gradients

    def drop(self) -> None:
        self._last = self._gradients = None
