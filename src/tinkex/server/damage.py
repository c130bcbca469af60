"""Decides which runs are affected by unreadable parts of the journal.

A lost result is recomputed by running its request again. A lost request affects its run if it had not run yet, or if
a replay needs it to restore the model. If even the header of a record is unreadable, any run may be affected, so none
is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .segments import Damage, Kind, Record, scope_sum

__all__ = ["Lost"]


class Lost:
    """The records that a journal has lost."""

    def __init__(self, damage: Sequence[Damage] = ()) -> None:
        self._any = any(each.kind is None for each in damage)
        self._scopes = {
            each.scope for each in damage if each.kind is Kind.REQUEST and each.record is None
        }
        records = [each.record for each in damage if each.record is not None]
        #: Records whose head is readable and whose body is lost.
        self.requests: list[Record] = [each for each in records if each.kind is Kind.REQUEST]
        self.results: list[Record] = [each for each in records if each.kind is Kind.RESULT]

    def __bool__(self) -> bool:
        return bool(self._any or self._scopes or self.requests)

    def names(self, model_id: str) -> bool:
        """Whether a request of this model is lost and nothing but its model is known."""
        return scope_sum(model_id) in self._scopes

    def may_concern(self, model_id: str) -> bool:
        """Whether a lost request may belong to this model, even if the journal has no other request of it."""
        return self._any or self.names(model_id)

    def reason(self, model_id: str, needed: Callable[[str], bool]) -> str | None:
        """Why a model cannot be restored; None if it can. `needed(id)` says whether it needs that request."""
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
