"""Sessions, training runs, checkpoints, and their costs."""

from datetime import date, datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, BeforeValidator, Field, model_validator

from ._base import RequestModel, ResponseModel
from .paths import CheckpointType, ParsedCheckpointTinkerPath
from .training import ModelID

__all__ = [
    "AccessScope",
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "AssignSessionProjectRequest",
    "AuditLogEntry",
    "AuditLogResponse",
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CancelledSessionStatusQuery",
    "Checkpoint",
    "CheckpointArchiveUrlResponse",
    "CheckpointBillingEvent",
    "CheckpointsListResponse",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason",
    "ClientSessionFinishReasonType",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "Cursor",
    "ExternalWeightsUrlsResponse",
    "FailedSessionStatusQuery",
    "FinishSessionRequest",
    "GetAuditLogRequest",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "GetSessionRequest",
    "GetSessionResponse",
    "ListCheckpointsRequest",
    "ListSessionsRequest",
    "ListSessionsResponse",
    "ListTrainingRunsRequest",
    "OwnSearchOwner",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "SearchOwner",
    "SessionActive",
    "SessionCancelled",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStatus",
    "SessionStatusQuery",
    "SessionSummary",
    "SetCheckpointTtlRequest",
    "StorageBillingEvent",
    "TraceExportResponse",
    "TrainingBillingEvent",
    "TrainingRun",
    "TrainingRunsResponse",
    "UserSearchOwner",
]


def _datetime_or_text(value: Any) -> Any:
    """Read a timestamp; one in an unknown format is kept as text, so that the rest of the answer can be read."""
    if not isinstance(value, str):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return value


Timestamp: TypeAlias = Annotated[datetime | str, BeforeValidator(_datetime_or_text)]
AccessScope: TypeAlias = Literal["owned", "accessible"]
Limit: TypeAlias = Annotated[int, Field(ge=0)]

# -- sessions ------------------------------------------------------------------------------------


class CreateSessionRequest(RequestModel):
    tags: list[str]
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(ResponseModel):
    """The new session; the messages are meant for the user."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(RequestModel):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(ResponseModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class ListSessionsRequest(RequestModel):
    limit: Limit = 20
    offset: Limit = 0
    access_scope: AccessScope | None = None


class ListSessionsResponse(ResponseModel):
    sessions: list[str]


class GetSessionRequest(RequestModel):
    access_scope: AccessScope | None = None


class GetSessionResponse(ResponseModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class AssignSessionProjectRequest(RequestModel):
    project_id: str


class TraceExportResponse(ResponseModel):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class ClientSessionFinishSuccess(ResponseModel):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(ResponseModel):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(ResponseModel):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]
ClientSessionFinishReason: TypeAlias = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Field(discriminator="type"),
]


class FinishSessionRequest(RequestModel):
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(ResponseModel):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(ResponseModel):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(ResponseModel):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = Annotated[
    SessionFailedRequestReason
    | SessionFailedTrainingRunReason
    | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionActive(ResponseModel):
    type: Literal["active"] = "active"


class SessionCancelled(ResponseModel):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(ResponseModel):
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailed(ResponseModel):
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus: TypeAlias = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive,
    Field(discriminator="type"),
]

# -- searching sessions --------------------------------------------------------------------------


class OwnSearchOwner(RequestModel):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(RequestModel):
    type: Literal["accessible"] = "accessible"


class UserSearchOwner(RequestModel):
    type: Literal["user"] = "user"
    owner_urns: Annotated[list[str], Field(min_length=1, max_length=10)]


SearchOwner: TypeAlias = Annotated[
    OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")
]


class ActiveSessionStatusQuery(RequestModel):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(RequestModel):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(RequestModel):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(RequestModel):
    type: Literal["client_finished"] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = None


SessionStatusQuery: TypeAlias = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(ResponseModel):
    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(RequestModel):
    """Find sessions, newest first; `session_id` and `display_name` together match either."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: SearchOwner = OwnSearchOwner.model_construct()
    statuses: Annotated[list[SessionStatusQuery], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


class SessionSummary(ResponseModel):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(ResponseModel):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


# -- runs and checkpoints ------------------------------------------------------------------------


def _number_or_zero(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        return 0


Count: TypeAlias = Annotated[int, BeforeValidator(_number_or_zero)]


class Cursor(ResponseModel):
    """The position of a page in the whole list; text that is not a number reads as 0."""

    offset: Count
    limit: Count
    total_count: Count


class Checkpoint(ResponseModel):
    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: Timestamp
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: Timestamp | None = None

    @property
    def training_run_id(self) -> str:
        return ParsedCheckpointTinkerPath.from_tinker_path(self.tinker_path).training_run_id


class ListCheckpointsRequest(RequestModel):
    limit: Limit = 100
    offset: Limit = 0


class CheckpointsListResponse(ResponseModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CheckpointArchiveUrlResponse(ResponseModel):
    """The address of a checkpoint's archive, which needs no key, and its expiry time."""

    url: str
    expires: Timestamp | None = None


class ExternalWeightsUrlsResponse(ResponseModel):
    urls: dict[str, str]
    expires: datetime


class SetCheckpointTtlRequest(RequestModel):
    """Expire a checkpoint this many seconds from now; None keeps it forever."""

    ttl_seconds: int | None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent_on_the_wire(cls, data: Any) -> Any:
        return data  # null means: keep forever


class TrainingRun(ResponseModel):
    training_run_id: ModelID
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: Timestamp
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _id_may_be_short(cls, data: Any) -> Any:
        if isinstance(data, dict) and "training_run_id" not in data and "id" in data:
            return data | {"training_run_id": data["id"]}
        return data


class ListTrainingRunsRequest(RequestModel):
    limit: Limit = 20
    offset: Limit = 0
    access_scope: AccessScope | None = None
    project_id: str | None = None


class TrainingRunsResponse(ResponseModel):
    training_runs: list[TrainingRun]
    cursor: Cursor


# -- audit and billing ---------------------------------------------------------------------------


class GetAuditLogRequest(RequestModel):
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: date | None = None


class AuditLogEntry(ResponseModel):
    timestamp: datetime
    event: str
    event_details: dict[str, Any] = {}
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(ResponseModel):
    entries: list[AuditLogEntry]


class TrainingBillingEvent(ResponseModel):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(ResponseModel):
    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(ResponseModel):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(ResponseModel):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(ResponseModel):
    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo: TypeAlias = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Field(discriminator="type"),
]


class GetBillingUsageRequest(RequestModel):
    starting_on: datetime
    ending_before: datetime


class BillingUsageSession(ResponseModel):
    user_metadata: dict[str, str] | None = None


class BillingUsageEvent(ResponseModel):
    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageResponse(ResponseModel):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = {}
    cost_data_through: datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(RequestModel):
    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(ResponseModel):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(ResponseModel):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
