"""The OpenAPI document of the service, made from the operations table.

Bodies are read by our own codecs, so no framework can describe them. The document is made from what the codecs use: the
table for paths, summaries and answers, the pydantic models for most bodies, and a small table of schemas for values
that hold numpy arrays and have no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

from pydantic import BaseModel
from pydantic.json_schema import CoreRef, GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from tinkex import types
from tinkex._wire.media_types import PROTOBUF
from tinkex._wire.operations import OPERATIONS, Body, Operation, Theme
from tinkex.types._aliases import AliasInfo, AliasList
from tinkex.types._tokenizer_files import TokenizerFilesResponse
from tinkex.types.tensors import tensor_to_object

from . import reports, tokenizers
from .dashboard.api import CALLS, LocalCall
from .dashboard.playground import PlaygroundRequest
from .serving import alias_routes
from .serving.table import SERVING, ServingRow

__all__ = ["document"]

Schema: TypeAlias = dict[str, Any]

_REF: Final = "#/components/schemas/{model}"
_SERVING_TAG: Final = {
    "name": "Serving",
    "description": "Endpoints of OpenAI's and Anthropic's APIs, for programs that use a model.",
}
_JSON, _EVENTS = "application/json", "text/event-stream"


def document(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document; the same bytes for the same release."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tinkex",
            "version": version,
            "summary": "A local service that speaks the Tinker API.",
            "description": (
                "Calls that take time answer at once with a promise, an `UntypedAPIFuture`; `retrieve_future` "
                "waits for its result. In requests unknown fields are ignored, and null is the same as leaving "
                "an optional field out. Bodies may be compressed with gzip, deflate or zstd."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"ApiKey": []}],
        "tags": [
            *({"name": theme.title, "description": theme.about} for theme in Theme),
            dict(_SERVING_TAG),
        ],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "ApiKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-API-Key",
                    "description": "A key starts with `tml-`; a local service usually takes `tml-local`.",
                }
            },
            "responses": {error.name: error.response() for error in _ERRORS},
            "schemas": _schemas(),
        },
    }


# -- paths ---------------------------------------------------------------------------------------

# A checkpoint id is two segments, and a parameter of OpenAPI can only be one.
_CHECKPOINT_ID: Final = ("{checkpoint_id}", "{checkpoint_kind}/{checkpoint_name}")

_PATH_PARAMETERS: Final[Mapping[str, tuple[str, Schema]]] = {
    "session_id": ("The id that `create_session` returned.", {"type": "string"}),
    "training_run_id": ("The id of the trained model.", {"type": "string"}),
    "sampler_id": ("The id of a sampling session.", {"type": "string"}),
    "checkpoint_kind": (
        "The middle part of the checkpoint's path.",
        {"type": "string", "enum": ["weights", "sampler_weights", "external_weights"]},
    ),
    "checkpoint_name": ("The name under which the checkpoint was saved.", {"type": "string"}),
    "run_id": ("The id of a training run.", {"type": "string"}),
    "number": ("The number of a sample, from a list of samples.", {"type": "integer"}),
}


def _paths() -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for row in OPERATIONS.values():
        path = row.path.replace(*_CHECKPOINT_ID)
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, path)
    for endpoint in SERVING.values():
        for path in endpoint.paths:
            described = _serving(endpoint, path)
            paths.setdefault(_plain(path), {})[endpoint.operation.method.lower()] = described
    for call in CALLS:
        paths.setdefault(_plain(call.path), {})[call.method.lower()] = _local_call(call)
    return paths | {
        alias_routes.PATH: {"get": _list_aliases(), "put": _put_alias()},
        _plain(alias_routes.ONE): {"delete": _delete_alias()},
        reports.PATH: {"get": _list_telemetry()},
        _plain(tokenizers.PATH): {"get": _list_tokenizer_files()},
        _plain(tokenizers.FILES_PATH): {"get": _get_tokenizer_file()},
    }


# -- calls of this service that the protocol, and so the table, does not have ---------------------------


def _plain(route: str) -> str:
    return route.replace(":path", "").replace(":int", "")


def _errors_of(*statuses: int) -> dict[str, Any]:
    return {
        str(error.status): {"$ref": f"#/components/responses/{error.name}"}
        for error in _ERRORS
        if error.status in statuses
    }


def _local_call(call: LocalCall) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": call.name,
        "tags": [Theme.DASHBOARD.title],
        "summary": call.summary,
    }
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", _plain(call.path))]
    if call.query is not None:
        parameters += _query_parameters(call.query)
    if parameters:
        described["parameters"] = parameters
    if call.body is not None:
        content = _content(_JSON, _schema_of(call.body))
        described["requestBody"] = {"required": True, "content": content}
    answer: Schema = {"type": "object"} if call.media == _JSON else {"type": "string"}
    described["responses"] = {
        "200": _answer(call.answer, _content(call.media, answer)),
        **_errors_of(401, 404, *([409] if call.method == "DELETE" else []), 422, 429),
    }
    return described


def _serving(row: ServingRow, path: str) -> dict[str, Any]:
    """An endpoint of OpenAI's or Anthropic's API, at one of its paths."""
    maker = "OpenAI" if row.dialect == "openai" else "Anthropic"
    place = row.paths.index(path)
    described: dict[str, Any] = {
        "operationId": row.name if not place else f"{row.name}_{place + 1}",
        "tags": [_SERVING_TAG["name"]],
        "summary": row.operation.summary,
        "description": f"As in {maker}'s API, with its answers and errors.",
    }
    if "{name" in path:
        described["parameters"] = [_string_parameter("name", "The name of a model.")]
    if row.operation.body is Body.JSON:
        described["requestBody"] = _request_body(row.operation)
    content = _content(_JSON, {"type": "object"})
    if row.operation.body is Body.JSON and row.name != "count_tokens":
        content |= _content(_EVENTS, {"type": "string"})
    error = _answer(f"An error in the form of {maker}'s API.", _content(_JSON, {"type": "object"}))
    statuses = ("400", "401", "404", "413", "429", "500")
    described["responses"] = {
        "200": _answer("The answer.", content),
        **dict.fromkeys(statuses, error),
    }
    return described


def _list_aliases() -> dict[str, Any]:
    return {
        "operationId": "list_aliases",
        "tags": [_SERVING_TAG["name"]],
        "summary": "List the aliases of the key",
        "responses": {
            "200": _answer("Answered at once.", _content(_JSON, _schema_of(AliasList))),
            **_errors_of(401),
        },
    }


def _put_alias() -> dict[str, Any]:
    return {
        "operationId": "put_alias",
        "tags": [_SERVING_TAG["name"]],
        "summary": "Create an alias of a checkpoint, or change it",
        "requestBody": {
            "required": True,
            "content": _content(_JSON, _schema_of(alias_routes.AliasRequest)),
        },
        "responses": {
            "200": _answer("Answered at once.", _content(_JSON, _schema_of(AliasInfo))),
            **_errors_of(400, 401, 404),
        },
    }


def _delete_alias() -> dict[str, Any]:
    return {
        "operationId": "delete_alias",
        "tags": [_SERVING_TAG["name"]],
        "summary": "Delete an alias",
        "parameters": [_string_parameter("name", "The alias.")],
        "responses": {
            "200": _answer("Answered at once.", _content(_JSON, {"type": "object"})),
            **_errors_of(401, 404),
        },
    }


def _list_tokenizer_files() -> dict[str, Any]:
    return {
        "operationId": "list_tokenizer_files",
        "tags": [Theme.SERVICE.title],
        "summary": "List the tokenizer files of a base model",
        "description": "With their checksums. The answer has an ETag; a request with a matching `If-None-Match` gets 304.",
        "parameters": [_string_parameter("base_model", "A base model; it may contain slashes.")],
        "responses": {
            "200": _answer(
                "Answered at once.", _content(_JSON, _schema_of(TokenizerFilesResponse))
            ),
            **_errors_of(401, 404),
        },
    }


def _get_tokenizer_file() -> dict[str, Any]:
    return {
        "operationId": "get_tokenizer_file",
        "tags": [Theme.SERVICE.title],
        "summary": "Download one of these files",
        "description": "Its checksum is its ETag.",
        "parameters": [
            _string_parameter("base_model", "A base model; it may contain slashes."),
            _string_parameter("name", "A file from the list."),
        ],
        "responses": {
            "200": _answer(
                "The file.",
                _content("application/octet-stream", _message("The bytes of the file.")),
            ),
            **_errors_of(401, 404),
        },
    }


def _string_parameter(name: str, about: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": about, "schema": schema}


def _list_telemetry() -> dict[str, Any]:
    return {
        "operationId": "list_telemetry",
        "tags": [Theme.REPORTS.title],
        "summary": "Read the events that clients sent",
        "description": "The events of one session, or of all sessions of the key, in the order of arrival.",
        "parameters": _query_parameters(reports.ListTelemetryRequest),
        "responses": {
            "200": _answer(
                "Answered at once.", _content(_JSON, _schema_of(reports.ListTelemetryResponse))
            ),
            **_errors_of(401, 422),
        },
    }


def _operation(row: Operation[object], path: str) -> dict[str, Any]:
    assert row.theme is not None
    described: dict[str, Any] = {
        "operationId": row.name,
        "tags": [row.theme.title],
        "summary": row.summary,
    }
    if row.flag:
        described["description"] = (
            f"Clients call it only if the service has set the flag `{row.flag}`."
        )
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", path)]
    if row.body is Body.QUERY:
        parameters += _query_parameters(row.request)
    if parameters:
        described["parameters"] = parameters
    if row.body in {Body.JSON, Body.JSON_OR_PROTO}:
        described["requestBody"] = _request_body(row)
    described["responses"] = _responses(row)
    return described


def _path_parameter(name: str) -> dict[str, Any]:
    about, schema = _PATH_PARAMETERS[name]
    return {"name": name, "in": "path", "required": True, "description": about, "schema": schema}


def _query_parameters(request: type[BaseModel]) -> list[dict[str, Any]]:
    schema = request.model_json_schema(ref_template=_REF, schema_generator=_Generator)
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _not_null(field)}
        for name, field in schema["properties"].items()
    ]


def _not_null(schema: Schema) -> Schema:
    """The schema without null: a query string leaves the parameter out instead."""
    rest = {key: value for key, value in schema.items() if key not in {"anyOf", "default"}}
    if schema.get("default") is not None:
        rest["default"] = schema["default"]
    for choice in schema.get("anyOf", ()):
        if choice != {"type": "null"}:
            rest |= choice
    return rest


def _request_body(row: Operation[object]) -> dict[str, Any]:
    content = _content(_JSON, _schema_of(row.request))
    if row.body is Body.JSON_OR_PROTO:
        content |= _content(PROTOBUF, _message(f"The message `{row.request.__name__}`"))
    return {"required": row.request is not types.EmptyRequest, "content": content}


def _content(media_type: str, schema: Schema) -> dict[str, Any]:
    return {media_type: {"schema": schema}}


def _schema_of(kind: type[Any]) -> Schema:
    return {"$ref": _REF.format(model=kind.__name__)}


def _message(about: str) -> Schema:
    return {"type": "string", "format": "binary", "description": about}


# -- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Error:
    """An error status. Any operation may answer a `common` one, others only if their row lists it."""

    status: int
    name: str
    about: str
    common: bool = True
    headers: Mapping[str, str] | None = None

    def response(self) -> dict[str, Any]:
        return _answer(self.about, _content(_JSON, {"$ref": _REF.format(model="Error")})) | (
            {"headers": _headers(self.headers)} if self.headers else {}
        )


_ERRORS: Final = (
    _Error(
        400, "BadRequest", "The request is invalid; if one field is the cause, `field` names it."
    ),
    _Error(401, "Unauthorized", "The key is missing or unknown."),
    _Error(
        403,
        "Forbidden",
        "The access token does not give access, or the operation is not allowed on this service.",
        common=False,
    ),
    _Error(404, "NotFound", "Something that the request names does not exist."),
    _Error(
        410,
        "Gone",
        "The session has ended, or the result has expired.",
        common=False,
    ),
    _Error(422, "Unprocessable", "The body cannot be read as this request."),
    _Error(
        429,
        "TooManyRequests",
        "A limit is reached; try again later.",
        headers={"retry-after-ms": "Milliseconds to wait."},
    ),
)


def _answer(about: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"description": about, **({"content": content} if content else {})}


def _headers(about: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: {"description": text, "schema": {"type": "string"}} for name, text in about.items()
    }


def _responses(row: Operation[object]) -> dict[str, Any]:
    answers = {"200": _success(row)}
    answers |= {str(status): _OTHERS[status] for status in row.statuses if status in _OTHERS}
    common = [error.status for error in _ERRORS if error.common]
    return dict(sorted((answers | _errors_of(*common, *row.statuses)).items()))


def _success(row: Operation[object]) -> dict[str, Any]:
    if row.queued:
        return _answer(
            f"A promise; `retrieve_future` returns its result, `{row.result.__name__}`.",
            _content(_JSON, _schema_of(types.UntypedAPIFuture)),
        )
    if row.result is object:  # the result of any queued operation
        return _answer(
            "The result, or why the request failed. Losses and samples are sent as protobuf if `Accept` asks for it. "
            "For a large result the first answer has only its size, if the request allows that.",
            _content(_JSON, {"anyOf": [_schema_of(kind) for kind in _retrieved()]})
            | _content(
                PROTOBUF, _message("The message `ForwardBackwardOutput` or `SampleResponse`")
            ),
        )
    if row.result is types.SampleStreamChunk:
        return _answer(
            "Server-sent events; the data of each is one `SampleStreamChunk`.",
            _content(_EVENTS, _schema_of(row.result)),
        )
    return _answer("Answered at once.", _content(_JSON, _schema_of(row.result)))


def _retrieved() -> list[type[Any]]:
    """The possible results of a future, each once, in the order of the table."""
    results = dict.fromkeys(row.result for row in OPERATIONS.values() if row.queued)
    return [*results, types.MetadataOnlyResponse, types.RequestFailedResponse]


#: Answers that are neither success nor error, by status.
_OTHERS: Final[Mapping[int, dict[str, Any]]] = {
    302: _answer("The archive is ready and can be downloaded without a key.")
    | {
        "headers": _headers(
            {
                "Location": "The URL of the archive.",
                "Expires": "When the URL expires, as an HTTP date.",
            }
        )
    },
    408: _answer(
        "The result is not ready; poll again at once.",
        _content(_JSON, _schema_of(types.TryAgainResponse)),
    ),
}

# -- schemas without a model ---------------------------------------------------------------------


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _object(about: str, required: Iterable[str] = (), /, **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "description": about, "properties": properties}
    return schema | ({"required": [*required]} if required else {})


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_NUMBER: Final[Schema] = {"type": "number"}
_TOKENS: Final = _list({"type": "integer", "format": "int32"})
_TENSORS: Final = _map(_schema_of(types.TensorData))
# JSON has no NaN: values that are NaN or were not computed are null.
_NUMBER_OR_NULL: Final = _or_null(_NUMBER)
_TOPK_ROWS: Final = _list(
    _or_null(
        _list(
            {
                "type": "array",
                "description": "A token id and its logprob.",
                "prefixItems": [_INTEGER, _NUMBER],
                "minItems": 2,
                "maxItems": 2,
            }
        )
    )
)
_TRAINING: Final = {
    "model_id": _TEXT,
    "seq_id": _or_null(_INTEGER) | {"description": "The sequence number within the model, from 1."},
}

_STEP: Final = types.OptimStepRequest.model_fields["type"].default

_BY_HAND: Final[Mapping[str, Schema]] = {
    "Error": _object(
        "Why a request failed.",
        ("detail", "category"),
        detail=_TEXT | {"description": "The message."},
        category=_schema_of(types.RequestErrorCategory),
        field=_TEXT | {"description": "The field of the request that is the cause, if one is."},
    ),
    "TensorData": _object(
        "A tensor, its values in row-major order. With `sparse_crow_indices` and `sparse_col_indices` it is "
        "two-dimensional, in compressed sparse rows, and `data` holds the values listed there.",
        ("data", "dtype"),
        data=_list(_NUMBER_OR_NULL),
        dtype={"type": "string", "enum": [*get_args(types.TensorDtype)]},
        shape=_or_null(_list(_INTEGER)),
        sparse_crow_indices=_or_null(_list(_INTEGER)),
        sparse_col_indices=_or_null(_list(_INTEGER)),
    ),
    "EncodedTextChunk": _object(
        "A sequence of token ids.",
        ("tokens",),
        tokens=_TOKENS,
        type={"type": "string", "const": "encoded_text", "default": "encoded_text"},
    ),
    "Datum": _object(
        "One training example: the input and the tensors its loss reads.",
        ("model_input",),
        model_input=_schema_of(types.ModelInput),
        loss_fn_inputs=_TENSORS,
    ),
    "ForwardBackwardInput": _object(
        "A batch and the loss to compute on it.",
        ("data", "loss_fn"),
        data=_list(_schema_of(types.Datum)),
        loss_fn={"type": "string", "enum": [*get_args(types.LossFnType)]},
        loss_fn_config=_or_null(_map({"type": ["number", "string"]})),
    ),
    "ForwardRequest": _object(
        "A loss to compute without gradients.",
        ("forward_input", "model_id"),
        forward_input=_schema_of(types.ForwardBackwardInput),
        **_TRAINING,
    ),
    "ForwardBackwardRequest": _object(
        "A loss to compute; its gradients are added to the accumulated ones.",
        ("forward_backward_input", "model_id"),
        forward_backward_input=_schema_of(types.ForwardBackwardInput),
        **_TRAINING,
    ),
    "ForwardBackwardOutput": _object(
        "For each datum the tensors that the loss function returned, and metrics named `name:reduction`.",
        ("loss_fn_output_type", "loss_fn_outputs", "metrics"),
        loss_fn_output_type=_TEXT,
        loss_fn_outputs=_list(_TENSORS),
        metrics=_map(_NUMBER_OR_NULL),
    ),
    "OptimStepRequest": _object(
        "One optimizer step: `adam_params` for a model that was created with Adam, otherwise `optimizer_params`.",
        ("model_id",),
        **_TRAINING,
        adam_params=_schema_of(types.AdamParams),
        optimizer_params=_schema_of(types.DimuonParams),
        type={"type": "string", "const": _STEP, "default": _STEP},
    )
    | {"oneOf": [{"required": ["adam_params"]}, {"required": ["optimizer_params"]}]},
    "SampledSequence": _object(
        "One sampled sequence; if a stop token ended it, that is the last of `tokens`.",
        ("stop_reason", "tokens"),
        stop_reason={"type": "string", "enum": [*get_args(types.StopReason)]},
        tokens=_TOKENS,
        logprobs=_list(_NUMBER_OR_NULL),
        topk_logprobs=_TOPK_ROWS,
    ),
    "PromptAltTokens": _object(
        "For each prompt position the most likely tokens.",
        ("tokens", "logprobs"),
        tokens=_schema_of(types.TensorData),
        logprobs=_schema_of(types.TensorData),
    ),
    "SampleResponse": _object(
        "The sequences of one request, and the logprobs of the prompt if they were requested.",
        ("sequences",),
        type={"type": "string", "const": "sample"},
        sequences=_list(_schema_of(types.SampledSequence)),
        prompt_logprobs=_list(_NUMBER_OR_NULL),
        topk_prompt_logprobs=_TOPK_ROWS,
        target_prompt_logprobs=_schema_of(types.TensorData),
        prompt_cache_hit_tokens=_INTEGER,
        prompt_alt_tokens=_schema_of(types.PromptAltTokens),
    ),
    "SampleStreamChunk": _object(
        "One token of a streamed sample, or its end, which has a `finish_reason`, or an `error`.",
        token=_TEXT,
        token_id=_INTEGER,
        index=_INTEGER,
        logprob=_NUMBER_OR_NULL,
        finish_reason=_TEXT,
        total_tokens=_INTEGER,
        error=_TEXT,
    ),
}

# -- schemas of models ---------------------------------------------------------------------------

# Models that are in no row.
_MORE_MODELS: Final[tuple[type[BaseModel], ...]] = (
    types.UntypedAPIFuture,
    types.TryAgainResponse,
    types.MetadataOnlyResponse,
    types.RequestFailedResponse,
    types.AdamParams,
    types.DimuonParams,
    reports.ListTelemetryResponse,
    TokenizerFilesResponse,
    PlaygroundRequest,
    alias_routes.AliasRequest,
    AliasInfo,
    AliasList,
    *(row.operation.request for row in SERVING.values() if row.operation.body is Body.JSON),
)


def _schemas() -> dict[str, Schema]:
    kinds: dict[type[Any], None] = {}
    for row in OPERATIONS.values():
        if row.body in {Body.JSON, Body.JSON_OR_PROTO}:
            kinds[row.request] = None
        kinds[row.result] = None
    models = [
        kind for kind in kinds if issubclass(kind, BaseModel) and kind.__name__ not in _BY_HAND
    ]
    _, generated = models_json_schema(
        [(model, "validation") for model in (*models, *_MORE_MODELS)],
        ref_template=_REF,
        schema_generator=_Generator,
    )
    schemas = {**generated["$defs"], **_BY_HAND}
    for schema in schemas.values():
        schema.pop("title", None)  # repeats the name of the schema
    return dict(sorted(schemas.items()))


class _Generator(GenerateJsonSchema):
    """pydantic's schemas, corrected where our codecs differ from pydantic."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the name of the field is enough

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name).lstrip("_")

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        if described.get("additionalProperties") is False:
            del described[
                "additionalProperties"
            ]  # callers may not add fields; the service ignores unknown ones
        return described

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        return {"type": "string", "contentEncoding": "base64"}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        described = super().tagged_union_schema(schema)
        if (
            "discriminator" not in described
        ):  # our codec chooses by a function; by schema several may match
            described["anyOf"] = described.pop("oneOf")
        return described

    def function_plain_schema(
        self, schema: core_schema.PlainValidatorFunctionSchema
    ) -> JsonSchemaValue:
        if schema.get("serialization", {}).get("function") is not tensor_to_object:
            return super().function_plain_schema(schema)
        # Added to pydantic's own names, because pydantic follows every reference.
        name, reference = self.get_cache_defs_ref_schema(CoreRef("TensorData"))
        self.definitions[name] = _BY_HAND["TensorData"]
        return reference
