import math
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.types import refuses_field
from tinkex import types
from tinkex._wire import json_codec
from tinkex.errors import InvalidInputError
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    CreateCustomLossRequest,
    CreateModelRequest,
    CustomLossGraph,
    CustomLossInput,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LoraConfig,
    OptimizerConfig,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    WeightsInfoResponse,
)

INFINITE = float("inf")


# -- optimizers ----------------------------------------------------------------------------------


def test_adam_defaults():
    assert AdamParams().model_dump() == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *[("learning_rate", bad) for bad in (-1e-9, INFINITE, float("nan"), "fast", None)],
        *[("beta1", bad) for bad in (-0.1, 1.0, INFINITE)],
        *[("beta2", bad) for bad in (-0.1, 1.0, [0.9])],
        *[("eps", bad) for bad in (0.0, -1e-9, INFINITE)],
        *[("weight_decay", bad) for bad in (-0.1, INFINITE)],
        *[("grad_clip_norm", bad) for bad in (-0.1, INFINITE)],
    ],
)
def test_adam_refuses_parameters_out_of_range(field, bad):
    with refuses_field(field):
        AdamParams(**{field: bad})


def test_adam_reads_integers_as_floats():
    params = AdamParams(learning_rate=1, grad_clip_norm=2)
    assert (params.learning_rate, params.grad_clip_norm) == (1.0, 2.0)
    assert isinstance(params.learning_rate, float)


def test_adam_refuses_misspelt_parameters():
    with refuses_field("lr", "it has learning_rate"):
        AdamParams(lr=1e-4)  # type: ignore[call-arg]


def test_dimuon_needs_a_learning_rate():
    assert DimuonParams(learning_rate=0.1).model_dump() == {
        "type": "dimuon",
        "learning_rate": 0.1,
        "grad_clip_norm": 0.0,
        "beta1": 0.9,
    }
    with refuses_field("learning_rate", "required"):
        DimuonParams()  # type: ignore[call-arg]
    with refuses_field("beta1"):
        DimuonParams(learning_rate=0.1, beta1=1.0)


@pytest.mark.parametrize(
    ("params", "key", "other"),
    [
        (AdamParams(learning_rate=1e-3), "adam_params", "optimizer_params"),
        (DimuonParams(learning_rate=1e-3), "optimizer_params", "adam_params"),
    ],
    ids=["adam", "dimuon"],
)
def test_the_wire_names_parameters_after_their_optimizer(params, key, other):
    request = OptimStepRequest(optim_params=params, model_id="m", seq_id=3)
    written = request.model_dump()
    assert written == {
        key: params.model_dump(),
        "model_id": "m",
        "seq_id": 3,
        "type": "optim_step",
    }
    assert other not in written
    assert OptimStepRequest.model_validate(written) == request
    assert OptimStepRequest.model_validate_json(request.model_dump_json()) == request
    assert type(OptimStepRequest.model_validate(written).optim_params) is type(params)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "optim_params.*required"),
        ({"adam_params": {}, "optimizer_params": {}}, "exclude each other"),
        ({"optimizer_params": {"type": "sgd"}}, "unknown optimizer 'sgd'"),
        ({"optimizer_params": {}}, "unknown optimizer None"),
        ({"optimizer_params": {"type": []}}, "unknown optimizer"),
        ({"adam_params": {"learning_rate": -1}}, "learning_rate"),
        ({"adam_params": {"lr": 1}}, "lr.*Extra inputs"),
        ({"adam_params": 5}, "AdamParams"),
    ],
    ids=str,
)
def test_step_needs_exactly_one_set_of_valid_parameters(fields, words):
    with pytest.raises(ValidationError, match=f"(?s){words}"):
        OptimStepRequest.model_validate({"model_id": "m", **fields})


def test_invalid_parameters_are_not_read_as_the_empty_base_class():
    step = OptimStepRequest.model_validate(
        {"model_id": "m", "adam_params": {"learning_rate": 0.5}}, extra="ignore"
    )
    assert step.optim_params == AdamParams(learning_rate=0.5)
    with refuses_field("learning_rate"):
        OptimStepRequest.model_validate(
            {"model_id": "m", "adam_params": {"learning_rate": -1}}, extra="ignore"
        )


