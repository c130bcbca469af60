"""The table of operations: one row for every call of the protocol.

A row holds every fact about its operation. The client's transport, the service's routes, its scheduling and its
recovery after a crash, the OpenAPI document and the command line read the row; none of them keeps a list of operation
names of its own.

Left out on purpose: the device login of CLI 0.26 to 0.28 (`auth/apikey` POST, `auth-config`), which needs an identity
provider, and the gRPC polling of 0.21 to 0.22.1, which its authors withdrew. Rows with a `flag` are used only if
the service turns that flag on in `client/config` or `client/dynamic_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from tinkex import types
from tinkex.errors import InvalidInputError

__all__ = [
    "OPERATIONS",
    "Body",
    "BodyLimits",
    "Operation",
    "Pool",
    "ServicePart",
    "Theme",
    "operation",
]

R_co = TypeVar("R_co", covariant=True)


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
#: One sample may be a long text, and its alternatives are many small lists.
_LOGGED: Final = BodyLimits(json=32 << 20, items=1_000_000)
# Official clients send up to 1,024 examples and 5 MB a request, more only if a single example is larger.
_PASS: Final = BodyLimits(json=16 << 20, protobuf=32 << 20, items=100_000)


_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# Characters that a placeholder's value keeps unescaped: ids contain colons, a checkpoint id has two segments.
_SAFE: Final = {"checkpoint_id": ":/", "sampler_id": ""}


class Theme(Enum):
    """A group of related operations, with its title and description."""

    SERVICE = ("Service", "Health, capabilities, settings for clients, and identity.")
    SESSIONS = (
        "Sessions",
        "Everything a client creates belongs to its session, which stays open while the client sends heartbeats.",
    )
    TRAINING = (
        "Training",
        "A model is a LoRA adapter on a base model. Its requests run in the order of `seq_id`.",
    )
    WEIGHTS = (
        "Weights",
        "Checkpoints, named by paths such as `tinker://<training run>/weights/<name>`.",
    )
    SAMPLING = ("Sampling", "Drawing tokens from a base model or from saved weights.")
    FUTURES = ("Futures", "Waiting for the results of queued requests.")
    RUNS = ("Runs and checkpoints", "Training runs and their saved checkpoints.")
    REPORTS = ("Reports", "Telemetry, the audit log, and usage.")
    DASHBOARD = ("Dashboard", "What the page of the service reads. It may change between releases.")

    def __init__(self, title: str, about: str) -> None:
        self.title = title
        self.about = about


class ServicePart(Enum):
    """The part of a service that runs a queued request, and resumes it after a restart."""

    MODELS = "models"  # one request after another, in the order of the model's sequence numbers
    SAMPLERS = "samplers"
    LOSSES = "losses"


@dataclass(frozen=True)
class Operation(Generic[R_co]):
    """One call of the protocol. The table below has one row for each and is the only place for facts about operations.

    On the wire:

    - `request_kind`, `result_kind`: the class of the request and of the result, or its name in `tinkex.types`. A class
      that is named is imported at its first use, because most programs use few operations.
    - `queued`: the call is answered with a promise; `runner` executes it, `request_type` labels its polls.
    - `poll_pool`: the connections of polls for its result. Samples have their own: thousands of polls for samples must
      not delay the poll of a training step.
    - `binary_result`: the result is protobuf if the client accepts that.
    - `flag`: clients use the call only if the service turns this flag on.
    - `redirects`: the answer may be a redirect, which the client reads instead of following it.

    In the client:

    - `retries=False`: the transport sends it once, because a higher layer retries: a poll is its own retry, a sample
      has its own limits.
    - `window`: the transport retries for `retry_window` seconds. Calls that open something have none, because a user
      waits for the first of them.
    - `pauses`: the call waits after a 402 until the account can pay. Calls that open something fail at once.

    In the service:

    - `limits`: the largest body it reads.
    - `refused_field`: an invalid value of this field gets status 400. One of any other field gets 422.
    - `drops_refused`: a refused request is answered like an accepted one. Clients resend refused telemetry, so the
      service accepts and drops it.
    - `statuses`: its statuses besides 200 and the errors that every operation shares.
    - `priority`: routes with the highest are tried first, so frequent calls have a high one.
    - `makes_model`: it may be the first request of a model, and creates it.
    - `changes_model`: it changes the state of its model, and is replayed to restore the model after a crash.
    - `uses_gradients`: it consumes the accumulated gradients, so a snapshot after it is small.
    - `ends_model`: after it the model is gone, and is not restored after a restart.
    - `in_parts`: clients may send it in several requests at once, in any order. They send any other request of a model
      only after all requests before it were accepted.
    - `frees_journal`: it is accepted even if the journal of its key is full, because it lets records be deleted.
    """

    name: str
    method: str
    path: str
    request_kind: type[Any] | str
    result_kind: type[R_co] | str
    pool: Pool
    body: Body = Body.JSON
    theme: Theme | None = None  # None only for calls by path, which are in no table
    summary: str = ""
    runner: ServicePart | None = None
    request_type: str | None = None
    poll_pool: Pool = Pool.FUTURES
    binary_result: bool = False
    flag: str | None = None
    redirects: bool = False
    retries: bool = True
    timeout: float | None = None
    window: bool = True
    pauses: bool = True
    limits: BodyLimits = BodyLimits()
    refused_field: str | None = None
    drops_refused: bool = False
    statuses: tuple[int, ...] = ()
    priority: int = 0
    makes_model: bool = False
    changes_model: bool = False
    uses_gradients: bool = False
    ends_model: bool = False
    in_parts: bool = False
    frees_journal: bool = False

    @cached_property
    def request(self) -> type[Any]:
        return _class(self.request_kind)

    @cached_property
    def result(self) -> type[R_co]:
        return _class(self.result_kind)

    @property
    def queued(self) -> bool:
        return self.runner is not None

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(_PLACEHOLDER.findall(self.path))

    def url_path(self, values: Mapping[str, str] | None = None) -> str:
        """The path with its placeholders filled in."""
        if not self.placeholders:
            return self.path
        given = values or {}
        return _PLACEHOLDER.sub(lambda match: _segment(match.group(1), given), self.path)


def _class(kind: type[Any] | str) -> type[Any]:
    named: type[Any] = getattr(types, kind) if isinstance(kind, str) else kind
    return named


def _segment(name: str, values: Mapping[str, str]) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"must be a non-empty string, got {value!r:.80}", field=name)
    if any(part in {"", ".", ".."} for part in value.split("/")):
        raise InvalidInputError(f"{value!r:.200} is not an id", field=name)
    return quote(value, safe=_SAFE.get(name, ":"))


# -- helpers for the rows --------------------------------------------------------------------------


def _row(
    name: str,
    summary: str,
    method: str,
    path: str,
    request: str,
    result: str | type,
    **more: Any,
) -> Operation[Any]:
    return Operation(name, method, f"/api/v1/{path}", request, result, summary=summary, **more)


def _get(
    name: str,
    summary: str,
    path: str,
    result: str,
    request: str = "EmptyRequest",
    **more: Any,
) -> Operation[Any]:
    body = Body.NONE if request == "EmptyRequest" else Body.QUERY
    more.setdefault("pool", Pool.REST)
    return _row(name, summary, "GET", path, request, result, body=body, **more)


def _put(name: str, summary: str, request: str, path: str, **more: Any) -> Operation[Any]:
    return _row(name, summary, "PUT", path, request, "EmptyResponse", pool=Pool.REST, **more)


def _delete(name: str, summary: str, path: str, **more: Any) -> Operation[Any]:
    kinds = ("EmptyRequest", "EmptyResponse")
    return _row(name, summary, "DELETE", path, *kinds, pool=Pool.REST, body=Body.NONE, **more)


def _post(
    name: str, summary: str, request: str, result: str | type, path: str = "", **more: Any
) -> Operation[Any]:
    more.setdefault("pool", Pool.SESSION)
    return _row(name, summary, "POST", path or name, request, result, **more)


def _queued(name: str, summary: str, request: str, result: str, **more: Any) -> Operation[Any]:
    more = {"pool": Pool.TRAINING, "runner": ServicePart.MODELS} | more
    label = request.removesuffix("Request")
    return _post(name, summary, request, result, request_type=label, **more)


def _themed(theme: Theme, *rows: Operation[Any]) -> tuple[Operation[Any], ...]:
    return tuple(replace(row, theme=theme) for row in rows)


_CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{checkpoint_id}"

_ROWS: Final[tuple[Operation[Any], ...]] = (
    *_themed(
        Theme.SERVICE,
        _get(
            "healthz",
            "Check that the service is healthy",
            "healthz",
            "HealthResponse",
            pool=Pool.SESSION,
            priority=1,
        ),
        _get(
            "get_server_capabilities",
            "List the base models",
            "get_server_capabilities",
            "GetServerCapabilitiesResponse",
            pool=Pool.SESSION,
        ),
        _post(
            "client_config",
            "Get the settings for clients",
            "ClientConfigRequest",
            "ClientConfigResponse",
            "client/config",
            window=False,
        ),
        _post(
            "client_dynamic_config",
            "Get the settings that may change while a client runs",
            "ClientConfigRequest",
            "ClientDynamicConfigResponse",
            "client/dynamic_config",
            retries=False,
            timeout=10.0,
        ),
        _post(
            "auth_token",
            "Exchange the key for a token",
            "EmptyRequest",
            "AuthTokenResponse",
            "auth/token",
            flag="pjwt_auth_enabled",
        ),
        _get("get_api_key", "Describe the key in use", "auth/apikey/me", "ApiKeyInfoResponse"),
        _delete("delete_api_key", "Revoke the key in use", "auth/apikey/me", statuses=(403,)),
    ),
    *_themed(
        Theme.SESSIONS,
        _post(
            "create_session",
            "Open a session",
            "CreateSessionRequest",
            "CreateSessionResponse",
            window=False,
            pauses=False,
            limits=_STORED,
        ),
        _post(
            "session_heartbeat",
            "Keep a session alive",
            "SessionHeartbeatRequest",
            "SessionHeartbeatResponse",
            retries=False,
            timeout=10.0,
            pauses=False,
            priority=1,
            statuses=(410,),
        ),
        _post(
            "finish_session",
            "End a session",
            "FinishSessionRequest",
            "EmptyResponse",
            "sessions/{session_id}/finish",
        ),
        _get(
            "list_sessions",
            "List sessions",
            "sessions",
            "ListSessionsResponse",
            "ListSessionsRequest",
        ),
        _get(
            "get_session",
            "List the runs and samplers of a session",
            "sessions/{session_id}",
            "GetSessionResponse",
            "GetSessionRequest",
        ),
        _put(
            "assign_session_project",
            "Move a session to a project",
            "AssignSessionProjectRequest",
            "sessions/{session_id}/project",
            refused_field="project_id",
        ),
        _get(
            "trace_export",
            "Get the trace of a session",
            "sessions/{session_id}/trace_export",
            "TraceExportResponse",
        ),
        _post(
            "search_sessions",
            "Find sessions, newest first",
            "SessionSearchRequest",
            "SessionSearchResponse",
            "sessions/search",
            pool=Pool.REST,
        ),
    ),
    *_themed(
        Theme.TRAINING,
        _queued(
            "create_model",
            "Create an adapter",
            "CreateModelRequest",
            "CreateModelResponse",
            window=False,
            pauses=False,
            limits=_STORED,
            makes_model=True,
            changes_model=True,
        ),
        _post(
            "get_info",
            "Describe a model",
            "GetInfoRequest",
            "GetInfoResponse",
            pool=Pool.TRAINING,
        ),
        _queued(
            "unload_model",
            "Unload a model",
            "UnloadModelRequest",
            "UnloadModelResponse",
            ends_model=True,
            frees_journal=True,
        ),
        _queued(
            "forward",
            "Compute a loss without gradients",
            "ForwardRequest",
            "ForwardBackwardOutput",
            binary_result=True,
            limits=_PASS,
            in_parts=True,
            priority=2,
        ),
        _queued(
            "forward_backward",
            "Compute a loss and accumulate its gradients",
            "ForwardBackwardRequest",
            "ForwardBackwardOutput",
            body=Body.JSON_OR_PROTO,
            binary_result=True,
            limits=_PASS,
            changes_model=True,
            in_parts=True,
            priority=2,
        ),
        _queued(
            "optim_step",
            "Update the weights from the gradients",
            "OptimStepRequest",
            "OptimStepResponse",
            changes_model=True,
            uses_gradients=True,
            frees_journal=True,
            priority=2,
        ),
        _queued(
            "create_custom_loss",
            "Upload a loss traced by the client",
            "CreateCustomLossRequest",
            "CreateCustomLossResponse",
            runner=ServicePart.LOSSES,
            flag="custom_loss_server_side",
        ),
    ),
    *_themed(
        Theme.WEIGHTS,
        _queued(
            "load_weights",
            "Load a checkpoint into a model, or create a model from it",
            "LoadWeightsRequest",
            "LoadWeightsResponse",
            makes_model=True,
            changes_model=True,
            statuses=(403,),
        ),
        _queued(
            "save_weights",
            "Save weights and optimizer state",
            "SaveWeightsRequest",
            "SaveWeightsResponse",
            frees_journal=True,
            refused_field="ttl_seconds",
        ),
        _queued(
            "save_weights_for_sampler",
            "Save the weights for sampling",
            "SaveWeightsForSamplerRequest",
            "SaveWeightsForSamplerResponseInternal",
            frees_journal=True,
            refused_field="ttl_seconds",
        ),
        _queued(
            "save_weights_external",
            "Write adapter files for use elsewhere",
            "SaveWeightsExternalRequest",
            "SaveWeightsExternalResponseInternal",
            refused_field="ttl_seconds",
        ),
        _post(
            "copy_weights",
            "Copy a checkpoint",
            "CopyWeightsRequest",
            "CopyWeightsResponse",
            pool=Pool.REST,
            refused_field="ttl_seconds",
            statuses=(403,),
        ),
        _post(
            "weights_info",
            "Describe a checkpoint",
            "WeightsInfoRequest",
            "WeightsInfoResponse",
            pool=Pool.TRAINING,
        ),
    ),
    *_themed(
        Theme.SAMPLING,
        _post(
            "create_sampling_session",
            "Open a sampler",
            "CreateSamplingSessionRequest",
            "CreateSamplingSessionResponse",
            window=False,
            pauses=False,
        ),
        _post(
            "join_sampling_session",
            "Share a sampler with another process",
            "JoinSamplingSessionRequest",
            "JoinSamplingSessionResponse",
            flag="sample_join_sampling_session",
        ),
        _get(
            "get_sampler",
            "Describe a sampler",
            "samplers/{sampler_id}",
            "GetSamplerResponse",
            pool=Pool.SAMPLING,
        ),
        _queued(
            "asample",
            "Sample",
            "SampleRequest",
            "SampleResponse",
            runner=ServicePart.SAMPLERS,
            pool=Pool.SAMPLING,
            poll_pool=Pool.SAMPLE_FUTURES,
            binary_result=True,
            retries=False,
            limits=_SAMPLE,
            priority=3,
        ),
        _post(
            "stream_sample",
            "Sample, token by token",
            "SampleRequest",
            "SampleStreamChunk",
            pool=Pool.SAMPLING,
            retries=False,
            limits=_SAMPLE,
        ),
    ),
    *_themed(
        Theme.FUTURES,
        _post(
            "retrieve_future",
            "Wait for a result",
            "FutureRetrieveRequest",
            object,
            pool=Pool.FUTURES,
            retries=False,
            timeout=45.0,
            priority=4,
            statuses=(408, 410),
        ),
        _post(
            "retrieve_futures",
            "Wait for any result of a sampler",
            "FuturesRetrieveRequest",
            "FuturesRetrieveResponse",
            pool=Pool.SAMPLE_FUTURES,
            retries=False,
            timeout=45.0,
            flag="sample_use_retrieve_futures",
        ),
        _post(
            "cancel_future",
            "Cancel a request whose result is no longer needed",
            "CancelFutureRequest",
            "EmptyResponse",
            pool=Pool.FUTURES,
            retries=False,
            timeout=30.0,
            flag="sample_cancel_enabled",
        ),
    ),
    *_themed(
        Theme.RUNS,
        _get(
            "list_training_runs",
            "List training runs",
            "training_runs",
            "TrainingRunsResponse",
            "ListTrainingRunsRequest",
        ),
        _get(
            "get_training_run",
            "Describe a training run",
            "training_runs/{training_run_id}",
            "TrainingRun",
            "GetSessionRequest",
        ),
        _get(
            "list_checkpoints",
            "List the checkpoints of a run",
            "training_runs/{training_run_id}/checkpoints",
            "CheckpointsListResponse",
        ),
        _get(
            "list_user_checkpoints",
            "List all checkpoints, newest first",
            "checkpoints",
            "CheckpointsListResponse",
            "ListCheckpointsRequest",
        ),
        _delete("delete_checkpoint", "Delete a checkpoint", _CHECKPOINT),
        _post(
            "publish_checkpoint",
            "Publish a checkpoint for all users",
            "EmptyRequest",
            "EmptyResponse",
            f"{_CHECKPOINT}/publish",
            pool=Pool.REST,
            body=Body.NONE,
        ),
        _delete(
            "unpublish_checkpoint",
            "Make a published checkpoint private again",
            f"{_CHECKPOINT}/publish",
        ),
        _put(
            "set_checkpoint_ttl",
            "Set the expiry time of a checkpoint",
            "SetCheckpointTtlRequest",
            f"{_CHECKPOINT}/ttl",
        ),
        _get(
            "get_checkpoint_archive_url",
            "Get the address of a checkpoint's archive",
            f"{_CHECKPOINT}/archive",
            "CheckpointArchiveUrlResponse",
            redirects=True,
            retries=False,
            statuses=(302,),
        ),
        _get(
            "get_external_weights_urls",
            "Get the addresses of exported files",
            f"{_CHECKPOINT}/external_weights_urls",
            "ExternalWeightsUrlsResponse",
        ),
    ),
    *_themed(
        Theme.REPORTS,
        _post(
            "telemetry",
            "Receive a client's events",
            "TelemetrySendRequest",
            "TelemetryResponse",
            pool=Pool.TELEMETRY,
            retries=False,
            timeout=5.0,
            limits=_EVENTS,
            drops_refused=True,
        ),
        _get(
            "get_audit_log",
            "Read the audit log",
            "audit",
            "AuditLogResponse",
            "GetAuditLogRequest",
            redirects=True,
        ),
        _get(
            "get_billing_usage",
            "Read the usage",
            "billing/usage/events",
            "BillingUsageResponse",
            "GetBillingUsageRequest",
        ),
        _get(
            "get_current_checkpoint_storage_usage",
            "Read the storage that checkpoints use",
            "billing/usage/checkpoints/current",
            "CurrentCheckpointStorageUsageResponse",
            "GetCurrentCheckpointStorageUsageRequest",
        ),
    ),
    *_themed(
        Theme.DASHBOARD,
        _post(
            "log_run",
            "Receive metrics and samples of a run from its training loop",
            "LogRequest",
            "LogResponse",
            "training_runs/{training_run_id}/log",
            pool=Pool.TELEMETRY,
            limits=_LOGGED,
        ),
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
