"""Messages about the service itself: futures, server flags, capabilities, identity."""

from enum import Enum
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, field_validator

from tinkex.errors import RequestErrorCategory

from ._base import RequestModel, ResponseModel
from .training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    ModelID,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)

__all__ = [
    "ApiKeyInfoResponse",
    "AuthTokenResponse",
    "CancelFutureRequest",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "EmptyRequest",
    "EmptyResponse",
    "EngineHealth",
    "FutureCompletion",
    "FutureFailed",
    "FutureFinished",
    "FutureRetrieveRequest",
    "FutureRetrieveResponse",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "GetServerCapabilitiesResponse",
    "HealthResponse",
    "MetadataOnlyResponse",
    "QueueState",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
    "SamplingSessionFuturesTarget",
    "SupportedModel",
    "TryAgainResponse",
    "UntypedAPIFuture",
    "WhoamiResponse",
]

RequestID: TypeAlias = str


class EmptyRequest(RequestModel):
    """A request without a body; its path says everything."""


class EmptyResponse(ResponseModel):
    """An answer without a body; its status says everything."""


# -- futures -------------------------------------------------------------------------------------


class QueueState(Enum):
    """Why a request is still waiting; an unknown state is never treated as active."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        try:
            return cls(str(value).strip().lower())
        except ValueError:
            return cls.UNKNOWN

    @property
    def paused(self) -> bool:
        """Whether the request waits for a limit or for capacity."""
        return self in {QueueState.PAUSED_RATE_LIMIT, QueueState.PAUSED_CAPACITY}


class UntypedAPIFuture(ResponseModel):
    """The promise of a result."""

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None


class FutureRetrieveRequest(RequestModel):
    request_id: RequestID
    allow_metadata_only: bool = False


class TryAgainResponse(ResponseModel):
    """Not ready yet; `queue_state` says why."""

    type: Annotated[Literal["try_again"], BeforeValidator(lambda text: str(text).lower())]
    request_id: RequestID
    queue_state: Annotated[QueueState, BeforeValidator(QueueState.parse)]
    queue_state_reason: str | None = None
    retry_after_ms: Annotated[int, Field(ge=0)] | None = None


class MetadataOnlyResponse(ResponseModel):
    """Ready, with its size in bytes: the client fetches it when it has room for it."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: Annotated[int, Field(ge=0)]


class RequestFailedResponse(ResponseModel):
    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown

    @field_validator("category", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> RequestErrorCategory:
        return RequestErrorCategory.parse(value)


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)


class SamplingSessionFuturesTarget(RequestModel):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(RequestModel):
    """Wait for any result of a sampling session after `prev_cursor`."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: list[RequestID] = []


class FutureFinished(ResponseModel):
    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(ResponseModel):
    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]


class FuturesRetrieveResponse(ResponseModel):
    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(RequestModel):
    request_id: RequestID


# -- the service ---------------------------------------------------------------------------------


class EngineHealth(ResponseModel):
    """One engine of a service."""

    name: str
    kind: str = ""
    node: str = ""
    device: str = ""
    up: bool = True
    base_models: list[str] = []
    memory_bytes: int | None = None
    models: int = 0
    in_line: int = 0
    samples: int = 0
    restarts: int = 0
    trouble: str | None = None


class HealthResponse(ResponseModel):
    """The service and its engine are running.

    `engine` is the activity of its engines, and `engines` lists them, if the service reports it.
    """

    status: Literal["ok"] = "ok"
    engine: str | None = None
    engines: list[EngineHealth] | None = None


class SupportedModel(ResponseModel):
    model_id: str | None = None
    model_name: str | None = None
    arch: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(ResponseModel):
    supported_models: list[SupportedModel]

    @field_validator("supported_models", mode="before")
    @classmethod
    def _names_alone_will_do(cls, models: Any) -> Any:
        if not isinstance(models, list):
            return models
        return [
            {"model_name": model} if isinstance(model, str) else model
            for model in models
            if model is not None
        ]

    def model_names(self) -> list[str]:
        return [model.model_name for model in self.supported_models if model.model_name]


class ClientConfigRequest(RequestModel):
    sdk_version: str


class ClientConfigResponse(ResponseModel):
    """The behaviour that the service wants from its clients; `{}` means all defaults."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    # Read by clients 0.19 to 0.24 only; the service sets it, this client always writes protobuf.
    proto_write_fwdbwd: bool = False
    # Sent by the tinkex service only: it knows the extensions of `SamplingParams`.
    sample_extensions: bool = False


class ClientDynamicConfigResponse(ResponseModel):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(ResponseModel):
    jwt: str = Field(repr=False)


class _OrgDetails(ResponseModel):
    name: str


class _UserDetails(ResponseModel):
    email: str


class _ApiKeyDetails(ResponseModel):
    org_details: _OrgDetails
    user_details: _UserDetails


class ApiKeyInfoResponse(ResponseModel):
    """The key that the caller uses, without the key itself."""

    key_id: int
    name: str
    note: str
    details: _ApiKeyDetails


class WhoamiResponse(ResponseModel):
    user_urn: str
    org_urn: str
    email: str | None = None