def test_parameters_of_a_user_class_are_sent_completely():
    class Lion(OptimParamsBase):
        type: str = "lion"
        momentum: float = 0.99

    written = OptimStepRequest(optim_params=Lion(), model_id="m").model_dump()
    assert written["optimizer_params"] == {"type": "lion", "momentum": 0.99}


def test_a_step_that_returns_has_succeeded():
    assert OptimStepResponse().success
    assert OptimStepResponse(metrics={"norm": 1}).metrics == {"norm": 1.0}


def test_null_metric_is_read_as_nan():
    read = json_codec.decode(b'{"metrics": {"norm": null, "lr": 1}}', OptimStepResponse).metrics
    assert read is not None
    assert math.isnan(read["norm"])
    assert read["lr"] == 1.0


def test_optimizer_configs_are_distinguished_by_type():
    def config(**fields: Any) -> Any:
        request = {"session_id": "s", "model_seq_id": 0, "base_model": "b", **fields}
        return CreateModelRequest.model_validate(request).optimizer_config

    assert config() == AdamOptimizerConfig()
    assert config(optimizer_config={"type": "adamw"}) == AdamOptimizerConfig()
    assert config(optimizer_config={"type": "dimuon"}) == DimuonOptimizerConfig(version=1)
    assert config(optimizer_config=DimuonOptimizerConfig()) == DimuonOptimizerConfig()


@pytest.mark.parametrize("extra", [None, "ignore"])
def test_an_unknown_optimizer_passes_through_with_all_its_fields(extra):
    request = {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "b",
        "optimizer_config": {"type": "lion", "momentum": 0.5},
    }
    read = CreateModelRequest.model_validate(request, extra=extra)
    assert type(read.optimizer_config) is OptimizerConfig
    assert read.model_dump()["optimizer_config"] == {"type": "lion", "momentum": 0.5}


@pytest.mark.parametrize("config", [{"type": []}, {}, {"type": None}, 5], ids=str)
def test_an_optimizer_without_a_name_is_refused(config):
    with pytest.raises(ValidationError, match="optimizer_config"):
        CreateModelRequest.model_validate(
            {
                "session_id": "s",
                "model_seq_id": 0,
                "base_model": "b",
                "optimizer_config": config,
            }
        )


# -- models --------------------------------------------------------------------------------------


def test_lora_defaults():
    assert LoraConfig().model_dump() == {
        "rank": 32,
        "seed": None,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
    }


@pytest.mark.parametrize("rank", [0, -1, 1.5, "big"])
def test_lora_rank_is_a_positive_count(rank):
    with refuses_field("rank"):
        LoraConfig(rank=rank)


def test_an_adapter_must_train_something():
    with pytest.raises(InvalidInputError, match="at least one of train_mlp"):
        LoraConfig(train_mlp=False, train_attn=False, train_unembed=False)


def test_model_numbers_start_at_zero():
    with refuses_field("model_seq_id"):
        CreateModelRequest(session_id="s", model_seq_id=-1, base_model="b")


def test_model_info_has_few_required_fields():
    info = GetInfoResponse.model_validate({"model_id": "m", "model_data": {}, "new": 1})
    assert (info.model_data.arch, info.is_lora, info.optimizer_config) == (
        None,
        None,
        AdamOptimizerConfig(),
    )


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({}, (True, True, True)),
        ({"train_mlp": None}, (True, True, True)),
        ({"train_mlp": False}, (False, True, True)),
        ({"train_attn": False, "train_unembed": False}, (True, False, False)),
    ],
)
def test_weights_info_rebuilds_the_adapter(flags, trained):
    info = WeightsInfoResponse(base_model="b", is_lora=True, lora_rank=8, **flags)
    config = info.lora_config()
    assert config.rank == 8
    assert (config.train_mlp, config.train_attn, config.train_unembed) == trained


