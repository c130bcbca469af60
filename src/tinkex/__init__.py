"""A client SDK and a local service for the Tinker post-training API.

Names load when they are first used: importing tinkex costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import config, errors, types
    from ._client.http import APIResponse, StreamResponse
    from ._client.rest import AdminClient, RestClient
    from ._client.retry import RetryConfig
    from ._client.runtime import APIFuture
    from ._client.sampling import SamplingClient
    from ._client.service import ServiceClient
    from ._client.training import TrainingClient
    from ._wire.transform import NOT_GIVEN, OMIT, NotGiven, Omit
    from .config import Config, reset_defaults, set_defaults
    from .errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        CancelledError,
        CircuitOpenError,
        ClientClosedError,
        ConfigError,
        ConflictError,
        DecodeError,
        ExperimentalWarning,
        GoneError,
        InternalServerError,
        InvalidInputError,
        InvalidPathError,
        NotFoundError,
        PayloadTooLargeError,
        PermissionDeniedError,
        RateLimitError,
        RequestErrorCategory,
        RequestFailedError,
        TinkerError,
        UnprocessableEntityError,
        UnsupportedMediaTypeError,
        WrongThreadError,
    )
    from .types import (
        AdamOptimizerConfig,
        AdamParams,
        Checkpoint,
        CheckpointType,
        CustomLossOutput,
        Datum,
        DimuonOptimizerConfig,
        DimuonParams,
        DmelChunk,
        EncodedTextChunk,
        ForwardBackwardOutput,
        ImageAssetPointerChunk,
        ImageChunk,
        LoraConfig,
        ModelID,
        ModelInput,
        ModelInputChunk,
        OptimParams,
        OptimStepRequest,
        OptimStepResponse,
        ParsedCheckpointTinkerPath,
        PromptProvenanceSpan,
        QueueState,
        RegularizerOutput,
        RegularizerSpec,
        SampledProvenanceSpan,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        StopReason,
        TensorData,
        TensorDtype,
        TrainingRun,
    )

__title__ = "tinkex"

# Where each name lives; the block above says the same to type checkers, and a test keeps them equal.
_MODULES = ("config", "errors", "types")
_NAMES = {
    "._client.http": "APIResponse StreamResponse",
    "._client.rest": "AdminClient RestClient",
    "._client.retry": "RetryConfig",
    "._client.runtime": "APIFuture",
    "._client.sampling": "SamplingClient",
    "._client.service": "ServiceClient",
    "._client.training": "TrainingClient",
    "._wire.transform": "NOT_GIVEN OMIT NotGiven Omit",
    ".config": "Config reset_defaults set_defaults",
    ".errors": """
        APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError
        AuthenticationError BadRequestError BillingError CancelledError CircuitOpenError
        ClientClosedError ConfigError ConflictError DecodeError ExperimentalWarning GoneError
        InternalServerError InvalidInputError InvalidPathError NotFoundError PayloadTooLargeError
        PermissionDeniedError RateLimitError RequestErrorCategory RequestFailedError TinkerError
        UnprocessableEntityError UnsupportedMediaTypeError WrongThreadError
    """,
    ".types": """
        AdamOptimizerConfig AdamParams Checkpoint CheckpointType CustomLossOutput Datum
        DimuonOptimizerConfig DimuonParams DmelChunk EncodedTextChunk ForwardBackwardOutput
        ImageAssetPointerChunk ImageChunk LoraConfig ModelID ModelInput ModelInputChunk OptimParams
        OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath PromptProvenanceSpan QueueState
        RegularizerOutput RegularizerSpec SampledProvenanceSpan SampledSequence SampleRequest
        SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun
    """,
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOME, *_MODULES, "__title__", "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if (home := _HOME.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
