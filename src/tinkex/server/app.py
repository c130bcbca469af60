"""The service over HTTP: a Starlette application made from the table of operations.

The codecs of `_wire` read the bodies (JSON or protobuf, compressed or not) and write the errors, so client and
service use the same formats and messages.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex._version import __version__
from tinkex._wire import json_codec
from tinkex._wire.failures import response_from_error
from tinkex._wire.operations import OPERATIONS, Body, Operation, ServicePart
from tinkex.errors import (
    APIStatusError,
    HTTPResponse,
    NotFoundError,
    TinkerError,
)
from tinkex.types import CheckpointType

from . import imports, openapi, pages, reports, tokenizers
from .bodies import Received
from .byte_budget import Hold
from .client_errors import client_error
from .dashboard import static
from .dashboard.api import CALLS, Dashboard, LocalCall
from .decoding import JSON
from .event_streams import counted
from .futures import Promise
from .guard import refusal
from .leases import Leases
from .metrics import ServiceMetrics
from .names import validate_name
from .ranges import asked_range
from .routes import HANDLERS, Call, base_url, owner_of
from .service import Service
from .serving import alias_routes
from .serving.app import serving_routes
from .tables import CheckpointRow
from .tars import Tar
from .tracing import Tracing

__all__ = ["build_app"]

logger = logging.getLogger("tinkex.server")

#: Seconds for which the front page shows the same counts before it asks the database again.
COUNTS_KEPT: Final = 1.0
#: Estimated bytes of a request in a trace.
_TRACED_BYTES: Final = 500


def build_app(service: Service, leases: Leases | None = None) -> Starlette:
    """The application of a service; the caller starts and stops the service."""
    counted: tuple[float, tuple[int, int, int]] | None = None

    async def front_page(request: Request) -> Response:
        nonlocal counted
        # The page needs no key, and counting keeps the database busy.
        if counted is None or time.monotonic() - counted[0] > COUNTS_KEPT:
            counted = time.monotonic(), await service.database(service.database.store.counts)
        sessions, runs, checkpoints = counted[1]
        models = [(model.name, model.context_length) for model in service.engine.catalog.models]
        return HTMLResponse(
            pages.front_page(
                url=base_url(request),
                version=__version__,
                models=models,
                sessions=sessions,
                runs=runs,
                checkpoints=checkpoints,
                uptime_seconds=time.time() - service.started_at,
            )
        )

    async def docs_page(_: Request) -> Response:
        return HTMLResponse(_docs_page())

    async def openapi_document(_: Request) -> Response:
        return Response(_openapi_document(), media_type="application/json")

    metrics, tracing = ServiceMetrics(service), Tracing()
    service.promises.on_accept.append(tracing.accepted)
    service.promises.on_finish.append(tracing.finished)

    async def metrics_page(request: Request) -> Response:
        try:
            owner_of(service, request.headers)
        except TinkerError as error:
            return _error_response(error, "metrics")
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def list_telemetry(request: Request) -> Response:
        try:
            owner = owner_of(service, request.headers)
            found = await reports.listed(service.database, owner, request.query_params)
        except Exception as error:
            return _error_response(error, "list_telemetry")
        return Response(json_codec.encode(found), media_type="application/json")

    dashboard = Dashboard(service)

    async def home(request: Request) -> Response:
        # Browsers ask for HTML by name; other programs get the page that works without scripts.
        if "text/html" in request.headers.get("accept", ""):
            return static.page(request)
        return await front_page(request)

    async def health(_: Request) -> Response:
        """For load balancers and container engines, which have no key: one word, no facts about the service."""
        try:
            service.engine.check_health()
        except APIStatusError:
            raise APIStatusError("No engine can serve.", HTTPResponse(503)) from None
        return Response(b'{"status":"ok"}', media_type="application/json")

    # Routes are tried in this order.
    by_priority = sorted(OPERATIONS.values(), key=lambda row: row.priority, reverse=True)
    routes = [_route(service, row, metrics, tracing) for row in by_priority]
    routes += serving_routes(service, metrics, tracing)
    routes += [
        Route(alias_routes.PATH, _answering(service, alias_routes.listed)),
        Route(alias_routes.PATH, _answering(service, alias_routes.put), methods=["PUT"]),
        Route(alias_routes.ONE, _answering(service, alias_routes.delete), methods=["DELETE"]),
        Route("/", home),
        Route("/health", _open_to_all(health)),
        Route("/about", front_page),
        Route("/static/{name:path}", _open_to_all(static.serve)),
        *(_local_route(service, dashboard, call) for call in CALLS),
        Route("/docs", docs_page),
        Route("/openapi.json", openapi_document),
        Route("/metrics", metrics_page),
        Route("/archives/{run_id}/{kind}/{name}", _guarded(service, _archive)),
        Route("/files/{run_id}/{kind}/{name}/{file}", _guarded(service, _file)),
        Route("/traces/{session_id}", _guarded(service, _trace)),
        Route(imports.PATH, _import(service), methods=["POST"]),
        Route(reports.PATH, list_telemetry),
        Route(tokenizers.FILES_PATH, _with_key(service, tokenizers.file)),
        Route(tokenizers.PATH, _with_key(service, tokenizers.listed)),
    ]
    if leases is not None:
        routes.append(Route("/lease", _lease(service, leases)))
    middleware = []
    if not service.settings.keys.needed:
        allowed = frozenset(map(str.lower, service.settings.allowed_hosts))
        middleware.append(Middleware(_KeepsPagesAway, allowed))
    return Starlette(routes=routes, middleware=middleware)


class _KeepsPagesAway:
    """Middleware that responds to the requests which the guard refuses, also on unknown paths."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in scope["headers"]
                if name in _OF_BROWSERS
            }
            error = refusal(scope["method"], hosts, headers, self._allowed)
            if error is not None:
                answer = _error_response(error, "request")
        await answer(scope, receive, send)