def test_weights_info_of_an_adapter_that_trains_nothing_is_refused():
    info = WeightsInfoResponse(
        base_model="b", is_lora=True, train_mlp=False, train_attn=False, train_unembed=False
    )
    with pytest.raises(InvalidInputError, match="at least one of"):
        info.lora_config()


# -- losses --------------------------------------------------------------------------------------


def test_loss_functions():
    assert set(get_args(types.LossFnType)) == {
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
        "stable_reinforce",
        "custom",
    }


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({}, None),
        ({"norm": 1.0}, None),
        ({"loss:sum": 3.0}, 3.0),
        ({"loss": 1.0, "loss:mean": 2.0, "loss:sum": 3.0}, 3.0),
        ({"loss": 0.0, "loss:mean": 2.0}, None),
    ],
)
def test_the_loss_is_the_sum_and_never_a_mean(metrics, loss):
    assert ForwardBackwardOutput("x", [], metrics).loss == loss


def test_an_output_without_metrics_has_its_own_empty_ones():
    first, second = ForwardBackwardOutput("x", []), ForwardBackwardOutput("x", [])
    first.metrics["loss"] = 1.0
    assert second.metrics == {}


def test_custom_losses_have_between_one_and_sixteen_inputs():
    def loss(count: int) -> CreateCustomLossRequest:
        return CreateCustomLossRequest(
            session_id="s",
            custom_loss_seq_id=0,
            name="mine",
            inputs=[CustomLossInput(name="x", rank=1)] * count,
            graph=CustomLossGraph(nodes=[]),
        )

    assert len(loss(16).inputs) == 16
    for count in (0, 17):
        with refuses_field("inputs"):
            loss(count)


@pytest.mark.parametrize("rank", [-1, 3, "1"])
def test_custom_loss_inputs_have_up_to_two_dimensions(rank):
    with refuses_field("rank"):
        CustomLossInput(name="x", rank=rank)


# -- weights -------------------------------------------------------------------------------------


def test_load_uses_the_field_name_optimizer():
    request = LoadWeightsRequest(model_id="m", seq_id=1, path="p", optimizer=True)
    written = request.model_dump(exclude_none=True)
    assert written == {
        "model_id": "m",
        "seq_id": 1,
        "path": "p",
        "optimizer": True,
        "type": "load_weights",
    }
    assert LoadWeightsRequest(path="p").optimizer is False
    with refuses_field("load_optimizer_state", "is not a field of LoadWeightsRequest"):
        LoadWeightsRequest(path="p", load_optimizer_state=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "kind", [SaveWeightsRequest, SaveWeightsForSamplerRequest, SaveWeightsExternalRequest]
)
@pytest.mark.parametrize("ttl", [0, -5])
def test_ttl_must_be_a_positive_number_of_seconds(kind, ttl):
    with refuses_field("ttl_seconds", "positive"):
        kind(model_id="m", path="p", ttl_seconds=ttl)
    assert kind(model_id="m", path="p", ttl_seconds=1).ttl_seconds == 1


def test_external_weights_have_at_most_ten_recipients():
    with refuses_field("age_encryption_recipients"):
        SaveWeightsExternalRequest(model_id="m", path="p", age_encryption_recipients=["a"] * 11)


def test_path_is_required_for_saved_and_optional_for_loaded_weights():
    with refuses_field("path", "required"):
        SaveWeightsResponse()  # type: ignore[call-arg]
    assert LoadWeightsResponse().path is None


def test_weights_for_sampling_have_a_path_or_a_session():
    assert SaveWeightsForSamplerResponseInternal(path="p").sampling_session_id is None
    assert SaveWeightsForSamplerResponseInternal(sampling_session_id="s").path is None


def test_saved_weights_have_console_urls():
    saved = SaveWeightsForSamplerResponse(path="tinker://r:train:0/sampler_weights/a b")
    assert saved.get_console_url().endswith("/checkpoints/r%3Atrain%3A0/sampler_weights%2Fa%20b")
    assert "checkpoint=tinker%3A%2F%2Fr" in saved.get_playground_url()
    named = SaveWeightsResponse(path="tinker://r/weights/a")
    assert named.get_console_url().endswith("/checkpoints/r/weights%2Fa")
