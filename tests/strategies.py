"""Hypothesis strategies for values of the protocol, shared by the tests of types and codecs."""

import types as builtin_types
from collections.abc import Sequence
from datetime import UTC, date, datetime
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import MaxLen, MinLen
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pydantic import AwareDatetime, BaseModel
from pydantic.fields import FieldInfo

from tinkex import types
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinkex.types.sampling import CONSTRAINTS

M = TypeVar("M", bound=BaseModel)

# No deadline: a busy machine is slow.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# -- numbers and text ----------------------------------------------------------------------------

token_ids = st.integers(0, 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
logprobs = st.floats(-1000, 0, width=32)
texts = st.text(max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)

# -- tensors -------------------------------------------------------------------------------------


def _numbers(dtype: str) -> st.SearchStrategy[Any]:
    return int64s if dtype == "int64" else float32s


@st.composite
def arrays(draw: Any, min_dims: int = 1, max_dims: int = 3) -> Any:
    """A numpy array of one of the protocol's two dtypes."""
    dtype = draw(st.sampled_from(["int64", "float32"]))
    shape = draw(npst.array_shapes(min_dims=min_dims, max_dims=max_dims, min_side=0, max_side=4))
    return draw(npst.arrays(dtype, shape, elements=_numbers(dtype)))


@st.composite
def sparse_tensors(draw: Any) -> TensorData:
    """Any valid compressed-sparse-rows tensor; stored values may be zero."""
    dtype = draw(st.sampled_from(["int64", "float32"]))
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    listed = [draw(st.sets(st.integers(0, columns - 1), max_size=3)) for _ in range(rows)]
    cols = [column for row in listed for column in sorted(row)]
    crow = np.cumsum([0, *map(len, listed)])
    values = draw(st.lists(_numbers(dtype), min_size=len(cols), max_size=len(cols)))
    return TensorData(values, dtype, [rows, columns], crow, cols)


# A tensor with a shape, like every tensor created from an array.
dense_tensors = arrays().map(TensorData.from_numpy)
shapeless_tensors = st.lists(float32s, max_size=5).map(lambda data: TensorData(data, "float32"))
tensors = dense_tensors | shapeless_tensors | sparse_tensors()
tensor_maps = st.dictionaries(names, tensors, max_size=3)

# -- inputs --------------------------------------------------------------------------------------

token_lists = st.lists(token_ids, max_size=8)
expected_tokens = st.none() | st.integers(0, 2**31 - 1)
image_formats = st.sampled_from(["png", "jpeg"])

text_chunks = st.builds(EncodedTextChunk, tokens=token_lists)
image_chunks = st.builds(
    ImageChunk,
    data=st.binary(max_size=16),
    format=image_formats,
    expected_tokens=expected_tokens,
)
pointer_chunks = st.builds(
    ImageAssetPointerChunk, location=texts, format=image_formats, expected_tokens=expected_tokens
)
dmel_chunks = st.builds(DmelChunk, dmel=st.binary(max_size=16))
training_chunks = text_chunks | image_chunks | dmel_chunks
chunks = training_chunks | pointer_chunks


def _inputs(chunk: st.SearchStrategy[Any]) -> st.SearchStrategy[ModelInput]:
    return st.builds(ModelInput, chunks=st.lists(chunk, max_size=3))


model_inputs = _inputs(chunks)
training_inputs = _inputs(training_chunks)

_span_fields = {
    "sequence_id": st.text(min_size=1, max_size=6),
    "offset": st.integers(0, 2**40),
    "length": st.integers(0, 2**40),
}
spans = st.builds(PromptProvenanceSpan, **_span_fields) | st.builds(
    SampledProvenanceSpan, **_span_fields
)
datums = st.builds(Datum, model_input=training_inputs, loss_fn_inputs=tensor_maps)
datums_with_spans = st.builds(
    Datum.with_provenance,
    datums,
    model_input=st.lists(spans, min_size=1, max_size=3),
    loss_fn_inputs=st.lists(spans, max_size=3),
)

# -- training ------------------------------------------------------------------------------------

loss_configs = st.none() | st.dictionaries(
    names, st.floats(allow_nan=False, allow_infinity=False) | texts, min_size=1, max_size=3
)


def _training_inputs(datum: st.SearchStrategy[Datum]) -> st.SearchStrategy[ForwardBackwardInput]:
    return st.builds(
        ForwardBackwardInput,
        data=st.lists(datum, max_size=3),
        loss_fn=st.sampled_from(get_args(types.LossFnType)),
        loss_fn_config=loss_configs,
    )


seq_ids = st.none() | st.integers(1, 2**31 - 1)


def training_requests(
    datum: st.SearchStrategy[Datum] = datums,
) -> st.SearchStrategy[ForwardBackwardRequest | ForwardRequest]:
    inputs = _training_inputs(datum)
    backward = st.builds(
        ForwardBackwardRequest, forward_backward_input=inputs, model_id=texts, seq_id=seq_ids
    )
    return backward | st.builds(
        ForwardRequest, forward_input=inputs, model_id=texts, seq_id=seq_ids
    )


# Names are present in all or only some datums, and shapes differ between datums.
loss_outputs = st.lists(st.dictionaries(names, dense_tensors, max_size=2), max_size=4)
training_outputs = st.builds(
    ForwardBackwardOutput,
    loss_fn_output_type=names,
    loss_fn_outputs=loss_outputs,
    metrics=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)

# -- sampling ------------------------------------------------------------------------------------

topk_rows = st.lists(
    st.none() | st.lists(st.tuples(token_ids, logprobs), min_size=1, max_size=3), max_size=4
)
topk_tables = topk_rows.filter(any).map(TopkLogprobs.from_rows)


@st.composite
def sampled_sequences(draw: Any) -> SampledSequence:
    tokens = draw(token_lists)
    size = len(tokens)
    scores = draw(st.none() | st.lists(logprobs, min_size=size, max_size=size)) if size else None
    return SampledSequence(
        draw(st.sampled_from(["length", "stop"])),
        tokens=tokens,
        logprobs=scores,
        topk_logprobs=draw(st.none() | topk_rows.filter(any)),
        kept_mass=draw(st.none() | st.lists(st.floats(0, 1, width=32), min_size=1, max_size=4)),
    )


prompt_logprobs = st.lists(st.just(float("nan")) | logprobs, max_size=5)
sample_responses = st.builds(
    SampleResponse,
    sequences=st.lists(sampled_sequences(), max_size=3),
    prompt_logprobs_np=st.none() | prompt_logprobs.map(lambda data: np.array(data, np.float32)),
    topk_prompt_logprobs_np=st.none() | topk_tables,
    target_prompt_logprobs=st.none() | dense_tensors | sparse_tensors(),
    prompt_cache_hit_tokens=st.integers(0, 2**31 - 1),
    prompt_alt_tokens=st.none() | st.builds(PromptAltTokens, dense_tensors, dense_tensors),
)

# -- every pydantic model ------------------------------------------------------------------------

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(min_size=1, max_size=8),
    int: st.integers(1, 200),  # within every limit of the protocol
    float: st.floats(2**-20, 1 - 2**-20),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    Any: json_values,
    date: st.dates(),
    datetime: st.datetimes(datetime(1970, 1, 1), timezones=st.just(UTC)),
    AwareDatetime: st.datetimes(datetime(1970, 1, 1), timezones=st.just(UTC)),
    TensorData: tensors,
    ModelInput: model_inputs,
    EncodedTextChunk: text_chunks,
    types.OptimParamsBase: st.deferred(lambda: models(types.DimuonParams)),
    types.OptimizerConfig: st.builds(
        types.OptimizerConfig, type=st.just("lion"), heads=st.integers(1, 9)
    ),
}


