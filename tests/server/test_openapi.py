"""The OpenAPI document is valid and complete, and its schemas match the codec."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel

from tests import strategies
from tinkex import types
from tinkex._wire.failures import response_from_error
from tinkex._wire.json_codec import decode, encode
from tinkex._wire.operations import OPERATIONS, Body
from tinkex.errors import DecodeError, InvalidInputError, RateLimitError
from tinkex.server.dashboard.api import CALLS as LOCAL_CALLS
from tinkex.server.openapi import document
from tinkex.server.serving.table import SERVING

DOCUMENT = document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
METHODS = {"get", "put", "post", "delete"}
CALLS = {
    call["operationId"]: (path, method, call)
    for path, item in DOCUMENT["paths"].items()
    for method, call in item.items()
}


def fits(value: object, name: str) -> None:
    """Raise unless the encoded `value` matches its schema."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    OAS31Validator(schema).validate(json.loads(encode(value)))


def everything_in(value):
    yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from everything_in(inner)


def references(value):
    texts = (text for text in everything_in(value) if isinstance(text, str))
    return {text for text in texts if text.startswith("#/")}


def target(reference: str):
    found = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def answer(name: str, status: int):
    found = CALLS[name][2]["responses"][str(status)]
    return target(found["$ref"]) if "$ref" in found else found


# -- the document --------------------------------------------------------------------------------


def test_is_a_valid_openapi_document():
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert DOCUMENT["info"]["version"] == "1.2.3"


def test_is_plain_json_and_the_same_every_time():
    again = json.dumps(document("1.2.3"))
    assert json.loads(again) == DOCUMENT
    assert again == json.dumps(DOCUMENT)


def test_the_version_is_all_that_differs_between_releases():
    other = document("2.0.0")
    assert other["info"].pop("version") == "2.0.0"
    assert other | {"info": DOCUMENT["info"]} == DOCUMENT


def test_every_reference_has_a_target():
    for reference in references(DOCUMENT):
        target(reference)


def test_every_schema_is_used_by_an_operation():
    reached: set[str] = set()
    waiting = references(DOCUMENT["paths"])
    while waiting:
        reached |= waiting
        waiting = {name for found in waiting for name in references(target(found))} - reached
    parts = ("schemas", "responses")
    described = {
        f"#/components/{part}/{name}" for part in parts for name in DOCUMENT["components"][part]
    }
    assert described == reached


def test_the_api_key_header_is_documented():
    scheme = DOCUMENT["components"]["securitySchemes"]["ApiKey"]
    assert (scheme["type"], scheme["in"], scheme["name"]) == ("apiKey", "header", "X-API-Key")
    assert DOCUMENT["security"] == [{"ApiKey": []}]


# -- calls ---------------------------------------------------------------------------------------


def test_every_operation_is_documented_exactly_once():
    calls = [
        call["operationId"]
        for item in DOCUMENT["paths"].values()
        for method, call in item.items()
        if method in METHODS
    ]
    own = ["list_telemetry", "list_tokenizer_files", "get_tokenizer_file"]
    own += [call.name for call in LOCAL_CALLS]
    own += ["list_aliases", "put_alias", "delete_alias"]
    serving = [
        row.name if not place else f"{row.name}_{place + 1}"
        for row in SERVING.values()
        for place, _ in enumerate(row.paths)
    ]
    assert sorted(calls) == sorted([*OPERATIONS, *own, *serving])


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=lambda row: row.name)
def test_an_operation_has_its_path_parameters_and_body(row):
    path, method, call = CALLS[row.name]
    assert method == row.method.lower()
    assert path.replace("{checkpoint_kind}/{checkpoint_name}", "{checkpoint_id}") == row.path
    assert call["tags"][0] in {tag["name"] for tag in DOCUMENT["tags"]}
    assert call["summary"]
    parameters = call.get("parameters", [])
    in_path = [entry["name"] for entry in parameters if entry["in"] == "path"]
    assert in_path == re.findall(r"\{(\w+)\}", path)
    in_query = {entry["name"] for entry in parameters if entry["in"] == "query"}
    assert in_query == (set(row.request.model_fields) if row.body is Body.QUERY else set())
    media = set(call.get("requestBody", {}).get("content", {}))
    assert (
        media
        == {
            Body.NONE: set(),
            Body.QUERY: set(),
            Body.JSON: {"application/json"},
            Body.JSON_OR_PROTO: {"application/json", "application/x-protobuf"},
        }[row.body]
    )
    assert {"200", "400", "401", "404", "422", "429"} <= set(call["responses"])


def test_operations_are_grouped_in_the_order_of_the_tags():
    themes = [call["tags"][0] for _, _, call in CALLS.values()]
    assert list(dict.fromkeys(themes)) == [tag["name"] for tag in DOCUMENT["tags"]]


@pytest.mark.parametrize(
    "row", [row for row in OPERATIONS.values() if row.queued], ids=lambda row: row.name
)
def test_queued_operations_return_a_promise_of_their_result(row):
    promised = answer(row.name, 200)
    schema = promised["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/UntypedAPIFuture"}
    assert f"`{row.result.__name__}`" in promised["description"]
    kept = answer("retrieve_future", 200)["content"]["application/json"]["schema"]["anyOf"]
    assert {"$ref": f"#/components/schemas/{row.result.__name__}"} in kept


