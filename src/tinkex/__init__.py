"""A client SDK and a local service for the Tinker post-training API.

Names are imported on first use, so that `import tinkex` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import lazy_names

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import config as config
    from . import errors as errors
    from . import objectives as objectives
    from . import recovery as recovery
    from . import regularizers as regularizers
    from . import telemetry as telemetry
    from . import types as types
    from ._client.downloads import download_checkpoint as download_checkpoint
    from ._client.http import APIResponse as APIResponse
    from ._client.http import StreamResponse as StreamResponse
    from ._client.operations import OperationsClient as OperationsClient
    from ._client.rest import AdminClient as AdminClient
    from ._client.rest import RestClient as RestClient
    from ._client.retry import RetryConfig as RetryConfig
    from ._client.runtime import APIFuture as APIFuture
    from ._client.runtime import await_many as await_many
    from ._client.sampling import SamplingClient as SamplingClient
    from ._client.service import ServiceClient as ServiceClient
    from ._client.tokenizers import set_tokenizer_loader as set_tokenizer_loader
    from ._client.traced_loss import LossHandle as LossHandle
    from ._client.traced_loss import PerDatumLossFn as PerDatumLossFn
    from ._client.training import TrainingClient as TrainingClient
    from ._client.with_retry import with_retry as with_retry
    from ._local import LocalServiceClient as LocalServiceClient
    from ._local import local as local
    from ._wire.transform import NOT_GIVEN as NOT_GIVEN
    from ._wire.transform import OMIT as OMIT
    from ._wire.transform import NotGiven as NotGiven
    from ._wire.transform import Omit as Omit
    from .compat import install_as_tinker as install_as_tinker
    from .config import Config as Config
    from .config import reset_defaults as reset_defaults
    from .config import set_defaults as set_defaults
    from .errors import APIConnectionError as APIConnectionError
    from .errors import APIError as APIError
    from .errors import APIResponseValidationError as APIResponseValidationError
    from .errors import APIStatusError as APIStatusError
    from .errors import APITimeoutError as APITimeoutError
    from .errors import AuthenticationError as AuthenticationError
    from .errors import BadRequestError as BadRequestError
    from .errors import BillingError as BillingError
    from .errors import CircuitOpenError as CircuitOpenError
    from .errors import ClientClosedError as ClientClosedError
    from .errors import ConfigError as ConfigError
    from .errors import ConflictError as ConflictError
    from .errors import DecodeError as DecodeError
    from .errors import ExperimentalWarning as ExperimentalWarning
    from .errors import GoneError as GoneError
    from .errors import InternalServerError as InternalServerError
    from .errors import InvalidInputError as InvalidInputError
    from .errors import InvalidPathError as InvalidPathError
    from .errors import NotFoundError as NotFoundError
    from .errors import PayloadTooLargeError as PayloadTooLargeError
    from .errors import PermissionDeniedError as PermissionDeniedError
    from .errors import RateLimitError as RateLimitError
    from .errors import RequestErrorCategory as RequestErrorCategory
    from .errors import RequestFailedError as RequestFailedError
    from .errors import TinkerError as TinkerError
    from .errors import UnprocessableEntityError as UnprocessableEntityError
    from .errors import UnsupportedMediaTypeError as UnsupportedMediaTypeError
    from .errors import WrongThreadError as WrongThreadError
    from .telemetry.progress import progress as progress
    from .types import AdamOptimizerConfig as AdamOptimizerConfig
    from .types import AdamParams as AdamParams
    from .types import Checkpoint as Checkpoint
    from .types import CheckpointType as CheckpointType
    from .types import CustomLossOutput as CustomLossOutput
    from .types import Datum as Datum
    from .types import DimuonOptimizerConfig as DimuonOptimizerConfig
    from .types import DimuonParams as DimuonParams
    from .types import DmelChunk as DmelChunk
    from .types import EncodedTextChunk as EncodedTextChunk
    from .types import ForwardBackwardOutput as ForwardBackwardOutput
    from .types import ImageAssetPointerChunk as ImageAssetPointerChunk
    from .types import ImageChunk as ImageChunk
    from .types import LoraConfig as LoraConfig
    from .types import ModelID as ModelID
    from .types import ModelInput as ModelInput
    from .types import ModelInputChunk as ModelInputChunk
    from .types import OptimParams as OptimParams
    from .types import OptimStepRequest as OptimStepRequest
    from .types import OptimStepResponse as OptimStepResponse
    from .types import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from .types import PromptProvenanceSpan as PromptProvenanceSpan
    from .types import QueueState as QueueState
    from .types import RegularizerOutput as RegularizerOutput
    from .types import RegularizerSpec as RegularizerSpec
    from .types import SampledProvenanceSpan as SampledProvenanceSpan
    from .types import SampledSequence as SampledSequence
    from .types import SampleRequest as SampleRequest
    from .types import SampleResponse as SampleResponse
    from .types import SamplingParams as SamplingParams
    from .types import StopReason as StopReason
    from .types import TensorData as TensorData
    from .types import TensorDtype as TensorDtype
    from .types import TrainingRun as TrainingRun

__title__ = "tinkex"

# The module of each name. Type checkers read the block above instead; a test keeps both equal.
_MODULES = ("config", "errors", "objectives", "recovery", "regularizers", "telemetry", "types")
_NAMES = {
    "._client.downloads": "download_checkpoint",
    "._client.http": "APIResponse StreamResponse",
    "._client.operations": "OperationsClient",
    "._client.rest": "AdminClient RestClient",
    "._client.retry": "RetryConfig",
    "._client.runtime": "APIFuture await_many",
    "._client.sampling": "SamplingClient",
    "._client.service": "ServiceClient",
    "._client.tokenizers": "set_tokenizer_loader",
    "._client.traced_loss": "LossHandle PerDatumLossFn",
    "._client.training": "TrainingClient",
    "._client.with_retry": "with_retry",
    "._local": "LocalServiceClient local",
    "._wire.transform": "NOT_GIVEN OMIT NotGiven Omit",
    ".compat": "install_as_tinker",
    ".config": "Config reset_defaults set_defaults",
    ".errors": """
        APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError
        AuthenticationError BadRequestError BillingError CircuitOpenError
        ClientClosedError ConfigError ConflictError DecodeError ExperimentalWarning GoneError
        InternalServerError InvalidInputError InvalidPathError NotFoundError PayloadTooLargeError
        PermissionDeniedError RateLimitError RequestErrorCategory RequestFailedError TinkerError
        UnprocessableEntityError UnsupportedMediaTypeError WrongThreadError
    """,
    ".telemetry.progress": "progress",
    ".types": """
        AdamOptimizerConfig AdamParams Checkpoint CheckpointType CustomLossOutput Datum
        DimuonOptimizerConfig DimuonParams DmelChunk EncodedTextChunk ForwardBackwardOutput
        ImageAssetPointerChunk ImageChunk LoraConfig ModelID ModelInput ModelInputChunk OptimParams
        OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath PromptProvenanceSpan QueueState
        RegularizerOutput RegularizerSpec SampledProvenanceSpan SampledSequence SampleRequest
        SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun
    """,
}
if not TYPE_CHECKING:  # to a type checker `__getattr__` means that every name exists
    __all__, __getattr__, __dir__ = lazy_names(
        __name__, _NAMES, [*_MODULES, "__title__", "__version__"]
    )