def values_of(annotation: Any, constraints: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Valid values for a type annotation of the protocol's models."""
    if get_origin(annotation) is Annotated:
        base, *marks = get_args(annotation)
        for mark in marks:
            constraints += tuple(mark.metadata) if isinstance(mark, FieldInfo) else (mark,)
        return values_of(base, constraints)
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    arguments = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Literal:
            return st.sampled_from(arguments)
        case origin if origin is Union or origin is builtin_types.UnionType:
            return st.one_of([values_of(choice) for choice in arguments])
        case origin if origin is list or origin is Sequence:
            smallest, largest = _sizes(constraints)
            return st.lists(values_of(arguments[0]), min_size=smallest, max_size=largest)
        case origin if origin is tuple:
            return st.tuples(*map(values_of, arguments))
        case origin if origin is dict:
            keys = names if arguments[0] is str else values_of(arguments[0])
            return st.dictionaries(keys, values_of(arguments[1]), max_size=2)
    if annotation is type(None):
        return st.none()
    if issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    return models(annotation)


def _sizes(constraints: tuple[Any, ...]) -> tuple[int, int]:
    smallest = max((mark.min_length for mark in constraints if isinstance(mark, MinLen)), default=0)
    largest = min((mark.max_length for mark in constraints if isinstance(mark, MaxLen)), default=3)
    return smallest, min(largest, 3)


def models(kind: type[M]) -> st.SearchStrategy[M]:
    """Instances of a pydantic model, with each optional field given or left out."""
    hints = get_type_hints(kind, include_extras=True)
    required: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        part = required if field.is_required() else optional
        part[name] = values_of(hints[name], tuple(field.metadata))
    fields = st.fixed_dictionaries(required, optional=optional)
    if kind is types.LoraConfig:
        flags = ("train_mlp", "train_attn", "train_unembed")
        fields = fields.filter(lambda given: any(given.get(flag, True) for flag in flags))
    if kind is types.SamplingParams:
        fields = fields.filter(
            lambda given: sum(given.get(one) is not None for one in CONSTRAINTS) < 2
        )
    return fields.map(lambda given: kind(**given))