def test_a_future_is_finished_failed_or_pending():
    content = answer("retrieve_future", 200)["content"]
    assert set(content) == {"application/json", "application/x-protobuf"}
    failed = {"$ref": "#/components/schemas/RequestFailedResponse"}
    assert failed in content["application/json"]["schema"]["anyOf"]
    waiting = answer("retrieve_future", 408)["content"]["application/json"]["schema"]
    assert waiting == {"$ref": "#/components/schemas/TryAgainResponse"}
    assert answer("retrieve_future", 410)


def test_a_stream_is_server_sent_events():
    assert set(answer("stream_sample", 200)["content"]) == {"text/event-stream"}


def test_an_archive_is_a_redirect():
    assert set(answer("get_checkpoint_archive_url", 302)["headers"]) == {"Location", "Expires"}


def test_a_checkpoint_id_has_a_kind_and_a_name():
    _, _, call = CALLS["delete_checkpoint"]
    kind = next(entry for entry in call["parameters"] if entry["name"] == "checkpoint_kind")
    assert kind["schema"]["enum"] == ["weights", "sampler_weights", "external_weights"]


def test_query_parameters_have_defaults_and_no_null():
    _, _, call = CALLS["list_training_runs"]
    query = {entry["name"]: entry for entry in call["parameters"]}
    assert query["limit"]["schema"] == {"type": "integer", "minimum": 0, "default": 20}
    assert query["access_scope"]["schema"] == {"type": "string", "enum": ["owned", "accessible"]}
    assert not any(entry["required"] for entry in query.values())
    _, _, billing = CALLS["get_billing_usage"]
    assert all(entry["required"] for entry in billing["parameters"])


def test_telemetry_can_be_read_at_a_path_of_our_own():
    path, method, call = CALLS["list_telemetry"]
    assert (method, path) == ("get", "/local/telemetry")
    query = {entry["name"]: entry["schema"] for entry in call["parameters"]}
    assert query["limit"] == {"type": "integer", "minimum": 0, "maximum": 1000, "default": 100}
    assert query["session_id"] == {"type": "string"}
    schema = answer("list_telemetry", 200)["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ListTelemetryResponse"}


# -- schemas -------------------------------------------------------------------------------------


def test_create_model_requires_session_number_and_base_model():
    schema = SCHEMAS["CreateModelRequest"]
    assert schema["required"] == ["session_id", "model_seq_id", "base_model"]
    assert schema["properties"]["model_seq_id"] == {"type": "integer", "minimum": 0}


def test_target_prompt_logprobs_are_a_tensor():
    asked = SCHEMAS["SampleRequest"]["properties"]["target_prompt_logprobs"]["anyOf"]
    assert {"$ref": "#/components/schemas/TensorData"} in asked


def test_optimizer_parameters_have_their_wire_names():
    schema = SCHEMAS["OptimStepRequest"]
    assert {"adam_params", "optimizer_params"} < set(schema["properties"])
    assert "optim_params" not in schema["properties"]


def test_ignored_fields_are_allowed():
    assert all(schema.get("additionalProperties") is not False for schema in SCHEMAS.values())


def kinds(*, pydantic: bool) -> list[type]:
    rows = OPERATIONS.values()
    asked = {row.request for row in rows if row.body in {Body.JSON, Body.JSON_OR_PROTO}}
    found = asked | {row.result for row in rows} - {object}
    chosen = (kind for kind in found if issubclass(kind, BaseModel) is pydantic)
    return sorted(chosen, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", kinds(pydantic=True), ids=lambda kind: kind.__name__)
def test_models_are_written_as_described(kind):
    @settings(max_examples=10)
    @given(strategies.models(kind))
    def check(value):
        fits(value, kind.__name__)

    check()


WITHOUT_A_MODEL = {
    types.ForwardRequest: strategies.training_requests().filter(
        lambda value: isinstance(value, types.ForwardRequest)
    ),
    types.ForwardBackwardRequest: strategies.training_requests().filter(
        lambda value: isinstance(value, types.ForwardBackwardRequest)
    ),
    types.ForwardBackwardOutput: strategies.training_outputs,
    types.SampleResponse: strategies.sample_responses,
}


@pytest.mark.parametrize("kind", WITHOUT_A_MODEL, ids=lambda kind: kind.__name__)
def test_values_around_arrays_are_written_as_described(kind):
    @settings(max_examples=30)
    @given(WITHOUT_A_MODEL[kind])
    def check(value):
        fits(value, kind.__name__)

    check()


def test_every_value_without_a_model_is_covered():
    assert set(kinds(pydantic=False)) == {*WITHOUT_A_MODEL, types.SampleStreamChunk}


def test_a_chunk_of_a_stream_has_the_fields_that_are_described():
    assert set(SCHEMAS["SampleStreamChunk"]["properties"]) == set(
        types.SampleStreamChunk.__dataclass_fields__
    )


@pytest.mark.parametrize("kind", [types.ForwardRequest, types.ForwardBackwardRequest])
def test_required_fields_are_required(kind):
    batch = {"data": [], "loss_fn": "cross_entropy"}
    whole = {"model_id": "m", "forward_input": batch, "forward_backward_input": batch}
    decode(encode(whole), kind)
    for name in SCHEMAS[kind.__name__]["required"]:
        with pytest.raises(DecodeError, match=name):
            decode(encode({key: value for key, value in whole.items() if key != name}), kind)


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("must be 1 or more", field="rank"),
        DecodeError("is not JSON"),
        RateLimitError("slow down", retry_after=1.5),
    ],
)
def test_failures_are_written_as_described(error):
    _, _, body = response_from_error(error)
    fits(body, "Error")
