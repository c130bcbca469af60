"""The serving endpoints over HTTP: the same keys, limits and quotas as all other routes, errors in the API's own form."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tinkex.errors import DecodeError, TinkerError
from tinkex.server.byte_budget import Hold
from tinkex.server.decoding import checked_json
from tinkex.server.event_streams import EventStream, counted

from .anthropic_answers import event
from .endpoints import ENDPOINTS, Asked, Stream
from .errors import Dialect, failure
from .models import ServedModels
from .requests import read
from .table import SERVING, ServingRow

if TYPE_CHECKING:
    from tinkex.server.metrics import ServiceMetrics
    from tinkex.server.service import Service
    from tinkex.server.tracing import Tracing

__all__ = ["serving_routes"]

T = TypeVar("T")
logger = logging.getLogger("tinkex.server")


def serving_routes(service: Service, metrics: ServiceMetrics, tracing: Tracing) -> list[Route]:
    """The routes of all endpoints, under every prefix."""
    models = service.served_models
    routes = []
    for row in SERVING.values():
        endpoint = _Endpoint(service, models, row, metrics, tracing)
        methods = [row.operation.method]
        routes += [Route(path, endpoint.answer, methods=methods) for path in row.paths]
        if (
            row.operation.method == "GET"
        ):  # Anthropic's clients look for models under their own prefix
            path = row.paths[0].replace("/v1", "/anthropic/api/v1", 1)
            routes.append(Route(path, endpoint.answer, methods=methods))
    return routes


class _Endpoint:
    """One row of the table as a function of Starlette."""

    def __init__(
        self,
        service: Service,
        models: ServedModels,
        row: ServingRow,
        metrics: ServiceMetrics,
        tracing: Tracing,
    ) -> None:
        self._service = service
        self._models = models
        self._row = row
        self._metrics = metrics
        self._tracing = tracing

    async def answer(self, request: Request) -> Response:
        with self._tracing.call(self._row.name, request.headers):
            response = await self._answer(request)
        self._metrics.call(self._row.name, response.status_code)
        return response

    async def _answer(self, request: Request) -> Response:
        dialect = self._dialect(request)
        underway = self._service.quotas.requests
        try:
            owner = self._service.settings.keys.owner(request.headers)
            underway.take(owner)
        except TinkerError as error:
            return _failed(error, dialect)
        hold = self._service.bodies.budget.hold(owner)
        response: Response | None = None
        try:
            response = await self._answered(owner, request, hold, dialect)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return _failed(error, dialect)
        else:
            return response
        finally:
            hold.release()
            counted(response, underway, owner)

    def _dialect(self, request: Request) -> Dialect:
        shared = self._row.operation.method == "GET"
        if shared and ("anthropic-version" in request.headers or "/anthropic/" in request.url.path):
            return "anthropic"
        return self._row.dialect

    async def _answered(
        self, owner: str, request: Request, hold: Hold, dialect: Dialect
    ) -> Response:
        self._service.large_answers.check(owner)  # before work is done for an answer
        asked = Asked(
            self._service,
            self._models,
            owner,
            await self._read(owner, request, hold),
            request.path_params.get("name", ""),
            anthropic=dialect == "anthropic",
        )
        result = await _while_connected(request, ENDPOINTS[self._row.name](asked))
        if not isinstance(result, Stream):
            written = result if isinstance(result, bytes) else orjson.dumps(result)
            return self._service.large_answers.answer(owner, written, "application/json")
        # The first event is awaited here, so that a request refused by the engine gets its status.
        first = await _while_connected(request, anext(result.events))
        return EventStream(_events(first, result.events, dialect))

    async def _read(self, owner: str, request: Request, hold: Hold) -> Any:
        row = self._row.operation
        if row.method == "GET":
            return None
        bodies = self._service.bodies
        received = await bodies.receive(row, request, hold)
        if not received.body:
            raise DecodeError("is empty", field="body")
        size = len(received.body)
        content = await bodies.off_loop(owner, size, checked_json, row, received.body)
        return read(row.request, content)


async def _events(
    first: bytes, rest: AsyncIterator[bytes], dialect: Dialect
) -> AsyncIterator[bytes]:
    """The events of a stream; a failure is its last one."""
    try:
        yield first
        async for part in rest:
            yield part
    except Exception as error:
        _, _, body = failure(error, dialect)
        logger.info("A stream ended with an error: %s", error)
        if dialect == "anthropic":
            yield event("error", **{name: body[name] for name in ("error", "request_id")})
        else:
            yield b"data: " + orjson.dumps(body) + b"\n\n"
    finally:
        with contextlib.suppress(RuntimeError):
            await rest.aclose()  # type: ignore[attr-defined]  # a generator


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled when the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failed(error: BaseException, dialect: Dialect) -> Response:
    if not isinstance(error, TinkerError):
        logger.exception("A serving endpoint failed", exc_info=error)
    status, headers, body = failure(error, dialect)
    return Response(orjson.dumps(body), status, headers=headers, media_type="application/json")
