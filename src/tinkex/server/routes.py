"""The handlers of the operations: one function each, with the operation's name.

A function gets a `Call` (the decoded request, its owner, and the service) and returns a value of the protocol, or an HTTP
response. It raises typed errors; the app turns them into status and body. Requests that only join the queue of their
model share one function.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tinkex import types
from tinkex._wire import json_codec, proto_codec
from tinkex._wire.failures import failure_body, response_from_error
from tinkex._wire.media_types import PROTOBUF
from tinkex._wire.operations import OPERATIONS, Operation, ServicePart
from tinkex._wire.pass_parts import ALL_OR_NOTHING, PASS_HEADER, PassPart
from tinkex.engine.base_models import built_in
from tinkex.engine.checks import check_settings
from tinkex.engine.interface import EngineStatus
from tinkex.errors import (
    APIStatusError,
    AuthenticationError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)
from tinkex.types._tokenizer_files import tokenizer_digest

from . import tokenizers
from .checkpoints import checkpoint_of, tinker_path
from .client_errors import client_error
from .dashboard import logged
from .decoding import JSON
from .event_streams import EventStream
from .futures import Promise
from .inputs import lora_of
from .large_answers import LARGE
from .memory_use import engine_memory
from .nearness import is_near
from .results import encode_result
from .service import Service
from .sessions import text_map, utc
from .tables import CheckpointRow, RunRow, TelemetryRow

__all__ = ["HANDLERS", "Call", "owner_of", "promise_response"]

logger = logging.getLogger("tinkex.server")

#: From this many bytes on, a poll first gets the size of the result, so that the client can reserve memory for it.
LARGE_RESULT: Final = 8 << 20
#: How many times as large as protobuf a result may be as JSON, with all its numbers as text.
_GROWTH_AS_JSON: Final = 4
#: Older clients cannot parse checkpoints of the kind "external".
_EXTERNAL_SINCE: Final = (0, 28)
_TOKEN_LIFETIME: Final = timedelta(hours=1)
_AGENT: Final = re.compile(r"AsyncTinker/Python (\d+)\.(\d+)")


@dataclass(frozen=True)
class Call:
    """One request to the service."""

    service: Service
    row: Operation[object]
    owner: str
    request: Any
    body: bytes
    media: str
    http: Request

    @property
    def params(self) -> Mapping[str, str]:
        return self.http.path_params

    @property
    def headers(self) -> Mapping[str, str]:
        return self.http.headers

    @property
    def base_url(self) -> str:
        """The address of the service as the client knows it."""
        return base_url(self.http)

    @property
    def is_near(self) -> bool:
        """Whether the client is on this machine, with no proxy in between."""
        return is_near(self.http) and not self.service.settings.behind_proxy

    def now(self) -> datetime:
        return self.service.settings.now()

    @property
    def knows_external(self) -> bool:
        found = _AGENT.search(self.headers.get("user-agent", ""))
        return found is None or (int(found[1]), int(found[2])) >= _EXTERNAL_SINCE


def base_url(http: Request) -> str:
    return str(http.base_url).rstrip("/")


def owner_of(service: Service, headers: Mapping[str, str]) -> str:
    """The owner of a request. Tokens are refused: they can be lent, and a borrower must not get the account."""
    return service.settings.keys.owner(headers)


Handler = Callable[[Call], Awaitable[Any]]
HANDLERS: Final[dict[str, Handler]] = {}


def _handles(handler: Handler) -> Handler:
    HANDLERS[handler.__name__] = handler
    return handler


def _promised(promise: Promise) -> types.UntypedAPIFuture:
    sample = promise.sequence_ids
    return types.UntypedAPIFuture(
        request_id=promise.request_id,
        model_id=None if sample is not None else promise.scope,
        sample_sequence_ids=sample,
    )


# -- service and identity --------------------------------------------------------------------------


@_handles
async def healthz(call: Call) -> types.HealthResponse | Response:
    engines = [_engine_health(each) for each in call.service.engine.status()]
    try:
        state = call.service.engine.check_health()
    except APIStatusError as error:  # it says which engines are in trouble, too
        status, _, body = response_from_error(error)
        body["engines"] = [each.model_dump(mode="json", exclude_none=True) for each in engines]
        return _json(json_codec.encode(body), status)
    return types.HealthResponse(engine=state, engines=engines)


def _engine_health(engine: EngineStatus) -> types.EngineHealth:
    return types.EngineHealth(
        name=engine.name,
        kind=engine.kind,
        node=engine.node,
        device=engine.device,
        up=engine.up,
        base_models=list(engine.base_models),
        memory_bytes=engine_memory(engine),
        trouble=engine.trouble or None,
        models=engine.models,
        in_line=engine.in_line,
        samples=engine.samples,
        restarts=max(0, engine.starts - 1),
    )


@_handles
async def get_server_capabilities(call: Call) -> types.GetServerCapabilitiesResponse:
    loaded = {model.name: model.context_length for model in call.service.engine.catalog.models}
    offered = built_in() if call.service.settings.on_demand else ()
    return types.GetServerCapabilitiesResponse(
        supported_models=[
            types.SupportedModel(
                model_name=name,
                max_context_length=loaded.get(name),
                trainable=True,
                sampleable=True,
            )
            for name in dict.fromkeys((*loaded, *offered))
        ]
    )


@_handles
async def client_config(call: Call) -> types.ClientConfigResponse:
    return types.ClientConfigResponse(
        use_pyqwest_transport=False,  # that transport has no advantage on loopback
        proto_write_fwdbwd=True,
        create_model_via_load_weights=True,
        sample_join_sampling_session=True,
        custom_loss_server_side=call.service.settings.engine == "torch",
        sample_use_retrieve_futures=call.service.settings.use_retrieve_futures,
        sample_extensions=call.service.settings.engine == "torch",
    )


@_handles
async def client_dynamic_config(_: Call) -> types.ClientDynamicConfigResponse:
    return types.ClientDynamicConfigResponse(sample_cancel_enabled=True)


@_handles
async def auth_token(call: Call) -> types.AuthTokenResponse:
    signer = call.service.signer
    assert signer is not None
    # A service without keys has no digest.
    digest = call.service.settings.keys.digest(call.owner) or b""
    token = signer.token(call.owner, digest, call.now() + _TOKEN_LIFETIME)
    return types.AuthTokenResponse(jwt=token)


@_handles
async def get_api_key(call: Call) -> dict[str, Any]:
    return {
        "key_id": 0,
        "name": call.owner,
        "note": "a key of this local service",
        "details": {
            "org_details": {"name": "local"},
            "user_details": {"email": f"{call.owner}@localhost"},
        },
    }


@_handles
async def delete_api_key(_: Call) -> None:
    raise PermissionDeniedError(
        "The keys of this service are in its key file: remove the line there, and send the service SIGHUP."
    )


# -- sessions ----------------------------------------------------------------------------------------


@_handles
async def create_session(call: Call) -> types.CreateSessionResponse:
    key = call.headers.get("x-idempotency-key")
    session_id = await call.service.sessions.create(call.owner, call.request, key)
    return types.CreateSessionResponse(session_id=session_id)


@_handles
async def session_heartbeat(call: Call) -> types.SessionHeartbeatResponse:
    await call.service.sessions.heartbeat(call.request.session_id, call.owner)
    return types.SessionHeartbeatResponse()


@_handles
async def finish_session(call: Call) -> types.EmptyResponse:
    await call.service.finish_session(call.params["session_id"], call.owner, call.request)
    return types.EmptyResponse()


@_handles
async def list_sessions(call: Call) -> types.ListSessionsResponse:
    database = call.service.database
    rows = await database(
        database.store.sessions,
        call.owner,
        limit=_countable(call.request.limit),
        offset=_countable(call.request.offset),
    )
    return types.ListSessionsResponse(sessions=[row.session_id for row in rows])


def _countable(number: int) -> int:
    """A limit or offset that the database accepts."""
    return min(number, (1 << 63) - 1)


@_handles
async def get_session(call: Call) -> types.GetSessionResponse:
    session_id = call.params["session_id"]
    await call.service.sessions.find(session_id, call.owner)
    database = call.service.database
    row = await database(database.store.session, session_id)
    assert row is not None
    runs = await database(database.store.runs_of_session, session_id)
    samplers = await database(database.store.samplers_of_session, session_id)
    return types.GetSessionResponse(
        training_run_ids=[run.run_id for run in runs],
        sampler_ids=[sampler.sampler_id for sampler in samplers],
        user_metadata=text_map(row.user_metadata),
        display_name=row.display_name,
    )


@_handles
async def assign_session_project(call: Call) -> types.EmptyResponse:
    if not call.request.project_id.strip():
        raise InvalidInputError("must not be empty", field="project_id")
    session_id = call.params["session_id"]
    await call.service.sessions.find(session_id, call.owner)
    database = call.service.database
    await database(database.store.update_session, session_id, project_id=call.request.project_id)
    return types.EmptyResponse()


@_handles
async def trace_export(call: Call) -> types.TraceExportResponse:
    session_id = call.params["session_id"]
    await call.service.sessions.find(session_id, call.owner)
    url = _signed(call, f"/traces/{quote(session_id, safe=':')}")[0]
    return types.TraceExportResponse(status="ready", url=url)


@_handles
async def search_sessions(call: Call) -> types.SessionSearchResponse:
    return await call.service.sessions.search(call.owner, call.request)


# -- models ------------------------------------------------------------------------------------------


@_handles
async def create_model(call: Call) -> types.UntypedAPIFuture:
    return _promised(
        await call.service.models.create(call.row, call.owner, call.request, call.body)
    )


@_handles
async def get_info(call: Call) -> types.GetInfoResponse:
    run = await _run(call, call.request.model_id)
    base = await call.service.engine.catalog.model(run.base_model, "model_id")
    return types.GetInfoResponse(
        type=call.request.type,
        model_id=run.run_id,
        model_data=types.ModelData(
            arch=base.arch, model_name=base.name, **await _tokenizer_of(call, base.directory)
        ),
        is_lora=True,
        lora_rank=lora_of(run.lora).rank,
        model_name=base.name,
    )


async def _submitted(
    call: Call, reader: str | None = None, part: PassPart | None = None
) -> types.UntypedAPIFuture:
    request = call.request
    promise = await call.service.models.submit(
        call.row,
        call.owner,
        request.model_id,
        getattr(request, "seq_id", None),
        request,
        call.body,
        call.media,
        reader=reader,
        part=part,
    )
    return _promised(promise)


def _check_pass(call: Call) -> None:
    request, limit = call.request, call.service.settings.max_examples
    forward = isinstance(request, types.ForwardRequest)
    field = "forward_input" if forward else "forward_backward_input"
    inputs: types.ForwardBackwardInput = getattr(request, field)
    check_settings(inputs.loss_fn, inputs.loss_fn_config or {})
    count = len(inputs.data)
    if count > limit:
        raise InvalidInputError(
            f"must be at most {limit} examples, got {count}; the limit is the service's setting max_examples",
            field=f"{field}.data",
        )


@_handles
async def forward(call: Call) -> types.UntypedAPIFuture:
    _check_pass(call)
    return await _submitted(call)


@_handles
async def forward_backward(call: Call) -> Response:
    _check_pass(call)
    part = None
    if isinstance(call.request, types.ForwardBackwardRequest):  # a forward pass has no gradients
        part = PassPart.of(call.headers)
    response = _json(json_codec.encode(await _submitted(call, part=part)))
    if part is not None:
        response.headers[PASS_HEADER] = ALL_OR_NOTHING
    return response


@_handles
async def load_weights(call: Call) -> types.UntypedAPIFuture:
    request: types.LoadWeightsRequest = call.request
    reader = await _reader(call, request.path, request.weights_access_token)
    if request.weights_access_token is not None:
        # It may be a key, and keys must not be written to the journal.
        request = request.model_copy(update={"weights_access_token": None})
        call = replace(call, request=request, body=json_codec.encode(request))
    if request.model_id is not None:
        return await _submitted(call, reader)
    if request.session_id is None or request.model_seq_id is None:
        raise InvalidInputError(
            "give model_id and seq_id of a model, or session_id and model_seq_id for a new one",
            field="model_id",
        )
    return _promised(
        await call.service.models.create(call.row, call.owner, request, call.body, reader)
    )


async def _reader(call: Call, path: str, token: str | None) -> str | None:
    """The owner of the key or token that a request brings to read a checkpoint of someone else."""
    if not token or not call.service.settings.keys.needed:
        return None
    with contextlib.suppress(NotFoundError):
        await call.service.checkpoints.readable(call.owner, path)
        return None
    keys, signer = call.service.settings.keys, call.service.signer
    assert signer is not None
    try:
        with contextlib.suppress(AuthenticationError):
            return keys.owner({"x-api-key": token})
        return signer.token_owner(token, keys.digest, call.now())
    except AuthenticationError as error:
        # Not 401: the caller's own key is valid.
        raise PermissionDeniedError(
            "weights_access_token: must be a key, or a token of auth/token, whose owner may read the weights; "
            f"{error.message}"
        ) from None


@_handles
async def create_custom_loss(call: Call) -> types.UntypedAPIFuture:
    promise = await call.service.losses.create(call.row, call.owner, call.request, call.body)
    return types.UntypedAPIFuture(request_id=promise.request_id)


# -- weights -----------------------------------------------------------------------------------------


@_handles
async def copy_weights(call: Call) -> types.CopyWeightsResponse:
    request: types.CopyWeightsRequest = call.request
    token = call.headers.get("x-tinker-weights-access-token") or request.weights_access_token
    return types.CopyWeightsResponse(
        tinker_path=await call.service.copy_weights(
            call.owner,
            request,
            call.headers.get("x-idempotency-key"),
            await _reader(call, request.source_path, token),
        )
    )


@_handles
async def weights_info(call: Call) -> types.WeightsInfoResponse:
    checkpoints = call.service.checkpoints
    row, _ = await checkpoints.readable(call.owner, call.request.tinker_path)
    run = await checkpoints.run_of(row)
    lora = lora_of(run.lora)
    return types.WeightsInfoResponse(
        base_model=run.base_model,
        is_lora=True,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


# -- sampling ----------------------------------------------------------------------------------------


@_handles
async def create_sampling_session(call: Call) -> types.CreateSamplingSessionResponse:
    sampler_id = await call.service.samplers.create(call.owner, call.request)
    return types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


@_handles
async def join_sampling_session(call: Call) -> types.JoinSamplingSessionResponse:
    number = await call.service.samplers.join(call.request.sampling_session_id, call.owner)
    return types.JoinSamplingSessionResponse(client_counter=number)


@_handles
async def get_sampler(call: Call) -> types.GetSamplerResponse:
    row = await call.service.samplers.get(call.params["sampler_id"], call.owner)
    base = await call.service.engine.catalog.model(row.base_model, "sampler_id")
    return types.GetSamplerResponse(
        sampler_id=row.sampler_id,
        base_model=row.base_model,
        model_path=row.model_path,
        **await _tokenizer_of(call, base.directory),
    )


async def _tokenizer_of(call: Call, directory: Path) -> dict[str, str]:
    """Where a client finds the tokenizer of a base model.

    On this machine that is the model's directory. Elsewhere it is the model's name on the hub, if it has one, which
    official clients can load; ours load the files that have the checksum.
    """
    name = None if call.is_near else tokenizers.hub_id(directory)
    files = await call.service.files(tokenizers.tokenizer_files, directory)
    return {
        "tokenizer_id": name or str(directory),
        "tokenizer_sha256": tokenizer_digest(files),
    }


@_handles
async def asample(call: Call) -> types.UntypedAPIFuture:
    return _promised(
        await call.service.samplers.sample(call.row, call.owner, call.request, call.body)
    )


@_handles
async def stream_sample(call: Call) -> Response:
    chunks, stop = await call.service.samplers.stream(call.owner, call.request)
    return EventStream(_events(chunks), on_end=stop)


async def _events(chunks: AsyncIterator[types.SampleStreamChunk]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            fields = {
                name: value
                for name in types.SampleStreamChunk.__slots__
                if (value := getattr(chunk, name)) not in (None, "")
            }
            yield (
                b"event: "
                + chunk.event_type.encode()
                + b"\ndata: "
                + json_codec.encode(fields)
                + b"\n\n"
            )
    except Exception as error:  # the status has been sent already
        told = failure_body(client_error(error, "the stream of a sample"))
        yield b"event: error\ndata: " + json_codec.encode(told) + b"\n\n"


# -- futures -----------------------------------------------------------------------------------------


@_handles
async def retrieve_future(call: Call) -> Response:
    request: types.FutureRetrieveRequest = call.request
    promise = call.service.promises.get(request.request_id, call.owner)
    clock = asyncio.get_running_loop().time
    until = clock() + call.service.settings.hold
    if not promise.done:
        try:
            async with asyncio.timeout_at(until):
                await promise.finished.wait()
        except TimeoutError:
            return _try_again(promise)
    binary = PROTOBUF in call.headers.get("accept", "")
    return await promise_response(
        call.service,
        promise,
        binary=binary,
        metadata_only=request.allow_metadata_only,
        patience=until - clock(),
    )


def _try_again(promise: Promise) -> Response:
    body = {
        "type": "try_again",
        "request_id": promise.request_id,
        "queue_state": types.QueueState.ACTIVE.value,
        "queue_state_reason": (
            "the engine is working on it"
            if promise.started_at is not None or promise.num_samples is not None
            else "it waits for earlier requests"
        ),
    }
    return _json(json_codec.encode(body), 408)


async def promise_response(
    service: Service,
    promise: Promise,
    *,
    binary: bool,
    metadata_only: bool = False,
    patience: float = 0.0,
) -> Response:
    """The result of a promise in a format that the client accepts.

    A large one waits for `patience` seconds until the answers that are being sent leave room for it.
    """
    result = promise.result
    assert result is not None
    if metadata_only and result.place.length >= LARGE_RESULT and not result.failed:
        told = types.MetadataOnlyResponse(response_payload_size=result.place.length)
        return _json(json_codec.encode(told))
    converted = result.binary and not binary
    size = result.place.length * (_GROWTH_AS_JSON if converted else 1)
    answers, owner = service.large_answers, promise.owner
    hold = None if size < LARGE else await answers.room(owner, size, patience)
    try:
        service.promises.get(promise.request_id, owner)  # it may have been evicted meanwhile
        payload = service.promises.payload(promise)
        if converted:
            sampled = promise.operation.result is types.SampleResponse
            convert = _sample_as_json if sampled else _pass_as_json
            payload = await service.bodies.off_loop(owner, len(payload), convert, payload)
    except BaseException:
        if hold is not None:
            answers.release(hold)
        raise
    media_type = PROTOBUF if result.binary and binary else JSON
    return answers.answer(owner, payload, media_type, hold)


def _sample_as_json(payload: bytes) -> bytes:
    return encode_result(proto_codec.decode_sample_response(payload))


def _pass_as_json(payload: bytes) -> bytes:
    return encode_result(proto_codec.decode_forward_backward_output(payload))


def _json(payload: bytes, status: int = 200) -> Response:
    return Response(payload, status, media_type="application/json")


@_handles
async def retrieve_futures(call: Call) -> types.FuturesRetrieveResponse:
    request: types.FuturesRetrieveRequest = call.request
    target = request.target
    feed = await call.service.samplers.feed(
        target.sampling_session_id, target.cloned_sampler_id, call.owner
    )
    hold = call.service.settings.hold
    if request.timeout is not None:
        hold = min(hold, request.timeout)
    try:
        async with asyncio.timeout(hold):
            while not (finished := feed.after(request.prev_cursor)):
                feed.changed.clear()
                await feed.changed.wait()
    except TimeoutError:
        finished = []
    return types.FuturesRetrieveResponse(
        completions=[_completion(promise) for promise in finished], cursor=feed.cursor
    )


def _completion(promise: Promise) -> types.FutureFinished | types.FutureFailed:
    assert promise.result is not None
    if promise.result.failed:
        return types.FutureFailed(request_id=promise.request_id)
    size = promise.result.place.length
    return types.FutureFinished(
        request_id=promise.request_id, response_payload_uncompressed_size=size
    )


@_handles
async def cancel_future(call: Call) -> types.EmptyResponse:
    try:
        promise = call.service.promises.get(call.request.request_id, call.owner)
    except Exception:  # nothing to cancel
        return types.EmptyResponse()
    if promise.on_cancel is not None:
        promise.on_cancel()
    return types.EmptyResponse()


# -- runs and checkpoints ------------------------------------------------------------------------------


async def _run(call: Call, run_id: str) -> RunRow:
    """A run of the caller, or one with a public checkpoint."""
    database = call.service.database
    row = await database(database.store.run, run_id)
    if row is None:
        model = await call.service.models.find(
            run_id, call.owner
        )  # not in the database yet: it is being created
        await model.made.wait()
        row = await database(database.store.run, run_id)
    if row is not None and row.owner != call.owner:
        checkpoints = await database(database.store.checkpoints_of_run, run_id)
        if not any(checkpoint.public for checkpoint in checkpoints):
            row = None
    if row is None:
        raise NotFoundError(f"There is no training run {run_id!r:.200}.")
    return row


async def _training_runs(call: Call, rows: Sequence[RunRow]) -> list[types.TrainingRun]:
    database, run_ids = call.service.database, [row.run_id for row in rows]
    newest = await database(database.store.newest_checkpoints, run_ids, call.owner)
    return [_training_run(row, newest, mine=row.owner == call.owner) for row in rows]


def _training_run(
    row: RunRow,
    newest: Mapping[tuple[str, types.CheckpointType], CheckpointRow],
    *,
    mine: bool,
) -> types.TrainingRun:
    training, sampler = newest.get((row.run_id, "training")), newest.get((row.run_id, "sampler"))
    return types.TrainingRun(
        training_run_id=row.run_id,
        base_model=row.base_model,
        model_owner=row.owner,
        is_lora=True,
        corrupted=row.corrupted,
        lora_rank=lora_of(row.lora).rank,
        last_request_time=row.last_request_at,
        last_checkpoint=None if training is None else checkpoint_of(training),
        last_sampler_checkpoint=None if sampler is None else checkpoint_of(sampler),
        # The checkpoints are public, not the metadata of the run.
        user_metadata=text_map(row.user_metadata) if mine else None,
    )


async def _write_times(call: Call) -> None:
    with contextlib.suppress(OSError):  # disk full: the last written times can still be read
        await call.service.models.write_times()


@_handles
async def list_training_runs(call: Call) -> types.TrainingRunsResponse:
    request: types.ListTrainingRunsRequest = call.request
    limit, offset = _countable(request.limit), _countable(request.offset)
    await _write_times(call)
    database = call.service.database
    rows, total = await database(
        database.store.runs,
        call.owner,
        limit=limit,
        offset=offset,
        project_id=request.project_id,
    )
    return types.TrainingRunsResponse(
        training_runs=await _training_runs(call, rows),
        cursor=types.Cursor(offset=offset, limit=limit, total_count=total),
    )


@_handles
async def get_training_run(call: Call) -> types.TrainingRun:
    await _write_times(call)
    row = await _run(call, call.params["training_run_id"])
    return (await _training_runs(call, [row]))[0]


@_handles
async def list_checkpoints(call: Call) -> types.CheckpointsListResponse:
    run = await _run(call, call.params["training_run_id"])
    database = call.service.database
    rows = await database(database.store.checkpoints_of_run, run.run_id)
    mine = run.owner == call.owner
    return types.CheckpointsListResponse(
        checkpoints=[
            checkpoint_of(row)
            for row in rows
            if (mine or row.public) and (row.kind != "external" or call.knows_external)
        ]
    )


@_handles
async def list_user_checkpoints(call: Call) -> types.CheckpointsListResponse:
    request: types.ListCheckpointsRequest = call.request
    limit, offset = _countable(request.limit), _countable(request.offset)
    database = call.service.database
    rows, total = await database(
        database.store.checkpoints,
        call.owner,
        limit=limit,
        offset=offset,
        external=call.knows_external,
    )
    return types.CheckpointsListResponse(
        checkpoints=[checkpoint_of(row) for row in rows],
        cursor=types.Cursor(offset=offset, limit=limit, total_count=total),
    )


async def _owned(call: Call) -> CheckpointRow:
    return await call.service.checkpoints.owned(
        call.owner, call.params["training_run_id"], call.params["checkpoint_id"]
    )


@_handles
async def delete_checkpoint(call: Call) -> types.EmptyResponse:
    await call.service.checkpoints.delete(await _owned(call))
    return types.EmptyResponse()


@_handles
async def publish_checkpoint(call: Call) -> types.EmptyResponse:
    await call.service.checkpoints.publish(await _owned(call), public=True)
    return types.EmptyResponse()


@_handles
async def unpublish_checkpoint(call: Call) -> types.EmptyResponse:
    await call.service.checkpoints.publish(await _owned(call), public=False)
    return types.EmptyResponse()


@_handles
async def set_checkpoint_ttl(call: Call) -> types.EmptyResponse:
    await call.service.checkpoints.set_ttl(await _owned(call), call.request.ttl_seconds)
    return types.EmptyResponse()


def _checkpoint_path(call: Call) -> str:
    return f"tinker://{call.params['training_run_id']}/{call.params['checkpoint_id']}"


@_handles
async def get_checkpoint_archive_url(call: Call) -> Response:
    row, _ = await call.service.checkpoints.readable(call.owner, _checkpoint_path(call))
    url, expires = _signed(call, f"/archives/{_place(row)}")
    return RedirectResponse(
        url, 302, headers={"expires": format_datetime(expires.replace(microsecond=0), usegmt=True)}
    )


@_handles
async def get_external_weights_urls(call: Call) -> types.ExternalWeightsUrlsResponse:
    row, _ = await call.service.checkpoints.readable(call.owner, _checkpoint_path(call))
    if row.kind != "external":
        raise InvalidInputError(
            f"{tinker_path(row)} holds no external weights; save_weights_external writes them",
            field="checkpoint_id",
        )
    names = await call.service.checkpoints.file_names(row)
    signed = {name: _signed(call, f"/files/{_place(row)}/{quote(name)}") for name in names}
    expires = min((until for _, until in signed.values()), default=call.now())
    return types.ExternalWeightsUrlsResponse(
        urls={name: url for name, (url, _) in signed.items()}, expires=expires
    )


def _place(row: CheckpointRow) -> str:
    return f"{quote(row.run_id, safe=':')}/{row.kind}/{quote(row.name)}"


def _signed(call: Call, path: str) -> tuple[str, datetime]:
    """A URL that needs no key, and when it expires."""
    signer = call.service.signer
    assert signer is not None
    expires = call.now() + timedelta(seconds=call.service.settings.url_lifetime)
    return f"{call.base_url}{path}?{signer.sign(path, expires)}", expires


# -- reports -------------------------------------------------------------------------------------------


@_handles
async def telemetry(call: Call) -> types.TelemetryResponse:
    request: types.TelemetrySendRequest = call.request
    now = call.now()
    rows = [
        TelemetryRow(
            now, call.owner, request.session_id, event.model_dump(mode="json"), event.event_id
        )
        for event in request.events
    ]
    if rows:
        await call.service.reports.add(call.owner, rows)
    return types.TelemetryResponse(status="accepted")


@_handles
async def log_run(call: Call) -> types.LogResponse:
    run_id = call.params["training_run_id"]
    database = call.service.database
    run = await database(database.store.run, run_id)
    if run is None or run.owner != call.owner:
        raise NotFoundError(f"There is no training run {run_id!r:.200}.")
    return await logged.receive(call.service, call.owner, run_id, call.request)


@_handles
async def get_audit_log(call: Call) -> types.AuditLogResponse:
    request: types.GetAuditLogRequest = call.request
    day = request.day or call.now().date()
    if day == date.max:
        raise InvalidInputError("is too late; choose an earlier day", field="day")
    start = datetime.combine(day, time(), UTC)
    database = call.service.database
    rows = await database(
        database.store.audit,
        call.owner,
        topic=None if request.event_type == "all" else request.event_type,
        start=start,
        end=start + timedelta(days=1),
    )
    return types.AuditLogResponse(
        entries=[
            types.AuditLogEntry(
                timestamp=row.at,
                event=row.event,
                event_details=dict(row.details),
                model_id=row.run_id,
                tinker_path=row.tinker_path,
            )
            for row in rows
        ]
    )


@_handles
async def get_billing_usage(call: Call) -> types.BillingUsageResponse:
    request: types.GetBillingUsageRequest = call.request
    start = utc(request.starting_on, "starting_on")
    end = utc(request.ending_before, "ending_before")
    if not timedelta(0) < end - start <= timedelta(days=14):
        raise InvalidInputError(
            "must lie after starting_on, by at most 14 days", field="ending_before"
        )
    await call.service.usage.write()
    database = call.service.database
    rows = await database(database.store.usage, call.owner, start, end)
    sessions = {}
    for session_id in {row.session_id for row in rows}:
        session = await database(database.store.session, session_id)
        metadata = None if session is None else text_map(session.user_metadata)
        sessions[session_id] = types.BillingUsageSession(user_metadata=metadata)
    return types.BillingUsageResponse(
        data=[
            types.BillingUsageEvent(
                bucket_start=row.bucket_start,
                bucket_end=row.bucket_start + timedelta(hours=1),
                base_model=row.base_model,
                user_id=row.owner,
                user_name=row.owner,
                session_id=row.session_id,
                event_info=_event_info(row.kind, row.count),
            )
            for row in rows
        ],
        sessions=sessions,
    )


def _event_info(kind: str, count: int) -> types.BillingEventInfo:
    if kind == "training":
        return types.TrainingBillingEvent(token_count=count)
    if kind == "sampling_prefill":
        return types.SamplingPrefillBillingEvent(cached=False, token_count=count)
    if kind == "sampling_sample":
        return types.SamplingSampleBillingEvent(token_count=count)
    return types.CheckpointBillingEvent(count=count)


@_handles
async def get_current_checkpoint_storage_usage(
    call: Call,
) -> types.CurrentCheckpointStorageUsageResponse:
    database = call.service.database
    totals = await database(database.store.storage, call.owner, call.request.project_id)
    return types.CurrentCheckpointStorageUsageResponse(
        data=[
            types.CurrentCheckpointStorageUsageItem(
                project_id=project_id,
                user_name=call.owner,
                checkpoint_count=count,
                size_bytes=size,
                size_gigabytes=size / 1e9,
            )
            for project_id, count, size in totals
        ]
    )


for _row in OPERATIONS.values():
    if _row.runner is ServicePart.MODELS:
        HANDLERS.setdefault(_row.name, _submitted)
