"""Whom it concerns that a part of the journal cannot be read.

A result that is lost is made again by running its request. A request that is lost matters to its run if it was not
done yet, or if it would have to be run again to bring the model back. Where not even the header of a record can be read,
any run may be concerned, and none is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .segments import Damage, Kind, Record, scope_sum

__all__ = ["Lost"]


class Lost:
    """What a journal has lost."""

    def __init__(self, damage: Sequence[Damage] = ()) -> None:
        self._any = any(each.kind is None for each in damage)
        self._scopes = {
            each.scope for each in damage if each.kind is Kind.REQUEST and each.record is None
        }
        records = [each.record for each in damage if each.record is not None]
        #: Those of which the head is known and the body is lost.
        self.requests: list[Record] = [each for each in records if each.kind is Kind.REQUEST]
        self.results: list[Record] = [each for each in records if each.kind is Kind.RESULT]

    def __bool__(self) -> bool:
        return bool(self._any or self._scopes or self.requests)

    def names(self, model_id: str) -> bool:
        """Whether a request of this model is lost of which nothing else is known."""
        return scope_sum(model_id) in self._scopes

    def may_concern(self, model_id: str) -> bool:
        """Whether a request is lost that may have been the first of this model."""
        return self._any or self.names(model_id)

    def reason(self, model_id: str, needed: Callable[[str], bool]) -> str | None:
        """Why a model cannot be trusted any more; `needed` says whether it needs a request, by its id."""
        if self._any:
            return (
                "a part of the journal cannot be read, and requests of this run may have been in it"
            )
        if self.names(model_id):
            return "a request of this run cannot be read in the journal"
        for record in self.requests:
            if record.head["scope"] == model_id and needed(record.head["id"]):
                return f"its request {record.head['id']} cannot be read in the journal"
        return None
