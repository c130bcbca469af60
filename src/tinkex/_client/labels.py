"""Fields that are only labels, for services that do not know them.

A service that reads requests with the types of an older official release refuses all newer fields. If such a field only
changes what people read in a list, the request is sent again without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from tinkex.errors import UnprocessableEntityError

from .notices import logger

__all__ = ["Labels"]

T = TypeVar("T")

_LABELS: Final = frozenset({"user_metadata", "display_name"})


class Labels:
    """Remembers which labels of which operations the service refuses."""

    def __init__(self) -> None:
        self._refused: set[tuple[str, str]] = set()

    async def send(self, name: str, request: Any, send: Callable[[Any], Awaitable[T]]) -> T:
        """Call `send(request)`. If the service refuses only its labels, `send` the request without them."""
        if not isinstance(request, BaseModel):
            return await send(request)
        request = self._fitting(name, request)
        try:
            return await send(request)
        except UnprocessableEntityError as error:
            refused = _unknown_fields(error.body)
            if not refused or not refused <= _LABELS & _given(request):
                raise
            self._refused |= {(name, field) for field in refused}
            logger.warning(
                "The service does not know the field %s of %s; the request is sent without it.",
                " and ".join(sorted(refused)),
                name,
            )
            return await send(self._fitting(name, request))

    def _fitting(self, name: str, request: BaseModel) -> BaseModel:
        if not self._refused:
            return request
        dropped = {field: None for operation, field in self._refused if operation == name}
        return request.model_copy(update=dropped) if dropped else request


def _given(request: BaseModel) -> set[str]:
    return {name for name, value in request.__dict__.items() if value is not None}


def _unknown_fields(body: object) -> set[str]:
    """The fields that a validation report calls unknown. Empty if it also reports any other error."""
    detail = body.get("detail") if isinstance(body, Mapping) else None
    names: set[str] = set()
    for complaint in detail if isinstance(detail, list) else ():
        where = complaint.get("loc") if isinstance(complaint, Mapping) else None
        if not isinstance(where, list) or complaint.get("type") != "extra_forbidden":
            return set()
        names.add(str(where[-1]))
    return names
