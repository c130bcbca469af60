"""Every protocol operation by name, for code that needs more control than the client methods offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tinkex import types
from tinkex._wire.lazy_codecs import json_codec
from tinkex._wire.operations import OPERATIONS, Body, Operation, query_of
from tinkex.errors import DecodeError, InvalidInputError

from .http import HTTPClient
from .queue_state import Observer, observer_of
from .responses import APIResponse
from .runtime import APIFuture
from .session import Session, refusing_bad_values

__all__ = ["OperationsClient"]


class OperationsClient:
    """The operations of `docs/reference/operations.md`, one call each.

    A request is one of `tinkex.types`, such as `GetInfoRequest`, or a mapping of its fields; `path` fills the
    placeholders of the operation's path. This client assigns no sequence numbers and does not order calls;
    `TrainingClient` and `SamplingClient` do. Do not mix both on one model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        queue_state_observer: Observer | None = None,
        timeout: float | None = None,
    ) -> APIFuture[Any]:
        """Run an operation; the future gives its typed result. For a queued operation it waits until the work is done."""
        row = _row(name)
        checked = _checked(row, request)
        session = self._session
        if not row.queued:
            return session.start_call(name, checked, path=path, timeout=timeout)
        deadline = session.deadline(timeout)
        observers = () if queue_state_observer is None else (observer_of(queue_state_observer),)
        return session.start(
            name,
            lambda: session.run(name, checked, observers=observers, deadline=deadline),
            timeout=timeout,
        )

    def submit(
        self, name: str, request: Any = None, *, timeout: float | None = None
    ) -> APIFuture[types.UntypedAPIFuture | Any]:
        """Submit a queued operation; the future gives its promise, for `ServiceClient.poll`, or an immediate result."""
        row = _row(name)
        if not row.queued:
            raise InvalidInputError(f"{name} is answered at once; use call", field="name")
        checked = _checked(row, request)
        session, deadline = self._session, self._session.deadline(timeout)

        async def promised() -> types.UntypedAPIFuture | Any:
            await session.configured()
            session.transport.admit(row.pool)
            promise, _ = await session.promise(row, checked, deadline=deadline)
            return promise

        return session.start(name, promised, timeout=timeout)

    def raw(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        **options: Any,
    ) -> APIFuture[APIResponse]:
        """Run an operation; the future gives the raw answer. `options` are those of `ServiceClient.http`."""
        row = _row(name)
        checked = _checked(row, request)
        if row.body is Body.QUERY and checked is not None:
            options["query"] = query_of(checked) | dict(options.get("query") or {})
        elif row.body in {Body.JSON, Body.JSON_OR_PROTO}:
            options["body"] = {} if checked is None else checked
        http = HTTPClient(self._session)
        return http.with_raw_response(row.method, row.url_path(path), **options)  # type: ignore[arg-type]


def _row(name: str) -> Operation[Any]:
    row = OPERATIONS.get(name)
    if row is None:
        raise InvalidInputError(f"{name!r:.80} is not an operation", field="name")
    return row


def _checked(row: Operation[Any], request: Any) -> Any:
    if isinstance(request, row.request):
        return request
    if request is None and row.request is types.EmptyRequest:
        return None
    fields = {} if request is None else request
    if not isinstance(fields, Mapping):
        raise InvalidInputError(
            f"expected {row.request.__name__} or a mapping, got {type(request).__name__}",
            field="request",
        )
    if issubclass(row.request, BaseModel):
        with refusing_bad_values():
            return row.request.model_validate(dict(fields))
    try:
        return json_codec.from_object(dict(fields), row.request)
    except DecodeError as error:
        raise InvalidInputError(str(error)) from error
