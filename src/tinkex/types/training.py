"""Models, losses, optimizers and weights: the training half of the protocol."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ._base import FROM_WIRE, RequestModel, ResponseModel
from .inputs import Datum, LossFnOutput
from .paths import console_url, playground_url
from .regularizers import CustomLossOutput

__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CreateModelRequest",
    "CreateModelResponse",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossInputRank",
    "CustomLossNode",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "GetInfoRequest",
    "GetInfoResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnType",
    "ModelData",
    "ModelID",
    "OptimParams",
    "OptimParamsBase",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfig",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "UnloadModelRequest",
    "UnloadModelResponse",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
]

ModelID: TypeAlias = str

# -- optimizers ----------------------------------------------------------------------------------


class OptimizerConfig(RequestModel):
    """The optimizer of a new model; an unknown optimizer family is passed through."""

    model_config = ConfigDict(extra="allow")

    type: str


class AdamOptimizerConfig(OptimizerConfig):
    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(OptimizerConfig):
    model_config = ConfigDict(extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


def _optimizer_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in {"adamw", "dimuon"} else "other"


def _with_all_fields(value: Any) -> Any:
    """Keep all fields of an unknown family, even where readers ignore unknown fields."""
    return (
        OptimizerConfig.model_validate(value, extra="allow") if isinstance(value, dict) else value
    )


AnyOptimizerConfig: TypeAlias = Annotated[
    Annotated[AdamOptimizerConfig, Tag("adamw")]
    | Annotated[DimuonOptimizerConfig, Tag("dimuon")]
    | Annotated[SerializeAsAny[OptimizerConfig], BeforeValidator(_with_all_fields), Tag("other")],
    Discriminator(_optimizer_kind),
]


class OptimParamsBase(RequestModel):
    """Parameters of one optimizer step."""


# JSON has no infinity: it would arrive as "not given" and become the default.
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(OptimParamsBase):
    """AdamW: weight decay is decoupled; a `grad_clip_norm` of 0 means no clipping."""

    learning_rate: NotNegative = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-12
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class DimuonParams(OptimParamsBase):
    """Dimuon, for models created with that optimizer."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: NotNegative
    grad_clip_norm: NotNegative = 0.0
    beta1: Decay = 0.9


OptimParams: TypeAlias = AdamParams | SerializeAsAny[OptimParamsBase]


class OptimStepRequest(RequestModel):
    """One optimizer step.

    On the wire the parameters are called `adam_params` for Adam and `optimizer_params` for any other
    optimizer; exactly one of the two is present.
    """

    optim_params: OptimParams
    model_id: ModelID
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _read_wire_name(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or "optim_params" in data:
            return data
        rest = dict(data)
        adam, other = rest.pop("adam_params", None), rest.pop("optimizer_params", None)
        if adam is not None and other is not None:
            raise ValueError("adam_params and optimizer_params exclude each other")
        if other is not None:
            rest["optim_params"] = _read_params(_named_params(other), other, info)
        elif adam is not None:
            rest["optim_params"] = _read_params(AdamParams, adam, info)
        return rest

    @model_serializer(mode="wrap")
    def _write_wire_name(self, handler: Any) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        key = "adam_params" if isinstance(self.optim_params, AdamParams) else "optimizer_params"
        return {key if name == "optim_params" else name: value for name, value in written.items()}


def _named_params(params: Any) -> type[OptimParamsBase]:
    kind = params.get("type") if isinstance(params, dict) else getattr(params, "type", None)
    if kind == "dimuon":
        return DimuonParams
    raise ValueError(f"optimizer_params.type: unknown optimizer {kind!r:.80}")


def _read_params(kind: type[OptimParamsBase], params: Any, info: ValidationInfo) -> OptimParamsBase:
    # Read as exactly this class: in a union, invalid parameters could be read as the empty base class.
    extra: Literal["ignore"] | None = "ignore" if info.context is FROM_WIRE else None
    return kind.model_validate(params, context=info.context, extra=extra)


class OptimStepResponse(ResponseModel):
    metrics: dict[str, float] | None = None

    @field_validator("metrics", mode="before")
    @classmethod
    def _null_is_nan(cls, metrics: Any, info: ValidationInfo) -> Any:
        if info.context is not FROM_WIRE or not isinstance(metrics, dict):
            return metrics
        return {name: math.nan if value is None else value for name, value in metrics.items()}

    @property
    def success(self) -> bool:
        """Always true: a failed step raises an error instead."""
        return True


# -- models --------------------------------------------------------------------------------------


class LoraConfig(RequestModel):
    """The adapter of a new model."""

    rank: Annotated[int, Field(ge=1)] = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_mlp, train_attn, train_unembed must be true")
        return self


class CreateModelRequest(RequestModel):
    session_id: str
    model_seq_id: Annotated[int, Field(ge=0)]
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig.model_construct()
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(ResponseModel):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(RequestModel):
    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(ResponseModel):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None
    tokenizer_sha256: str | None = None  # of the files that the tinkex service offers for download


class GetInfoResponse(ResponseModel):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig.model_construct()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class UnloadModelRequest(RequestModel):
    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(ResponseModel):
    model_id: ModelID
    type: Literal["unload_model"] | None = None


# -- losses --------------------------------------------------------------------------------------

LossFnType: TypeAlias = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]


