import base64
import contextlib
import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.strategies import (
    json_values,
    models,
    names,
    sample_responses,
    training_outputs,
    training_requests,
)
from tinkex import types
from tinkex._wire.json_codec import decode, encode, from_object, parse
from tinkex.errors import DecodeError, InvalidInputError
from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageChunk,
    ModelInput,
    OptimStepRequest,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SetCheckpointTtlRequest,
    TensorData,
)
from tinkex.types.tensors import tensor_to_object

MODELS: list[type[BaseModel]] = [
    kind
    for kind in (getattr(types, name) for name in dir(types))
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not types.OptimParamsBase
]
NAN = float("nan")


def written(value: Any) -> Any:
    """The JSON on the wire, read by a parser that refuses NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} on the wire")

    return json.loads(encode(value), parse_constant=refuse)


def prompt(*tokens: int) -> ModelInput:
    return ModelInput.from_ints(tokens)


def same_response(first: SampleResponse, second: SampleResponse) -> bool:
    return (
        list(first.sequences) == list(second.sequences)
        and first.prompt_logprobs == second.prompt_logprobs
        and first.topk_prompt_logprobs == second.topk_prompt_logprobs
        and first.target_prompt_logprobs == second.target_prompt_logprobs
        and first.prompt_cache_hit_tokens == second.prompt_cache_hit_tokens
        and first.prompt_alt_tokens == second.prompt_alt_tokens
    )


# -- round trips ------------------------------------------------------------------------------


#: Messages in which null has a meaning; see their writers.
SAYS_NULL = (SetCheckpointTtlRequest, types.CreateSessionRequest)


@pytest.mark.parametrize("kind", MODELS)
def test_messages_round_trip_without_none(kind):
    @settings(max_examples=10)
    @given(models(kind))
    def check(value):
        assert decode(encode(value), kind) == value
        assert kind in SAYS_NULL or None not in written(value).values()

    check()


@settings(max_examples=50)
@given(training_requests())
def test_training_requests_round_trip(request):
    assert decode(encode(request), type(request)) == request


@settings(max_examples=50)
@given(training_outputs)
def test_training_outputs_round_trip(output):
    assert decode(encode(output), ForwardBackwardOutput) == output


@settings(max_examples=50)
@given(sample_responses)
def test_sample_responses_round_trip(response):
    assert same_response(decode(encode(response), SampleResponse), response)


# -- written form -----------------------------------------------------------------------------


def test_none_is_left_out_of_results_too():
    assert written(SampledSequence("stop")) == {"stop_reason": "stop", "tokens": []}
    assert written(SampleResponse([])) == {"type": "sample", "sequences": []}
    inputs = ForwardBackwardInput([], "ppo")
    assert written(ForwardBackwardRequest(inputs, "m")) == {
        "forward_backward_input": {"data": [], "loss_fn": "ppo"},
        "model_id": "m",
    }


def test_null_ttl_is_written():
    assert written(SetCheckpointTtlRequest(ttl_seconds=None)) == {"ttl_seconds": None}
    assert decode(b'{"ttl_seconds": null}', SetCheckpointTtlRequest).ttl_seconds is None


@pytest.mark.parametrize("odd", [NAN, math.inf, -math.inf])
def test_nan_and_infinity_are_written_as_null_and_read_as_nan(odd):
    values = np.array([odd, -0.5], np.float32)
    tensor = TensorData.from_numpy(values)
    output = ForwardBackwardOutput("x", [{"logprobs": tensor}], {"loss": odd})
    response = SampleResponse(
        [SampledSequence("stop", tokens=[1, 2], logprobs=values)], values, None, tensor
    )
    assert written(output)["loss_fn_outputs"] == [
        {"logprobs": {"data": [None, -0.5], "dtype": "float32", "shape": [2]}}
    ]
    assert written(output)["metrics"] == {"loss": None}
    assert written(response)["prompt_logprobs"] == [None, -0.5]

    again = decode(encode(output), ForwardBackwardOutput)
    assert math.isnan(again.loss_fn_outputs[0]["logprobs"].data[0])
    assert math.isnan(again.metrics["loss"])
    assert decode(encode(response), SampleResponse).prompt_logprobs == [None, -0.5]


def test_tags_and_defaults_are_written():
    request = SampleRequest(
        prompt=prompt(1, 2), sampling_params=SamplingParams(), prompt_logprobs=False, seq_id=0
    )
    assert written(request) == {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"temperature": 1, "top_k": -1, "top_p": 1},
        "seq_id": 0,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    }


def test_images_are_written_as_base64():
    chunk = written(ModelInput(chunks=[ImageChunk(data=b"\x89PNG", format="png")]))["chunks"][0]
    assert chunk == {
        "data": base64.b64encode(b"\x89PNG").decode(),
        "format": "png",
        "type": "image",
    }


def test_parameters_are_named_after_their_optimizer():
    adam = OptimStepRequest(optim_params=AdamParams(), model_id="m")
    dimuon = OptimStepRequest(optim_params=DimuonParams(learning_rate=0.5), model_id="m")
    assert set(written(adam)) == {"adam_params", "model_id", "type"}
    assert set(written(adam)["adam_params"]) == set(AdamParams.model_fields)
    assert written(dimuon)["optimizer_params"] == {
        "type": "dimuon",
        "learning_rate": 0.5,
        "grad_clip_norm": 0.0,
        "beta1": 0.9,
    }


def test_arrays_of_any_memory_order_are_written_by_row():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for view in (array.T, array[:, ::2], array[::-1]):
        tensor = written(TensorData.from_numpy(view))
        assert tensor["data"] == view.reshape(-1).tolist()
        assert tensor["shape"] == list(view.shape)


@pytest.mark.parametrize(
    "value",
    [object(), {"a": object()}, {1: 2}, {"a": 2**70}, {"a": "\ud800"}, {"a": {1, 2}}, 1j],
    ids=lambda value: str(value).encode("ascii", "replace").decode()[:12],
)
def test_value_that_json_cannot_hold_is_refused(value):
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        encode(value)


# -- old and new formats ----------------------------------------------------------------------


def old_style(value: Any) -> Any:
    """As clients up to 0.16 write: only fields that were set, None as null, no tags."""
    if isinstance(value, TensorData):
        return tensor_to_object(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [old_style(item) for item in value]
    if isinstance(value, dict):
        return {name: old_style(item) for name, item in value.items()}
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        given_ones = {
            name: getattr(value, name)
            for name, field in fields.items()
            if name != "type" and (field.default is None or getattr(value, name) != field.default)
        }
        if "optim_params" in given_ones:
            given_ones["adam_params"] = given_ones.pop("optim_params")
        return old_style(given_ones)
    if dataclasses.is_dataclass(value):
        return {
            field.name: old_style(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not field.name.endswith("_spans")
        }
    return value


OLD_REQUESTS = [
    types.CreateSessionRequest,
    types.SessionHeartbeatRequest,
    types.CreateModelRequest,
    types.GetInfoRequest,
    types.UnloadModelRequest,
    types.LoadWeightsRequest,
    types.SaveWeightsRequest,
    types.SaveWeightsForSamplerRequest,
    types.CreateSamplingSessionRequest,
    types.SampleRequest,
    types.FutureRetrieveRequest,
    types.WeightsInfoRequest,
]


def accepts_old_style(kind: Any, values: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=20)
    @given(values)
    def check(value):
        old = json.dumps(old_style(value)).encode()
        assert decode(old, kind) == decode(encode(value), kind) == value

    check()


def without_optimizer(value):
    """Clients up to 0.16 have one optimizer and do not send its name."""
    field = type(value).model_fields.get("optimizer_config")
    return value.model_copy(update={"optimizer_config": field.default}) if field else value


@pytest.mark.parametrize("kind", OLD_REQUESTS)
def test_old_and_new_style_mean_the_same(kind):
    accepts_old_style(kind, models(kind).map(without_optimizer))


def test_old_and_new_style_mean_the_same_for_optimizer_steps():
    steps = st.builds(OptimStepRequest, optim_params=models(AdamParams), model_id=names)
    accepts_old_style(OptimStepRequest, steps)


@pytest.mark.parametrize("kind", [ForwardRequest, ForwardBackwardRequest])
def test_old_and_new_style_mean_the_same_for_training(kind):
    values = training_requests().filter(lambda request: type(request) is kind)
    accepts_old_style(kind, values)


def test_sample_request_of_an_old_client_is_read():
    body = {
        "prompt": {"chunks": [{"tokens": [1, 2]}, {"location": "a", "format": "png"}]},
        "sampling_params": {"max_tokens": 4, "stop": None},
        "num_samples": 2,
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt_logprobs": None,
        "base_model": None,
        "model_path": None,
    }
    request = from_object(body, SampleRequest)
    assert request.sampling_params == SamplingParams(max_tokens=4)
    assert request.prompt.chunks[0] == prompt(1, 2).chunks[0]
    assert request.prompt.chunks[1].type == "image_asset_pointer"
    assert (request.num_samples, request.prompt_logprobs, request.seq_id) == (2, None, 0)


@pytest.mark.parametrize("params", [{}, {"learning_rate": 0.5}, {"beta1": None}])
def test_adam_parameters_may_be_partial(params):
    step = from_object({"model_id": "m", "adam_params": params}, OptimStepRequest)
    given_ones = {name: value for name, value in params.items() if value is not None}
    assert step.optim_params == AdamParams(**given_ones)


def test_fields_of_a_newer_release_are_ignored_at_every_depth():
    body = {
        "new": 1,
        "prompt": {"new": 1, "chunks": [{"tokens": [1], "new": 1}]},
        "sampling_params": {"new": 1},
    }
    assert from_object(body, SampleRequest) == SampleRequest(
        prompt=prompt(1), sampling_params=SamplingParams()
    )
    step = {"model_id": "m", "new": 1, "adam_params": {"learning_rate": 1, "new": 2}}
    assert from_object(step, OptimStepRequest).optim_params == AdamParams(learning_rate=1)
    dimuon = {"type": "dimuon", "learning_rate": 1, "damping": 2, "beta1": None}
    step = {"model_id": "m", "optimizer_params": dimuon}
    assert from_object(step, OptimStepRequest).optim_params == DimuonParams(learning_rate=1)


def test_an_unknown_optimizer_keeps_its_fields():
    body = {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "b",
        "optimizer_config": {"type": "lion", "momentum": 0.5},
    }
    request = from_object(body, CreateModelRequest)
    assert written(request)["optimizer_config"] == {"type": "lion", "momentum": 0.5}


def test_an_empty_body_is_an_empty_object():
    assert parse(b"") == {}
    assert decode(b"", types.EmptyResponse) == types.EmptyResponse()
    assert decode(memoryview(b"{}"), types.ClientConfigResponse) == types.ClientConfigResponse()


def test_missing_lists_of_a_training_result_are_empty():
    output = from_object({"loss_fn_outputs": None, "metrics": None}, ForwardBackwardOutput)
    assert output == ForwardBackwardOutput("", [], {})


def test_topk_logprobs_may_be_pairs_or_objects():
    body = {
        "sequences": [],
        "topk_prompt_logprobs": [None, [[5, -0.5]], [{"token_id": 6, "logprob": -1.0}]],
    }
    assert from_object(body, SampleResponse).topk_prompt_logprobs == [
        None,
        [(5, -0.5)],
        [(6, -1.0)],
    ]


# -- bad input -----------------------------------------------------------------------------------

SEQUENCE = {"stop_reason": "stop", "tokens": [1]}
DATUM: dict[str, Any] = {"model_input": {"chunks": []}, "loss_fn_inputs": {}}


def sampled(**fields: Any) -> tuple[Any, Any]:
    return SampleResponse, {"sequences": [SEQUENCE]} | fields


def trained(**fields: Any) -> tuple[Any, Any]:
    body = {"data": [DATUM], "loss_fn": "ppo"} | fields
    return ForwardBackwardRequest, {"model_id": "m", "forward_backward_input": body}


def weighted(tensor: Any) -> tuple[Any, Any]:
    return trained(data=[DATUM | {"loss_fn_inputs": {"weights": tensor}}])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (sampled(sequences=None), "sequences: expected a list"),
        (sampled(sequences=[5]), r"sequences\.0: expected an object"),
        (sampled(sequences=[{"stop_reason": "stop"}]), "tokens: is required"),
        (sampled(sequences=[SEQUENCE | {"stop_reason": 5}]), "stop_reason: .*5"),
        (sampled(sequences=[SEQUENCE | {"stop_reason": []}]), "stop_reason: must be"),
        (sampled(sequences=[SEQUENCE | {"tokens": [1.5]}]), "tokens: expected integers"),
        (sampled(sequences=[SEQUENCE | {"tokens": [[1]]}]), "tokens: .*flat"),
        (
            sampled(sequences=[SEQUENCE | {"tokens": "ab"}]),
            r"sequences\.0\.tokens: expected a list",
        ),
        (sampled(sequences=[SEQUENCE | {"logprobs": [[1], [1, 2]]}]), "logprobs: ragged"),
        (sampled(sequences=[SEQUENCE | {"topk_logprobs": [[[1]]]}]), "topk_logprobs: .*pair"),
        (sampled(prompt_logprobs="x"), "prompt_logprobs: expected numbers"),
        (sampled(topk_prompt_logprobs=5), "topk_prompt_logprobs: .*rows"),
        (sampled(topk_prompt_logprobs=[[[2**40, 0]]]), "topk_prompt_logprobs: .*pair"),
        (sampled(target_prompt_logprobs=5), "target_prompt_logprobs: expected an object"),
        (sampled(prompt_cache_hit_tokens="x"), "prompt_cache_hit_tokens: expected an integer"),
        (sampled(prompt_alt_tokens={}), "tokens: is required"),
        (sampled(prompt_alt_tokens=[1]), "prompt_alt_tokens: expected an object"),
        (trained(data={}), r"forward_backward_input\.data: expected a list"),
        (trained(data=[5]), r"forward_backward_input\.data\.0: expected an object"),
        (trained(data=[{}]), r"data\.0\.model_input: .*expected an object"),
        (trained(data=[{"model_input": {}}]), r"data\.0\.model_input: chunks: Field required"),
        (trained(data=[{"model_input": {"chunks": [{}]}}]), r"model_input: chunks\.0"),
        (trained(loss_fn=5), r"forward_backward_input\.loss_fn: expected text"),
        (trained(loss_fn_config=5), r"loss_fn_config: expected an object"),
        (trained(loss_fn_config={"a": None}), r"loss_fn_config\.a: expected a number or text"),
        (trained(loss_fn_config={"a": [1]}), r"loss_fn_config\.a: expected a number or text"),
        (weighted(5), r"data\.0\.loss_fn_inputs\.weights: expected an object"),
        (weighted({"data": [1]} | {"dtype": "int8"}), r"weights: dtype: must be int64 or float32"),
        (weighted({"data": [1], "dtype": []}), r"weights: dtype: must be"),
        (weighted({"data": None, "dtype": "int64"}), r"weights: data: is required"),
        (weighted({"data": ["a"], "dtype": "int64"}), r"weights: data: expected numbers, got 'a'"),
        (weighted({"data": [[1], [2, 3]], "dtype": "int64"}), r"weights: data: ragged"),
        (weighted({"data": [1], "dtype": "int64", "shape": [2]}), r"weights: shape: \[2\] needs 2"),
        (weighted({"data": [1], "dtype": "int64", "shape": [-1]}), r"weights: shape: .*0 or more"),
        (weighted({"data": [1], "dtype": "int64", "shape": 1}), r"weights: shape: .*list of sizes"),
        (
            weighted({"data": [1], "dtype": "int64", "sparse_crow_indices": [0, 1]}),
            r"weights: sparse_col_indices: is required",
        ),
        ((ForwardBackwardRequest, {"model_id": "m"}), "forward_backward_input: is required"),
        ((ForwardRequest, {"model_id": "m", "forward_input": 5}), "forward_input: expected an obj"),
        (
            (ForwardRequest, {"forward_input": {"data": [], "loss_fn": "ppo"}}),
            "model_id: is required",
        ),
        ((ForwardBackwardOutput, {"metrics": {"loss": "x"}}), r"metrics\.loss: expected a number"),
        ((ForwardBackwardOutput, {"metrics": {"loss": True}}), r"metrics\.loss: expected a number"),
        ((ForwardBackwardOutput, {"loss_fn_outputs": 5}), "loss_fn_outputs: expected a list"),
        (
            (ForwardBackwardOutput, {"loss_fn_outputs": [{"x": {}}]}),
            r"loss_fn_outputs\.0\.x: expected an object",
        ),
        ((OptimStepRequest, {"model_id": "m"}), "optim_params: Field required"),
        (
            (OptimStepRequest, {"model_id": "m", "adam_params": {"learning_rate": -1}}),
            "learning_rate: .*greater than or equal to 0",
        ),
        (
            (OptimStepRequest, {"model_id": "m", "adam_params": {"learning_rate": "fast"}}),
            "learning_rate: .*valid number",
        ),
        (
            (OptimStepRequest, {"model_id": "m", "optimizer_params": {"type": "sgd"}}),
            "unknown optimizer 'sgd'",
        ),
        ((SampleRequest, {"sampling_params": {}}), "prompt: Field required"),
        ((SampleRequest, {"prompt": {"chunks": []}}), "sampling_params: Field required"),
        (
            (SampleRequest, {"prompt": {"chunks": []}, "sampling_params": {}, "num_samples": -1}),
            "num_samples: .*greater than or equal to 1",
        ),
        ((SampleRequest, []), "body: expected an object"),
        ((SampleRequest, None), "body: expected an object"),
        ((CreateModelRequest, {"optimizer_config": {"type": []}}), "session_id: Field required"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].__name__,
)
def test_error_of_an_invalid_body_names_the_field_and_the_problem(case, words):
    kind, body = case
    with pytest.raises(DecodeError, match=words):
        from_object(body, kind)


@pytest.mark.parametrize("data", [b"{", b"[1", b"\xff", b"NaN", b'{"a": NaN}', b"1e999", b"{}{}"])
def test_invalid_json_is_refused(data):
    with pytest.raises(DecodeError, match="body: is not JSON"):
        parse(data)


def reads_or_refuses(kind: Any, data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert isinstance(decode(data, kind), kind)


READ_KINDS = [
    SampleRequest,
    OptimStepRequest,
    CreateModelRequest,
    ForwardBackwardRequest,
    ForwardRequest,
    ForwardBackwardOutput,
    SampleResponse,
]


@given(
    st.sampled_from(READ_KINDS),
    st.binary(max_size=30) | json_values.map(json.dumps).map(str.encode),
)
def test_any_bytes_give_a_value_or_a_decode_error(kind, data):
    reads_or_refuses(kind, data)


def places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a JSON value."""
    inner = (
        body.items()
        if isinstance(body, dict)
        else enumerate(body)
        if isinstance(body, list)
        else ()
    )
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = body.copy()
    changed[path[0]] = replaced(body[path[0]], path[1:], value)
    return changed


