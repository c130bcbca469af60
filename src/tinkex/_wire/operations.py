"""The table of operations: one row for every call of the protocol.

Client methods and service routes read it. A row has every fact that a transport needs about a call, so that neither
side keeps its own list.

Left out on purpose: the device login of CLI 0.26 to 0.28 (`auth/apikey` POST, `auth-config`), which needs
an identity provider, and the gRPC polling of 0.21 to 0.22.1, which its authors withdrew. Rows with a `flag` are
used only if the service turns that flag on in `client/config` or `client/dynamic_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from tinkex import types
from tinkex.errors import InvalidInputError

__all__ = ["OPERATIONS", "Body", "BodyLimits", "Operation", "Pool", "operation"]

R = TypeVar("R")


class Pool(Enum):
    """Calls that share connections; separate pools keep a flood of one kind from starving another."""

    SESSION = "session"
    REST = "rest"
    TRAINING = "training"
    SAMPLING = "sampling"
    FUTURES = "futures"
    SAMPLE_FUTURES = (
        "sample_futures"  # the service holds each poll for half a minute, and there are many
    )
    TELEMETRY = "telemetry"

    __hash__ = (
        object.__hash__
    )  # Enum's own hash is a Python call, and every request looks up its pool


class Body(Enum):
    """How the request is encoded."""

    NONE = "none"
    QUERY = "query"
    JSON = "json"
    JSON_OR_PROTO = "json_or_proto"


@dataclass(frozen=True)
class BodyLimits:
    """The largest request body of a call.

    `json` and `protobuf` are bytes, before and after decompression. `items` limits the objects and lists of a JSON
    body and the fields of a protobuf body: validating a million tiny objects takes seconds, even if they are few bytes.
    """

    json: int = 1 << 20
    protobuf: int = 0
    items: int = 20_000


#: Calls whose body is stored unchanged, such as the metadata of a session.
_STORED: Final = BodyLimits(json=256 << 10)
#: Clients send at most a hundred events at a time.
_EVENTS: Final = BodyLimits(items=5_000)
_SAMPLE: Final = BodyLimits(json=4 << 20, items=10_000)
# Official clients send up to 1,024 examples and 5 MB a request, more only if a single example is larger.
_PASS: Final = BodyLimits(json=16 << 20, protobuf=32 << 20, items=100_000)


_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# Characters that a placeholder's value keeps unescaped: ids contain colons, a checkpoint id has two segments.
_SAFE: Final = {"checkpoint_id": ":/", "sampler_id": ""}


@dataclass(frozen=True)
class Operation(Generic[R]):
    """One call.

    `request_type` labels the polls of its future. With `retries=False` the transport sends the call once, and the
    layer above retries it: a poll is its own retry, a sample has its own limits. With `window` the transport retries
    for `retry_window` seconds. Calls that open something have none, because a user waits for the first of them.
    With `pauses` the call waits after a 402 until the account can pay; calls that open something fail at once.
    `limits` bound the body that a service reads.
    """

    name: str
    method: str
    path: str
    request: type[Any]
    result: type[R]
    pool: Pool
    body: Body = Body.JSON
    queued: bool = False
    request_type: str | None = None
    binary_result: bool = False
    retries: bool = True
    timeout: float | None = None
    flag: str | None = None
    redirects: bool = False
    window: bool = True
    pauses: bool = True
    limits: BodyLimits = BodyLimits()

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(_PLACEHOLDER.findall(self.path))

    def url_path(self, values: Mapping[str, str] | None = None) -> str:
        """The path with its placeholders filled in."""
        if not self.placeholders:
            return self.path
        given = values or {}
        return _PLACEHOLDER.sub(lambda match: _segment(match.group(1), given), self.path)


def _segment(name: str, values: Mapping[str, str]) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"must be a non-empty string, got {value!r:.80}", field=name)
    if any(part in {"", ".", ".."} for part in value.split("/")):
        raise InvalidInputError(f"{value!r:.200} is not an id", field=name)
    return quote(value, safe=_SAFE.get(name, ":"))


def _get(
    name: str, path: str, result: type[R], request: type[Any] = types.EmptyRequest, **more: Any
) -> Operation[R]:
    body = Body.NONE if request is types.EmptyRequest else Body.QUERY
    more.setdefault("pool", Pool.REST)
    return Operation(name, "GET", f"/api/v1/{path}", request, result, body=body, **more)


def _post(
    name: str, request: type[Any], result: type[R], path: str = "", **more: Any
) -> Operation[R]:
    more.setdefault("pool", Pool.SESSION)
    return Operation(name, "POST", f"/api/v1/{path or name}", request, result, **more)


def _queued(
    name: str, request: type[Any], result: type[R], label: str, **more: Any
) -> Operation[R]:
    more.setdefault("pool", Pool.TRAINING)
    return _post(name, request, result, queued=True, request_type=label, **more)


_CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{checkpoint_id}"

_ROWS: Final[tuple[Operation[Any], ...]] = (
    # service and identity
    _get("healthz", "healthz", types.HealthResponse, pool=Pool.SESSION),
    _get(
        "get_server_capabilities",
        "get_server_capabilities",
        types.GetServerCapabilitiesResponse,
        pool=Pool.SESSION,
    ),
    _post(
        "client_config",
        types.ClientConfigRequest,
        types.ClientConfigResponse,
        "client/config",
        window=False,
    ),
    _post(
        "client_dynamic_config",
        types.ClientConfigRequest,
        types.ClientDynamicConfigResponse,
        "client/dynamic_config",
        retries=False,
        timeout=10.0,
    ),
    _post(
        "auth_token",
        types.EmptyRequest,
        types.AuthTokenResponse,
        "auth/token",
        flag="pjwt_auth_enabled",
    ),
    _get("get_api_key", "auth/apikey/me", types.ApiKeyInfoResponse),
    Operation(
        "delete_api_key",
        "DELETE",
        "/api/v1/auth/apikey/me",
        types.EmptyRequest,
        types.EmptyResponse,
        Pool.REST,
        Body.NONE,
    ),
    # sessions
    _post(
        "create_session",
        types.CreateSessionRequest,
        types.CreateSessionResponse,
        window=False,
        pauses=False,
        limits=_STORED,
    ),
    _post(
        "session_heartbeat",
        types.SessionHeartbeatRequest,
        types.SessionHeartbeatResponse,
        retries=False,
        timeout=10.0,
        pauses=False,
    ),
    _post(
        "finish_session",
        types.FinishSessionRequest,
        types.EmptyResponse,
        "sessions/{session_id}/finish",
    ),
    _get("list_sessions", "sessions", types.ListSessionsResponse, types.ListSessionsRequest),
    _get("get_session", "sessions/{session_id}", types.GetSessionResponse, types.GetSessionRequest),
    Operation(
        "assign_session_project",
        "PUT",
        "/api/v1/sessions/{session_id}/project",
        types.AssignSessionProjectRequest,
        types.EmptyResponse,
        Pool.REST,
    ),
    _get("trace_export", "sessions/{session_id}/trace_export", types.TraceExportResponse),
    _post(
        "search_sessions",
        types.SessionSearchRequest,
        types.SessionSearchResponse,
        "sessions/search",
        pool=Pool.REST,
    ),
    # models
    _queued(
        "create_model",
        types.CreateModelRequest,
        types.CreateModelResponse,
        "CreateModel",
        window=False,
        pauses=False,
        limits=_STORED,
    ),
    _post("get_info", types.GetInfoRequest, types.GetInfoResponse, pool=Pool.TRAINING),
    _queued("unload_model", types.UnloadModelRequest, types.UnloadModelResponse, "UnloadModel"),
    # training
    _queued(
        "forward",
        types.ForwardRequest,
        types.ForwardBackwardOutput,
        "Forward",
        binary_result=True,
        limits=_PASS,
    ),
    _queued(
        "forward_backward",
        types.ForwardBackwardRequest,
        types.ForwardBackwardOutput,
        "ForwardBackward",
        body=Body.JSON_OR_PROTO,
        binary_result=True,
        limits=_PASS,
    ),
    _queued("optim_step", types.OptimStepRequest, types.OptimStepResponse, "OptimStep"),
    _queued(
        "create_custom_loss",
        types.CreateCustomLossRequest,
        types.CreateCustomLossResponse,
        "CreateCustomLoss",
        flag="custom_loss_server_side",
    ),
    # weights
    _queued("load_weights", types.LoadWeightsRequest, types.LoadWeightsResponse, "LoadWeights"),
    _queued("save_weights", types.SaveWeightsRequest, types.SaveWeightsResponse, "SaveWeights"),
    _queued(
        "save_weights_for_sampler",
        types.SaveWeightsForSamplerRequest,
        types.SaveWeightsForSamplerResponseInternal,
        "SaveWeightsForSampler",
    ),
    _queued(
        "save_weights_external",
        types.SaveWeightsExternalRequest,
        types.SaveWeightsExternalResponseInternal,
        "SaveWeightsExternal",
    ),
    _post("copy_weights", types.CopyWeightsRequest, types.CopyWeightsResponse, pool=Pool.REST),
    _post("weights_info", types.WeightsInfoRequest, types.WeightsInfoResponse, pool=Pool.TRAINING),
    # sampling
    _post(
        "create_sampling_session",
        types.CreateSamplingSessionRequest,
        types.CreateSamplingSessionResponse,
        window=False,
        pauses=False,
    ),
    _post(
        "join_sampling_session",
        types.JoinSamplingSessionRequest,
        types.JoinSamplingSessionResponse,
        flag="sample_join_sampling_session",
    ),
    _get("get_sampler", "samplers/{sampler_id}", types.GetSamplerResponse, pool=Pool.SAMPLING),
    _queued(
        "asample",
        types.SampleRequest,
        types.SampleResponse,
        "Sample",
        pool=Pool.SAMPLING,
        binary_result=True,
        retries=False,
        limits=_SAMPLE,
    ),
    _post(
        "stream_sample",
        types.SampleRequest,
        types.SampleStreamChunk,
        pool=Pool.SAMPLING,
        retries=False,
        limits=_SAMPLE,
    ),
    # futures
    _post(
        "retrieve_future",
        types.FutureRetrieveRequest,
        object,
        pool=Pool.FUTURES,
        retries=False,
        timeout=45.0,
    ),
    _post(
        "retrieve_futures",
        types.FuturesRetrieveRequest,
        types.FuturesRetrieveResponse,
        pool=Pool.SAMPLE_FUTURES,
        retries=False,
        timeout=45.0,
        flag="sample_use_retrieve_futures",
    ),
    _post(
        "cancel_future",
        types.CancelFutureRequest,
        types.EmptyResponse,
        pool=Pool.FUTURES,
        retries=False,
        timeout=30.0,
        flag="sample_cancel_enabled",
    ),
    # runs and checkpoints
    _get(
        "list_training_runs",
        "training_runs",
        types.TrainingRunsResponse,
        types.ListTrainingRunsRequest,
    ),
    _get(
        "get_training_run",
        "training_runs/{training_run_id}",
        types.TrainingRun,
        types.GetSessionRequest,
    ),
    _get(
        "list_checkpoints",
        "training_runs/{training_run_id}/checkpoints",
        types.CheckpointsListResponse,
    ),
    _get(
        "list_user_checkpoints",
        "checkpoints",
        types.CheckpointsListResponse,
        types.ListCheckpointsRequest,
    ),
    Operation(
        "delete_checkpoint",
        "DELETE",
        f"/api/v1/{_CHECKPOINT}",
        types.EmptyRequest,
        types.EmptyResponse,
        Pool.REST,
        Body.NONE,
    ),
    _post(
        "publish_checkpoint",
        types.EmptyRequest,
        types.EmptyResponse,
        f"{_CHECKPOINT}/publish",
        pool=Pool.REST,
        body=Body.NONE,
    ),
    Operation(
        "unpublish_checkpoint",
        "DELETE",
        f"/api/v1/{_CHECKPOINT}/publish",
        types.EmptyRequest,
        types.EmptyResponse,
        Pool.REST,
        Body.NONE,
    ),
    Operation(
        "set_checkpoint_ttl",
        "PUT",
        f"/api/v1/{_CHECKPOINT}/ttl",
        types.SetCheckpointTtlRequest,
        types.EmptyResponse,
        Pool.REST,
    ),
    _get(
        "get_checkpoint_archive_url",
        f"{_CHECKPOINT}/archive",
        types.CheckpointArchiveUrlResponse,
        redirects=True,
        retries=False,
    ),
    _get(
        "get_external_weights_urls",
        f"{_CHECKPOINT}/external_weights_urls",
        types.ExternalWeightsUrlsResponse,
    ),
    # reports
    _post(
        "telemetry",
        types.TelemetrySendRequest,
        types.TelemetryResponse,
        pool=Pool.TELEMETRY,
        retries=False,
        timeout=5.0,
        limits=_EVENTS,
    ),
    _get(
        "get_audit_log", "audit", types.AuditLogResponse, types.GetAuditLogRequest, redirects=True
    ),
    _get(
        "get_billing_usage",
        "billing/usage/events",
        types.BillingUsageResponse,
        types.GetBillingUsageRequest,
    ),
    _get(
        "get_current_checkpoint_storage_usage",
        "billing/usage/checkpoints/current",
        types.CurrentCheckpointStorageUsageResponse,
        types.GetCurrentCheckpointStorageUsageRequest,
    ),
)

OPERATIONS: Final[Mapping[str, Operation[Any]]] = {row.name: row for row in _ROWS}


def operation(name: str) -> Operation[Any]:
    """The row with the name `name`."""
    return OPERATIONS[name]


def query_of(request: BaseModel) -> dict[str, str]:
    """The query string of a GET request: the fields that are set, as text."""
    return {
        name: value if isinstance(value, str) else str(value)
        for name, value in request.model_dump(mode="json", exclude_none=True).items()
    }