@dataclass
class ForwardBackwardInput:
    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: Mapping[str, float | str] | None = None


@dataclass
class ForwardBackwardRequest:
    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass
class ForwardRequest:
    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass
class ForwardBackwardOutput:
    """The tensors that the loss function returned for each datum, and metrics named `name:reduction`.

    `custom_loss` has the parts of a loss that `forward_backward_custom` computed on the client; it is None for other
    calls and is not sent.
    """

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict)
    custom_loss: CustomLossOutput | None = None

    @property
    def loss(self) -> float | None:
        """The sum of the loss over all tokens and datums, which is the metric `loss:sum`; None if unknown.

        It is never a mean: divide it by the sum of the weights for the loss per token.
        """
        return self.metrics.get("loss:sum")


CustomLossInputRank: TypeAlias = Literal[0, 1, 2]


class CustomLossInput(RequestModel):
    name: str
    rank: CustomLossInputRank


class CustomLossNode(RequestModel):
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(RequestModel):
    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(RequestModel):
    session_id: str
    custom_loss_seq_id: Annotated[int, Field(ge=0)]
    name: str
    inputs: Annotated[list[CustomLossInput], Field(min_length=1, max_length=16)]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(ResponseModel):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


# -- weights -------------------------------------------------------------------------------------


#: Ten years. More is a mistake, such as milliseconds or a date.
MAX_TTL: Final = 10 * 365 * 86_400


def check_ttl(ttl: int | None) -> int | None:
    if ttl is not None and not 0 < ttl <= MAX_TTL:
        raise ValueError(f"must be a positive number of seconds, at most {MAX_TTL} (ten years)")
    return ttl


TtlSeconds: TypeAlias = Annotated[int | None, AfterValidator(check_ttl)]


class SaveWeightsRequest(RequestModel):
    """Save weights and optimizer state under a name."""

    model_id: ModelID
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: TtlSeconds = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(ResponseModel):
    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        return console_url(self.path)


class SaveWeightsForSamplerRequest(RequestModel):
    """Save the weights for sampling: under a name, or as an unlisted sampling session."""

    model_id: ModelID
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: TtlSeconds = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(ResponseModel):
    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(ResponseModel):
    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        return console_url(self.path)

    def get_playground_url(self) -> str:
        return playground_url(self.path)


class SaveWeightsExternalRequest(RequestModel):
    """Write plain adapter files for use elsewhere; they are encrypted if recipients are given."""

    model_id: ModelID
    path: str
    seq_id: int | None = None
    ttl_seconds: TtlSeconds = None
    age_encryption_recipients: Annotated[list[str], Field(max_length=10)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(ResponseModel):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(ResponseModel):
    path: str
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(RequestModel):
    """Load a checkpoint into a model, or create a model from it.

    Either `model_id` and `seq_id` name an existing model, or `session_id` and `model_seq_id` a new one.
    """

    model_id: ModelID | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: AnyOptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(ResponseModel):
    path: str | None = None
    model_id: ModelID | None = None
    type: Literal["load_weights"] | None = None


class CopyWeightsRequest(RequestModel):
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: TtlSeconds = None
    weights_access_token: str | None = None


class CopyWeightsResponse(ResponseModel):
    tinker_path: str


class WeightsInfoRequest(RequestModel):
    tinker_path: str


class WeightsInfoResponse(ResponseModel):
    base_model: str
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig.model_construct()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None

    def lora_config(self) -> LoraConfig:
        """The configuration that recreates this adapter; an unset flag counts as trained."""
        return LoraConfig(
            rank=self.lora_rank or 32,
            train_unembed=self.train_unembed is not False,
            train_mlp=self.train_mlp is not False,
            train_attn=self.train_attn is not False,
        )