VALID = [
    SampleRequest(
        prompt=prompt(1).append(ImageChunk(data=b"a", format="png")),
        sampling_params=SamplingParams(stop=["a"]),
        target_prompt_logprobs=TensorData([1], "int64", [1, 4], [0, 1], [2]),
    ),
    OptimStepRequest(optim_params=AdamParams(), model_id="m", seq_id=1),
    OptimStepRequest(optim_params=DimuonParams(learning_rate=1), model_id="m"),
    CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="b", lora_config=types.LoraConfig()
    ),
    ForwardBackwardRequest(
        ForwardBackwardInput(
            [Datum(prompt(1, 2), {"weights": TensorData([1.0, 2.0], "float32", [2])})],
            "ppo",
            {"a": 1.0, "b": "x"},
        ),
        "m",
        1,
    ),
    ForwardBackwardOutput("x", [{"logprobs": TensorData([1.0], "float32", [1])}], {"loss": 1.0}),
    SampleResponse(
        [SampledSequence("stop", tokens=[1], logprobs=[-1.0], topk_logprobs=[[[1, -1.0]]])],
        np.array([-1.0], np.float32),
        types.TopkLogprobs.from_rows([[[1, -1.0]]]),
        TensorData([1.0], "float32", [1]),
        5,
        types.PromptAltTokens(TensorData([1], "int64"), TensorData([1.0], "float32")),
    ),
]