_OF_BROWSERS: Final = frozenset(
    (b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")
)


def _with_key(service: Service, serve: Any) -> Any:
    """An endpoint that needs a key."""

    async def endpoint(request: Request) -> Response:
        try:
            owner_of(service, request.headers)
            response: Response = await serve(service, request)
        except Exception as error:
            return _error_response(error, "download")
        return response

    return endpoint


def _open_to_all(serve: Any) -> Any:
    """An endpoint that needs no key."""

    async def endpoint(request: Request) -> Response:
        try:
            response: Response = await serve(request)
        except Exception as error:
            return _error_response(error, "page")
        return response

    return endpoint


def _answering(service: Service, serve: Any) -> Any:
    """An endpoint whose result depends on the owner of the key, and is sent as JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            owner = owner_of(service, request.headers)
            result = await serve(service, owner, request)
        except Exception as error:
            return _error_response(error, "aliases")
        return Response(json_codec.encode(result), media_type="application/json")

    return endpoint


def _import(service: Service) -> Any:
    async def endpoint(request: Request) -> Response:
        underway = service.quotas.requests
        try:
            owner = owner_of(service, request.headers)
            underway.take(owner)
        except TinkerError as error:
            return _error_response(error, "import")
        try:
            taken = await imports.receive(service, owner, request)
        except Exception as error:
            return _error_response(error, "import")
        finally:
            underway.release(owner)
        return Response(orjson.dumps(taken), media_type="application/json")

    return endpoint


def _local_route(service: Service, dashboard: Dashboard, call: LocalCall) -> Route:
    async def endpoint(request: Request) -> Response:
        underway, response = service.quotas.requests, None
        try:
            owner = owner_of(service, request.headers)
            underway.take(owner)
        except TinkerError as error:
            return _error_response(error, call.name)
        try:
            response = await call(dashboard, owner, request)
        except Exception as error:
            return _error_response(error, call.name)
        else:
            return response
        finally:
            counted(response, underway, owner)

    return Route(call.path, endpoint, methods=[call.method], name=call.name)


def _lease(service: Service, leases: Leases) -> Any:
    async def endpoint(request: Request) -> Response:
        try:
            owner_of(service, request.headers)
        except TinkerError as error:
            return _error_response(error, "lease")
        return await leases.endpoint(request)

    return endpoint


# Cached: the documents need no key, and making them takes tens of milliseconds.
@cache
def _docs_page() -> bytes:
    return pages.docs_page(openapi.document(__version__)).encode()


@cache
def _openapi_document() -> bytes:
    return orjson.dumps(openapi.document(__version__))


class _CheckpointId(Convertor[str]):
    """`<kind>/<name>`: two segments. A single one matches too, so that the error can say what is missing."""

    regex = "[^/]+(?:/[^/]+)?"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("checkpoint_id", _CheckpointId())


def _route(
    service: Service, row: Operation[object], metrics: ServiceMetrics, tracing: Tracing
) -> Route:
    async def endpoint(request: Request) -> Response:
        with tracing.call(row.name, request.headers):
            response = await answer(request)
        metrics.call(row.name, response.status_code)
        return response

    handler = HANDLERS[row.name]
    bodies, underway = service.bodies, service.quotas.requests

    async def answer(request: Request) -> Response:
        headers = request.headers
        try:
            owner = owner_of(service, headers)
            underway.take(owner)
        except TinkerError as error:
            return _error_response(error, row.name)
        hold = bodies.budget.hold(owner)
        response: Response | None = None
        try:
            response = await answer_to(owner, request, hold)
        finally:
            hold.release()
            counted(response, underway, owner)
        return response

    async def answer_to(owner: str, request: Request, hold: Hold) -> Response:
        received, decoded = Received(), None
        try:
            if row.body in {Body.JSON, Body.JSON_OR_PROTO}:
                received = await bodies.receive(row, request, hold)
                decoded = await bodies.decode(row, owner, received)
            elif row.body is Body.QUERY:
                decoded = json_codec.from_object(dict(request.query_params), row.request)
            call = Call(
                service=service,
                row=row,
                owner=owner,
                request=decoded,
                body=received.body,
                media=received.media,
                http=request,
            )
            result = await handler(call)
        except Exception as error:
            if row.drops_refused and isinstance(error, TinkerError):
                logger.info("%s of %s is dropped: %s", row.name, owner, error)
                dropped = json_codec.encode(row.result())
                return Response(dropped, media_type="application/json")
            response = _error_response(error, row.name)
            if _uses_up_its_number(row, response.status_code):
                refused = decoded or await bodies.peek(owner, received)
                _note_refusal(service, owner, refused)
            return response
        if isinstance(result, Response):
            return result
        return Response(json_codec.encode(result), media_type="application/json")

    path = row.path.replace("{checkpoint_id}", "{checkpoint_id:checkpoint_id}")
    return Route(path, endpoint, methods=[row.method], name=row.name)


def _error_response(error: BaseException, name: str) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    status, headers, body = response_from_error(client_error(error, name))
    return Response(json_codec.encode(body), status, headers=headers, media_type="application/json")


def _uses_up_its_number(row: Operation[object], status: int) -> bool:
    """Whether a client that gets this status continues with the next sequence number instead of a retry.

    A body that is too large is not read, so its number is unknown. Only the requests of a model run in order.
    """
    return (
        row.runner is ServicePart.MODELS
        and status not in {401, 408, 413, 429, 499}
        and status < 500
    )


def _note_refusal(service: Service, owner: str, refused: Any) -> None:
    """Tell the queue of a model not to wait for the sequence number of a refused request."""
    model_id, seq_id = getattr(refused, "model_id", None), getattr(refused, "seq_id", None)
    if isinstance(model_id, str) and isinstance(seq_id, int):
        service.models.refuse(owner, model_id, seq_id)


# -- files ---------------------------------------------------------------------------------------------


def _guarded(service: Service, serve: Any) -> Any:
    """An endpoint for signed links, which need no key: the signature proves that this service made the link."""

    async def endpoint(request: Request) -> Response:
        query = request.query_params
        path = request.scope.get("raw_path", b"").decode("ascii", "replace").partition("?")[0]
        root = request.scope.get("root_path", "")
        try:
            assert service.signer is not None
            service.signer.check(
                path.removeprefix(root),
                query.get("expires", ""),
                query.get("signature", ""),
                service.settings.now(),
            )
            response: Response = await serve(service, request)
        except Exception as error:
            return _error_response(error, "download")
        return response

    return endpoint


async def _linked(service: Service, request: Request) -> tuple[CheckpointRow, Path]:
    run_id, name = request.path_params["run_id"], request.path_params["name"]
    kind: CheckpointType = request.path_params["kind"]
    row = await service.database(service.database.store.checkpoint, run_id, kind, name)
    directory = service.checkpoints.place(run_id, kind, name)
    if row is None or service.checkpoints.has_expired(row) or not directory.is_dir():
        raise NotFoundError("The checkpoint no longer exists.")
    return row, directory


class _TarStream(StreamingResponse):
    """A range of a tar; closes the tar when it ends, also if its client hangs up early."""

    def __init__(self, tar: Tar, sent: range, status: int, headers: dict[str, str]) -> None:
        super().__init__(tar.chunks(sent.start, sent.stop), status, headers, "application/x-tar")
        self._tar = tar

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._tar:
            await super().__call__(scope, receive, send)


async def _archive(service: Service, request: Request) -> Response:
    """A checkpoint as a tar, or the range of it that the client asks for."""
    row, directory = await _linked(service, request)
    names = await service.checkpoints.file_names(row)
    tar = await service.files(Tar.of, directory, names)
    try:
        response = _part_of(tar, directory.name, request)
    except BaseException:
        tar.close()
        raise
    if not isinstance(response, _TarStream):
        tar.close()
    return response


def _part_of(tar: Tar, name: str, request: Request) -> Response:
    tag = f'"{tar.tag}"'
    head_only = request.method == "HEAD"  # ranges apply to GET only
    part = None if head_only else asked_range(request.headers, tar.size, tag)
    sent = range(tar.size) if part is None else part
    headers = {
        "accept-ranges": "bytes",
        "etag": tag,
        "content-length": str(len(sent)),
        "content-disposition": f'attachment; filename="{name}.tar"',
    }
    if not sent:
        return Response(status_code=416, headers={"content-range": f"bytes */{tar.size}"})
    if part is not None:
        headers["content-range"] = f"bytes {sent.start}-{sent.stop - 1}/{tar.size}"
    status = 200 if part is None else 206
    if head_only:
        return Response(None, status, headers, "application/x-tar")
    return _TarStream(tar, sent, status, headers)


async def _file(service: Service, request: Request) -> Response:
    _, directory = await _linked(service, request)
    file = directory / validate_name(request.path_params["file"])
    if file.is_symlink() or not file.is_file():
        raise NotFoundError("There is no such file in the checkpoint.")
    return FileResponse(file)


async def _trace(service: Service, request: Request) -> Response:
    """The requests of a session over time, in the format of trace viewers; counts as a request of their owner."""
    session_id = request.path_params["session_id"]
    promises = service.promises.of_session(session_id)
    if not promises:
        return Response(_trace_events(session_id, [], 0.0), media_type=JSON)
    owner, underway, response = promises[0].owner, service.quotas.requests, None
    underway.take(owner)
    try:
        service.large_answers.check(owner)
        events = await service.bodies.off_loop(
            owner,
            _TRACED_BYTES * len(promises),
            _trace_events,
            session_id,
            promises,
            service.promises.clock(),
        )
        response = service.large_answers.answer(owner, events, JSON)
        return response
    finally:
        counted(response, underway, owner)


def _trace_events(session_id: str, promises: list[Promise], now: float) -> bytes:
    events = []
    for promise in promises:
        start = promise.started_at or promise.accepted_at
        end = now if promise.result is None else promise.result.at
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": session_id,
                "tid": promise.scope,
                "ts": round(since * 1e6),
                "dur": round((until - since) * 1e6),
                "args": {"request_id": promise.request_id, "seq_id": promise.seq_id},
            }
            for name, since, until in (
                (f"{promise.operation.name} (waiting)", promise.accepted_at, start),
                (promise.operation.name, start, end),
            )
            if until > since
        ]
    return orjson.dumps({"traceEvents": events})
