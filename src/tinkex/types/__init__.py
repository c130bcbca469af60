"""Every value of the protocol, defined once for the client and the service.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import lazy_names

if TYPE_CHECKING:
    from .inputs import Datum as Datum
    from .inputs import DmelChunk as DmelChunk
    from .inputs import EncodedTextChunk as EncodedTextChunk
    from .inputs import ImageAssetPointerChunk as ImageAssetPointerChunk
    from .inputs import ImageChunk as ImageChunk
    from .inputs import LossFnInputs as LossFnInputs
    from .inputs import LossFnOutput as LossFnOutput
    from .inputs import ModelInput as ModelInput
    from .inputs import ModelInputChunk as ModelInputChunk
    from .inputs import PromptProvenanceSpan as PromptProvenanceSpan
    from .inputs import ProvenanceSpans as ProvenanceSpans
    from .inputs import SampledProvenanceSpan as SampledProvenanceSpan
    from .logged import LogEntry as LogEntry
    from .logged import LoggedSample as LoggedSample
    from .logged import LogRequest as LogRequest
    from .logged import LogResponse as LogResponse
    from .messages import ApiKeyInfoResponse as ApiKeyInfoResponse
    from .messages import AuthTokenResponse as AuthTokenResponse
    from .messages import CancelFutureRequest as CancelFutureRequest
    from .messages import ClientConfigRequest as ClientConfigRequest
    from .messages import ClientConfigResponse as ClientConfigResponse
    from .messages import ClientDynamicConfigResponse as ClientDynamicConfigResponse
    from .messages import EmptyRequest as EmptyRequest
    from .messages import EmptyResponse as EmptyResponse
    from .messages import EngineHealth as EngineHealth
    from .messages import FutureCompletion as FutureCompletion
    from .messages import FutureFailed as FutureFailed
    from .messages import FutureFinished as FutureFinished
    from .messages import FutureRetrieveRequest as FutureRetrieveRequest
    from .messages import FutureRetrieveResponse as FutureRetrieveResponse
    from .messages import FuturesRetrieveRequest as FuturesRetrieveRequest
    from .messages import FuturesRetrieveResponse as FuturesRetrieveResponse
    from .messages import GetServerCapabilitiesResponse as GetServerCapabilitiesResponse
    from .messages import HealthResponse as HealthResponse
    from .messages import MetadataOnlyResponse as MetadataOnlyResponse
    from .messages import QueueState as QueueState
    from .messages import RequestErrorCategory as RequestErrorCategory
    from .messages import RequestFailedResponse as RequestFailedResponse
    from .messages import RequestID as RequestID
    from .messages import SamplingSessionFuturesTarget as SamplingSessionFuturesTarget
    from .messages import SupportedModel as SupportedModel
    from .messages import TryAgainResponse as TryAgainResponse
    from .messages import UntypedAPIFuture as UntypedAPIFuture
    from .messages import WhoamiResponse as WhoamiResponse
    from .paths import CheckpointType as CheckpointType
    from .paths import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from .regularizers import BaseLossOutput as BaseLossOutput
    from .regularizers import CustomLossOutput as CustomLossOutput
    from .regularizers import RegularizerOutput as RegularizerOutput
    from .regularizers import RegularizerSpec as RegularizerSpec
    from .runs import AccessibleSearchOwner as AccessibleSearchOwner
    from .runs import AccessScope as AccessScope
    from .runs import ActiveSessionStatusQuery as ActiveSessionStatusQuery
    from .runs import AssignSessionProjectRequest as AssignSessionProjectRequest
    from .runs import AuditLogEntry as AuditLogEntry
    from .runs import AuditLogResponse as AuditLogResponse
    from .runs import BillingEventInfo as BillingEventInfo
    from .runs import BillingUsageEvent as BillingUsageEvent
    from .runs import BillingUsageResponse as BillingUsageResponse
    from .runs import BillingUsageSession as BillingUsageSession
    from .runs import CancelledSessionStatusQuery as CancelledSessionStatusQuery
    from .runs import Checkpoint as Checkpoint
    from .runs import CheckpointArchiveUrlResponse as CheckpointArchiveUrlResponse
    from .runs import CheckpointBillingEvent as CheckpointBillingEvent
    from .runs import CheckpointsListResponse as CheckpointsListResponse
    from .runs import ClientFinishedSessionStatusQuery as ClientFinishedSessionStatusQuery
    from .runs import ClientSessionFinished as ClientSessionFinished
    from .runs import ClientSessionFinishErrored as ClientSessionFinishErrored
    from .runs import ClientSessionFinishInterrupted as ClientSessionFinishInterrupted
    from .runs import ClientSessionFinishReason as ClientSessionFinishReason
    from .runs import ClientSessionFinishReasonType as ClientSessionFinishReasonType
    from .runs import ClientSessionFinishSuccess as ClientSessionFinishSuccess
    from .runs import CreateSessionRequest as CreateSessionRequest
    from .runs import CreateSessionResponse as CreateSessionResponse
    from .runs import CurrentCheckpointStorageUsageItem as CurrentCheckpointStorageUsageItem
    from .runs import CurrentCheckpointStorageUsageResponse as CurrentCheckpointStorageUsageResponse
    from .runs import Cursor as Cursor
    from .runs import ExternalWeightsUrlsResponse as ExternalWeightsUrlsResponse
    from .runs import FailedSessionStatusQuery as FailedSessionStatusQuery
    from .runs import FinishSessionRequest as FinishSessionRequest
    from .runs import GetAuditLogRequest as GetAuditLogRequest
    from .runs import GetBillingUsageRequest as GetBillingUsageRequest
    from .runs import (
        GetCurrentCheckpointStorageUsageRequest as GetCurrentCheckpointStorageUsageRequest,
    )
    from .runs import GetSessionRequest as GetSessionRequest
    from .runs import GetSessionResponse as GetSessionResponse
    from .runs import ListCheckpointsRequest as ListCheckpointsRequest
    from .runs import ListSessionsRequest as ListSessionsRequest
    from .runs import ListSessionsResponse as ListSessionsResponse
    from .runs import ListTrainingRunsRequest as ListTrainingRunsRequest
    from .runs import OwnSearchOwner as OwnSearchOwner
    from .runs import SamplingPrefillBillingEvent as SamplingPrefillBillingEvent
    from .runs import SamplingSampleBillingEvent as SamplingSampleBillingEvent
    from .runs import SearchOwner as SearchOwner
    from .runs import SessionActive as SessionActive
    from .runs import SessionCancelled as SessionCancelled
    from .runs import SessionFailed as SessionFailed
    from .runs import SessionFailedReason as SessionFailedReason
    from .runs import SessionFailedRequestReason as SessionFailedRequestReason
    from .runs import SessionFailedSamplingSessionReason as SessionFailedSamplingSessionReason
    from .runs import SessionFailedTrainingRunReason as SessionFailedTrainingRunReason
    from .runs import SessionHeartbeatRequest as SessionHeartbeatRequest
    from .runs import SessionHeartbeatResponse as SessionHeartbeatResponse
    from .runs import SessionSearchCursor as SessionSearchCursor
    from .runs import SessionSearchRequest as SessionSearchRequest
    from .runs import SessionSearchResponse as SessionSearchResponse
    from .runs import SessionStatus as SessionStatus
    from .runs import SessionStatusQuery as SessionStatusQuery
    from .runs import SessionSummary as SessionSummary
    from .runs import SetCheckpointTtlRequest as SetCheckpointTtlRequest
    from .runs import StorageBillingEvent as StorageBillingEvent
    from .runs import TraceExportResponse as TraceExportResponse
    from .runs import TrainingBillingEvent as TrainingBillingEvent
    from .runs import TrainingRun as TrainingRun
    from .runs import TrainingRunsResponse as TrainingRunsResponse
    from .runs import UserSearchOwner as UserSearchOwner
    from .sampling import CreateSamplingSessionRequest as CreateSamplingSessionRequest
    from .sampling import CreateSamplingSessionResponse as CreateSamplingSessionResponse
    from .sampling import GetSamplerResponse as GetSamplerResponse
    from .sampling import JoinSamplingSessionRequest as JoinSamplingSessionRequest
    from .sampling import JoinSamplingSessionResponse as JoinSamplingSessionResponse
    from .sampling import SampledSequence as SampledSequence
    from .sampling import SampleRequest as SampleRequest
    from .sampling import SampleResponse as SampleResponse
    from .sampling import SampleStreamChunk as SampleStreamChunk
    from .sampling import SamplingParams as SamplingParams
    from .sampling import StopReason as StopReason
    from .telemetry import EventType as EventType
    from .telemetry import GenericEvent as GenericEvent
    from .telemetry import SessionEndEvent as SessionEndEvent
    from .telemetry import SessionStartEvent as SessionStartEvent
    from .telemetry import Severity as Severity
    from .telemetry import TelemetryBatch as TelemetryBatch
    from .telemetry import TelemetryEvent as TelemetryEvent
    from .telemetry import TelemetryResponse as TelemetryResponse
    from .telemetry import TelemetrySendRequest as TelemetrySendRequest
    from .telemetry import UnhandledExceptionEvent as UnhandledExceptionEvent
    from .telemetry import telemetry_event as telemetry_event
    from .tensors import PromptAltTokens as PromptAltTokens
    from .tensors import TensorData as TensorData
    from .tensors import TensorDtype as TensorDtype
    from .tensors import TopkLogprobs as TopkLogprobs
    from .tensors import check_precision_loss as check_precision_loss
    from .tensors import dtype_of as dtype_of
    from .training import AdamOptimizerConfig as AdamOptimizerConfig
    from .training import AdamParams as AdamParams
    from .training import CopyWeightsRequest as CopyWeightsRequest
    from .training import CopyWeightsResponse as CopyWeightsResponse
    from .training import CreateCustomLossRequest as CreateCustomLossRequest
    from .training import CreateCustomLossResponse as CreateCustomLossResponse
    from .training import CreateModelRequest as CreateModelRequest
    from .training import CreateModelResponse as CreateModelResponse
    from .training import CustomLossGraph as CustomLossGraph
    from .training import CustomLossInput as CustomLossInput
    from .training import CustomLossInputRank as CustomLossInputRank
    from .training import CustomLossNode as CustomLossNode
    from .training import DimuonOptimizerConfig as DimuonOptimizerConfig
    from .training import DimuonParams as DimuonParams
    from .training import ForwardBackwardInput as ForwardBackwardInput
    from .training import ForwardBackwardOutput as ForwardBackwardOutput
    from .training import ForwardBackwardRequest as ForwardBackwardRequest
    from .training import ForwardRequest as ForwardRequest
    from .training import GetInfoRequest as GetInfoRequest
    from .training import GetInfoResponse as GetInfoResponse
    from .training import LoadWeightsRequest as LoadWeightsRequest
    from .training import LoadWeightsResponse as LoadWeightsResponse
    from .training import LoraConfig as LoraConfig
    from .training import LossFnType as LossFnType
    from .training import ModelData as ModelData
    from .training import ModelID as ModelID
    from .training import OptimizerConfig as OptimizerConfig
    from .training import OptimParams as OptimParams
    from .training import OptimParamsBase as OptimParamsBase
    from .training import OptimStepRequest as OptimStepRequest
    from .training import OptimStepResponse as OptimStepResponse
    from .training import SaveWeightsExternalRequest as SaveWeightsExternalRequest
    from .training import SaveWeightsExternalResponse as SaveWeightsExternalResponse
    from .training import SaveWeightsExternalResponseInternal as SaveWeightsExternalResponseInternal
    from .training import SaveWeightsForSamplerRequest as SaveWeightsForSamplerRequest
    from .training import SaveWeightsForSamplerResponse as SaveWeightsForSamplerResponse
    from .training import (
        SaveWeightsForSamplerResponseInternal as SaveWeightsForSamplerResponseInternal,
    )
    from .training import SaveWeightsRequest as SaveWeightsRequest
    from .training import SaveWeightsResponse as SaveWeightsResponse
    from .training import UnloadModelRequest as UnloadModelRequest
    from .training import UnloadModelResponse as UnloadModelResponse
    from .training import WeightsInfoRequest as WeightsInfoRequest
    from .training import WeightsInfoResponse as WeightsInfoResponse

# The module of each name. Type checkers read the block above instead; a test keeps both equal.
_NAMES = {
    ".inputs": """
        Datum DmelChunk EncodedTextChunk ImageAssetPointerChunk ImageChunk LossFnInputs
        LossFnOutput ModelInput ModelInputChunk PromptProvenanceSpan ProvenanceSpans
        SampledProvenanceSpan
    """,
    ".logged": "LogEntry LogRequest LogResponse LoggedSample",
    ".messages": """
        ApiKeyInfoResponse AuthTokenResponse CancelFutureRequest ClientConfigRequest
        ClientConfigResponse ClientDynamicConfigResponse EmptyRequest EmptyResponse
        EngineHealth FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest
        FutureRetrieveResponse FuturesRetrieveRequest FuturesRetrieveResponse
        GetServerCapabilitiesResponse HealthResponse MetadataOnlyResponse QueueState
        RequestErrorCategory RequestFailedResponse RequestID SamplingSessionFuturesTarget
        SupportedModel TryAgainResponse UntypedAPIFuture WhoamiResponse
    """,
    ".paths": "CheckpointType ParsedCheckpointTinkerPath",
    ".regularizers": "BaseLossOutput CustomLossOutput RegularizerOutput RegularizerSpec",
    ".runs": """
        AccessScope AccessibleSearchOwner ActiveSessionStatusQuery
        AssignSessionProjectRequest AuditLogEntry AuditLogResponse BillingEventInfo
        BillingUsageEvent BillingUsageResponse BillingUsageSession
        CancelledSessionStatusQuery Checkpoint CheckpointArchiveUrlResponse
        CheckpointBillingEvent CheckpointsListResponse ClientFinishedSessionStatusQuery
        ClientSessionFinishErrored ClientSessionFinishInterrupted
        ClientSessionFinishReason ClientSessionFinishReasonType ClientSessionFinishSuccess
        ClientSessionFinished CreateSessionRequest CreateSessionResponse
        CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse Cursor
        ExternalWeightsUrlsResponse FailedSessionStatusQuery FinishSessionRequest
        GetAuditLogRequest GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest
        GetSessionRequest GetSessionResponse ListCheckpointsRequest ListSessionsRequest
        ListSessionsResponse ListTrainingRunsRequest OwnSearchOwner
        SamplingPrefillBillingEvent SamplingSampleBillingEvent SearchOwner SessionActive
        SessionCancelled SessionFailed SessionFailedReason SessionFailedRequestReason
        SessionFailedSamplingSessionReason SessionFailedTrainingRunReason
        SessionHeartbeatRequest SessionHeartbeatResponse SessionSearchCursor
        SessionSearchRequest SessionSearchResponse SessionStatus SessionStatusQuery
        SessionSummary SetCheckpointTtlRequest StorageBillingEvent TraceExportResponse
        TrainingBillingEvent TrainingRun TrainingRunsResponse UserSearchOwner
    """,
    ".sampling": """
        CreateSamplingSessionRequest CreateSamplingSessionResponse GetSamplerResponse
        JoinSamplingSessionRequest JoinSamplingSessionResponse SampleRequest
        SampleResponse SampleStreamChunk SampledSequence SamplingParams StopReason
    """,
    ".telemetry": """
        EventType GenericEvent SessionEndEvent SessionStartEvent Severity TelemetryBatch
        TelemetryEvent TelemetryResponse TelemetrySendRequest UnhandledExceptionEvent
        telemetry_event
    """,
    ".tensors": """
        PromptAltTokens TensorData TensorDtype TopkLogprobs check_precision_loss dtype_of
    """,
    ".training": """
        AdamOptimizerConfig AdamParams CopyWeightsRequest CopyWeightsResponse
        CreateCustomLossRequest CreateCustomLossResponse CreateModelRequest
        CreateModelResponse CustomLossGraph CustomLossInput CustomLossInputRank
        CustomLossNode DimuonOptimizerConfig DimuonParams ForwardBackwardInput
        ForwardBackwardOutput ForwardBackwardRequest ForwardRequest GetInfoRequest
        GetInfoResponse LoadWeightsRequest LoadWeightsResponse LoraConfig LossFnType
        ModelData ModelID OptimParams OptimParamsBase OptimStepRequest OptimStepResponse
        OptimizerConfig SaveWeightsExternalRequest SaveWeightsExternalResponse
        SaveWeightsExternalResponseInternal SaveWeightsForSamplerRequest
        SaveWeightsForSamplerResponse SaveWeightsForSamplerResponseInternal
        SaveWeightsRequest SaveWeightsResponse UnloadModelRequest UnloadModelResponse
        WeightsInfoRequest WeightsInfoResponse
    """,
}

if not TYPE_CHECKING:  # to a type checker `__getattr__` means that every name exists
    __all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