@pytest.mark.parametrize("value", VALID, ids=lambda value: type(value).__name__)
@settings(max_examples=120)
@given(data=st.data())
def test_body_with_one_value_replaced_gives_a_value_or_a_decode_error(value, data):
    body = written(value)
    path = data.draw(st.sampled_from(places(body)))
    odd = json_values | st.sampled_from([-1, 2**31, 2**64, 0.5, [[1], [1, 2]], [None], [2**70]])
    changed = json.dumps(replaced(body, path, data.draw(odd))).encode()
    reads_or_refuses(type(value), changed)


def test_session_request_writes_null_metadata():
    """Services that read requests with the official types require the field."""
    asked = types.CreateSessionRequest(tags=[], sdk_version="1")
    assert parse(encode(asked)) == {
        "tags": [],
        "user_metadata": None,
        "sdk_version": "1",
        "type": "create_session",
    }


def test_default_optimizer_is_left_out():
    """Services older than the field refuse it."""
    facts = {"session_id": "s", "model_seq_id": 0, "base_model": "m"}
    plain = types.CreateModelRequest(**facts, optimizer_config=types.AdamOptimizerConfig())
    assert "optimizer_config" not in parse(encode(plain))
    other = types.CreateModelRequest(**facts, optimizer_config=types.DimuonOptimizerConfig())
    assert parse(encode(other))["optimizer_config"] == {"type": "dimuon", "version": 1}
