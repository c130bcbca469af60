"""The protobuf messages: training requests, and the two large results.

Arrays are sent as the bytes they have in memory; decoding creates views, not copies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError as ProtobufDecodeError

from tinkex.errors import DecodeError, InvalidInputError
from tinkex.types.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    LossFnOutput,
    ModelInput,
    ModelInputChunk,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    text_chunk,
)
from tinkex.types.sampling import SampledSequence, SampleResponse, StopReason
from tinkex.types.tensors import Array, PromptAltTokens, TensorData, TensorDtype, TopkLogprobs
from tinkex.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)

from . import tinkex_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = [
    "decode_forward_backward_output",
    "decode_forward_backward_request",
    "decode_sample_response",
    "encode_forward_backward_output",
    "encode_forward_backward_request",
    "encode_sample_response",
]

_MAX_EMPTY_DATUMS: Final = 1_000_000

_PB_DTYPE: Final = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_NUMPY_DTYPE: Final[dict[int, np.dtype[Any]]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
    pb.DTYPE_BFLOAT16: np.dtype(np.uint16),  # widened after reading
}


def _parse(message: Message, data: bytes | memoryview) -> None:
    try:
        message.ParseFromString(bytes(data))
    except ProtobufDecodeError as error:
        raise DecodeError(
            f"is not a {message.DESCRIPTOR.name} message: {error}", field="body"
        ) from error


def _numbers(raw: bytes, dtype: np.dtype[Any], field: str) -> Array:
    try:
        return np.frombuffer(raw, dtype)
    except ValueError as error:
        raise DecodeError(
            f"{len(raw)} bytes are not whole {dtype.name} numbers", field=field
        ) from error


def _typed(raw: bytes, dtype: int, field: str) -> tuple[Array, TensorDtype]:
    """Read packed numbers as one of the protocol's two dtypes; narrower ones are widened."""
    if dtype not in _NUMPY_DTYPE:
        raise DecodeError(f"unknown dtype {dtype}", field=field)
    numbers = _numbers(raw, _NUMPY_DTYPE[dtype], field)
    if dtype == pb.DTYPE_BFLOAT16:
        return (numbers.astype(np.uint32) << 16).view(np.float32), "float32"
    if dtype == pb.DTYPE_INT32:
        return numbers.astype(np.int64), "int64"
    return numbers, "float32" if dtype == pb.DTYPE_FLOAT32 else "int64"


# -- tensors -------------------------------------------------------------------------------------


def _write_tensor(tensor: TensorData, message: pb.Tensor) -> None:
    message.dtype = _PB_DTYPE[tensor.dtype]
    if tensor.shape is not None:
        message.shape.extend(tensor.shape)
    if tensor.indices is None:
        message.dense = tensor.values.tobytes()
    else:
        crow, col = tensor.indices
        message.sparse_csr.values = tensor.values.tobytes()
        message.sparse_csr.crow_indices = crow.tobytes()
        message.sparse_csr.col_indices = col.tobytes()


def _read_tensor(message: pb.Tensor, field: str) -> TensorData:
    shape = list(message.shape) or None  # no dimensions: the sender gave no shape
    try:
        if message.WhichOneof("encoding") != "sparse_csr":
            values, dtype = _typed(message.dense, message.dtype, field)
            return TensorData(values, dtype, shape)
        csr = message.sparse_csr
        values, dtype = _typed(csr.values, message.dtype, field)
        int64 = _NUMPY_DTYPE[pb.DTYPE_INT64]
        crow = _numbers(csr.crow_indices, int64, f"{field}.crow_indices")
        col = _numbers(csr.col_indices, int64, f"{field}.col_indices")
        return TensorData(values, dtype, shape, crow, col)
    except InvalidInputError as error:
        raise DecodeError(str(error), field=field) from error


# -- inputs --------------------------------------------------------------------------------------


def _write_chunk(chunk: ModelInputChunk, message: pb.Chunk) -> None:
    if isinstance(chunk, EncodedTextChunk):
        message.encoded_text.tokens = chunk.tokens_np.tobytes()
    elif isinstance(chunk, ImageChunk):
        message.image.data = chunk.data
        message.image.format = chunk.format
        if chunk.expected_tokens is not None:
            message.image.expected_tokens = chunk.expected_tokens
    elif isinstance(chunk, DmelChunk):
        message.dmel.dmel = chunk.dmel
    else:
        raise InvalidInputError(
            f"a chunk of type {chunk.type} cannot be part of training data", field="model_input"
        )


def _read_chunk(message: pb.Chunk, field: str) -> ModelInputChunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = _numbers(message.encoded_text.tokens, np.dtype(np.int32), field)
        return text_chunk(tokens)
    if kind == "image":
        image = message.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        if image.format not in {"png", "jpeg"}:
            raise DecodeError(f"unknown image format {image.format!r:.80}", field=field)
        if expected is not None and expected < 0:
            raise DecodeError(f"{expected} tokens", field=f"{field}.expected_tokens")
        return ImageChunk(data=image.data, format=image.format, expected_tokens=expected)
    if kind == "dmel":
        return DmelChunk(dmel=message.dmel.dmel)
    raise DecodeError("unknown kind of chunk", field=field)


def _write_spans(spans: ProvenanceSpans, messages: Any) -> None:
    for span in spans:
        message = messages.add()
        sampled = isinstance(span, SampledProvenanceSpan)
        part = message.sampled_tokens if sampled else message.prompt_tokens
        part.sequence_id, part.offset, part.length = span.sequence_id, span.offset, span.length


def _read_spans(messages: Iterable[pb.ProvenanceSpan], field: str) -> ProvenanceSpans:
    spans: ProvenanceSpans = []
    for message in messages:
        sampled = message.WhichOneof("span") == "sampled_tokens"
        part = message.sampled_tokens if sampled else message.prompt_tokens
        kind = SampledProvenanceSpan if sampled else PromptProvenanceSpan
        try:
            spans.append(kind(sequence_id=part.sequence_id, offset=part.offset, length=part.length))
        except InvalidInputError as error:
            raise DecodeError(str(error), field=field) from error
    return spans


def _encode_datum(datum: Datum) -> bytes:
    message = pb.Datum()
    for chunk in datum.model_input.chunks:
        _write_chunk(chunk, message.model_input.add())
    for name, tensor in datum.loss_fn_inputs.items():
        _write_tensor(tensor, message.loss_fn_inputs[name])
    _write_spans(datum.model_input_spans or [], message.model_input_spans)
    _write_spans(datum.loss_fn_input_spans or [], message.loss_fn_input_spans)
    return message.SerializeToString()


def _read_datum(message: pb.Datum, field: str) -> Datum:
    chunks = [_read_chunk(chunk, f"{field}.model_input") for chunk in message.model_input]
    tensors = {
        name: _read_tensor(tensor, f"{field}.loss_fn_inputs.{name}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    datum = Datum(ModelInput.model_construct(chunks=chunks), tensors)
    if not message.model_input_spans and not message.loss_fn_input_spans:
        return datum
    return datum.with_provenance(
        _read_spans(message.model_input_spans, f"{field}.model_input_spans"),
        _read_spans(message.loss_fn_input_spans, f"{field}.loss_fn_input_spans"),
    )


# -- training ------------------------------------------------------------------------------------


def encode_forward_backward_request(request: ForwardBackwardRequest | ForwardRequest) -> bytes:
    """Write a training request; a `ForwardRequest` becomes one without gradients."""
    forward_only = isinstance(request, ForwardRequest)
    if isinstance(request, ForwardRequest):
        inputs = request.forward_input
    else:
        inputs = request.forward_backward_input
    message = pb.ForwardBackwardRequest(forward_only=forward_only)
    for name, value in (
        ("model_id", request.model_id),
        ("seq_id", request.seq_id or 0),
        ("loss_fn", inputs.loss_fn),
    ):
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:  # wrong type, or too large for its field
            raise InvalidInputError(f"{value!r:.80}: {error}", field=name) from error
    _write_loss_config(inputs.loss_fn_config or {}, message)
    # Datums are serialised one by one and joined, which is the wire form of a repeated field: building all
    # of them in one message first would double the memory.
    parts = [message.SerializeToString()]
    for datum in inputs.data:
        encoded = _encode_datum(datum)
        parts += (_DATA_FIELD, _varint(len(encoded)), encoded)
    return b"".join(parts)


_LENGTH_DELIMITED: Final = 2
_DATA_FIELD: Final = bytes([pb.ForwardBackwardRequest.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the top bit says that more bytes follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _write_loss_config(
    config: Mapping[str, float | str], message: pb.ForwardBackwardRequest
) -> None:
    for name, value in config.items():
        try:
            if isinstance(value, str):
                message.loss_fn_config_v2[name].text = value
            else:  # both, because services before 0.26.2 read only the first
                message.loss_fn_config[name] = value
                message.loss_fn_config_v2[name].number = value
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"expected a number or text, got {value!r:.80}", field=f"loss_fn_config.{name}"
            ) from error


def decode_forward_backward_request(
    data: bytes | memoryview,
) -> ForwardBackwardRequest | ForwardRequest:
    message = pb.ForwardBackwardRequest()
    _parse(message, data)
    inputs = ForwardBackwardInput(
        data=[_read_datum(datum, f"data.{index}") for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,  # type: ignore[arg-type]  # the engine refuses an unknown loss
        loss_fn_config=_read_loss_config(message),
    )
    seq_id = message.seq_id or None
    if message.forward_only:
        return ForwardRequest(inputs, message.model_id, seq_id)
    return ForwardBackwardRequest(inputs, message.model_id, seq_id)


def _read_loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str] | None:
    config: dict[str, float | str]
    if message.loss_fn_config_v2:
        config = {
            name: value.text if value.WhichOneof("value") == "text" else value.number
            for name, value in message.loss_fn_config_v2.items()
        }
    else:
        config = dict(message.loss_fn_config)
    for name, setting in config.items():
        if isinstance(setting, float) and not isfinite(setting):  # JSON does not have these
            raise DecodeError(
                f"expected a finite number, got {setting}", field=f"loss_fn_config.{name}"
            )
    return config or None


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    message.metrics.update(output.metrics)
    for outputs in _runs_of_one_layout(output.loss_fn_outputs):
        _write_record(outputs, message.loss_fn_outputs.add())
    return message.SerializeToString()


def _layout(output: LossFnOutput) -> tuple[Any, ...]:
    """The facts that all outputs of one record must share: names, dtypes, dimensions after the first."""
    return tuple(
        (name, tensor.dtype, tensor.to_numpy().shape[1:]) for name, tensor in sorted(output.items())
    )


def _runs_of_one_layout(outputs: Sequence[LossFnOutput]) -> Iterable[Sequence[LossFnOutput]]:
    layouts = [_layout(output) for output in outputs]
    borders = [
        index for index, (before, after) in enumerate(pairwise(layouts), 1) if before != after
    ]
    for start, stop in pairwise([0, *borders, len(outputs)] if outputs else []):
        yield outputs[start:stop]


def _write_record(outputs: Sequence[LossFnOutput], record: pb.ArrayRecord) -> None:
    record.num_datums = len(outputs)
    for name, first in outputs[0].items():
        arrays = [np.atleast_1d(output[name].to_numpy()) for output in outputs]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
        batched = record.fields[name]
        batched.data = b"".join(array.tobytes() for array in arrays)
        batched.offsets = offsets.tobytes()
        batched.dtype = _PB_DTYPE[first.dtype]
        batched.trailing_shape.extend(arrays[0].shape[1:])


def decode_forward_backward_output(data: bytes | memoryview) -> ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput()
    _parse(message, data)
    outputs: list[LossFnOutput] = []
    for index, record in enumerate(message.loss_fn_outputs):
        outputs += _read_record(record, f"loss_fn_outputs.{index}")
    # The service writes the fully qualified name of the record's class here.
    kind = message.loss_fn_output_type.rpartition(":")[2] or "ArrayRecord"
    return ForwardBackwardOutput(kind, outputs, dict(message.metrics))


def _read_record(record: pb.ArrayRecord, field: str) -> list[LossFnOutput]:
    # A record without fields is a few bytes, even if it claims many datums.
    if not 0 <= record.num_datums <= (sys.maxsize if record.fields else _MAX_EMPTY_DATUMS):
        raise DecodeError(f"{record.num_datums} datums", field=f"{field}.num_datums")
    columns = {
        name: _read_column(batched, record.num_datums, f"{field}.{name}")
        for name, batched in record.fields.items()
    }
    if not columns:
        return [{} for _ in range(record.num_datums)]
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _read_column(batched: pb.BatchedTensor, count: int, field: str) -> list[TensorData]:
    offsets = _numbers(batched.offsets, np.dtype(np.int64), f"{field}.offsets").tolist()
    if (
        len(offsets) != count + 1
        or offsets[0] != 0
        or offsets[-1] != len(batched.data)
        or any(start > stop for start, stop in pairwise(offsets))
    ):
        raise DecodeError(
            f"must increase from 0 to {len(batched.data)} in {count + 1} entries",
            field=f"{field}.offsets",
        )
    values, dtype = _typed(batched.data, batched.dtype, field)
    width = _NUMPY_DTYPE[batched.dtype].itemsize
    trailing = list(batched.trailing_shape)
    row_size = prod(trailing)
    column = []
    for start, stop in pairwise(offsets):
        if start % width or (stop - start) % (width * max(row_size, 1)):
            raise DecodeError(f"a slice of {stop - start} bytes is not whole rows", field=field)
        piece = values[start // width : stop // width]
        rows = piece.size // row_size if row_size else 0
        try:
            column.append(TensorData(piece, dtype, [rows, *trailing]))
        except InvalidInputError as error:
            raise DecodeError(str(error), field=field) from error
    return column


# -- sampling ------------------------------------------------------------------------------------


def encode_sample_response(response: SampleResponse) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        _write_sequence(sequence, message.sequences.add())
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype(np.float32).tobytes()
    if response.topk_prompt_logprobs_np is not None:
        _write_topk(response.topk_prompt_logprobs_np, message.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        _write_tensor(response.target_prompt_logprobs, message.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        _write_tensor(response.prompt_alt_tokens.tokens, message.prompt_alt_tokens.tokens)
        _write_tensor(response.prompt_alt_tokens.logprobs, message.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def _write_sequence(sequence: SampledSequence, message: pb.SampledSequence) -> None:
    length = sequence.stop_reason == "length"
    message.stop_reason = pb.STOP_REASON_LENGTH if length else pb.STOP_REASON_STOP
    if sequence.tokens_np is not None:
        message.tokens = sequence.tokens_np.astype(np.int32).tobytes()
    if sequence.logprobs_np is not None:
        message.logprobs = sequence.logprobs_np.astype(np.float32).tobytes()
    if sequence.topk_logprobs_np is not None:
        _write_topk(sequence.topk_logprobs_np, message.topk_sampled_logprobs)
    if sequence.kept_mass_np is not None:
        message.kept_mass = sequence.kept_mass_np.astype(np.float32).tobytes()


def _write_topk(topk: TopkLogprobs, message: pb.TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = topk.token_ids.astype(np.int32).tobytes()
    message.logprobs = topk.logprobs.astype(np.float32).tobytes()


def decode_sample_response(
    data: bytes | memoryview, sequence_ids: Sequence[str] | None = None
) -> SampleResponse:
    """Read a sample result; the ids of its sequences come from the promise, which the client got earlier."""
    message = pb.SampleResponse()
    _parse(message, data)
    if sequence_ids is None:
        sequence_ids = [""] * len(message.sequences)
    elif len(sequence_ids) != len(message.sequences):
        raise DecodeError(
            f"{len(message.sequences)} sequences for {len(sequence_ids)} ids", field="sequences"
        )
    prompt_logprobs = None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = _numbers(message.prompt_logprobs, np.dtype(np.float32), "prompt_logprobs")
    topk = alternatives = target = None
    if message.HasField("topk_prompt_logprobs"):
        topk = _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs")
    if message.HasField("target_prompt_logprobs"):
        target = _read_tensor(message.target_prompt_logprobs, "target_prompt_logprobs")
    if message.HasField("prompt_alt_tokens"):
        alternatives = PromptAltTokens(
            _read_tensor(message.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
            _read_tensor(message.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
        )
    return SampleResponse(
        sequences=[
            _read_sequence(sequence, sequence_id)
            for sequence, sequence_id in zip(message.sequences, sequence_ids, strict=True)
        ],
        prompt_logprobs_np=prompt_logprobs,
        topk_prompt_logprobs_np=topk,
        target_prompt_logprobs=target,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        prompt_alt_tokens=alternatives,
    )


#: An unknown number becomes None: the tokens are still useful without the reason.
_STOP_REASONS: Final[Mapping[int, StopReason]] = {
    pb.STOP_REASON_STOP: "stop",
    pb.STOP_REASON_LENGTH: "length",
}


def _read_sequence(message: pb.SampledSequence, sequence_id: str) -> SampledSequence:
    topk = None
    if message.HasField("topk_sampled_logprobs"):
        topk = _read_topk(message.topk_sampled_logprobs, "topk_sampled_logprobs")
    kept = None
    if message.HasField("kept_mass"):
        kept = _numbers(message.kept_mass, np.dtype(np.float32), "kept_mass")
    return SampledSequence(
        _STOP_REASONS.get(message.stop_reason),
        sequence_id,
        _numbers(message.tokens, np.dtype(np.int32), "tokens"),
        _numbers(message.logprobs, np.dtype(np.float32), "logprobs") if message.logprobs else None,
        topk,
        kept_mass_np=kept,
    )


def _read_topk(message: pb.TopkLogprobs, field: str) -> TopkLogprobs | None:
    if message.k == 0 or message.length == 0:
        return None
    token_ids = _numbers(message.token_ids, np.dtype(np.int32), f"{field}.token_ids")
    logprobs = _numbers(message.logprobs, np.dtype(np.float32), f"{field}.logprobs")
    shape = (message.length, message.k)
    if token_ids.size != prod(shape) or logprobs.size != prod(shape):
        raise DecodeError(f"does not contain {shape[0]} × {shape[1]} cells", field=field)
    return TopkLogprobs(token_ids.reshape(shape), logprobs.reshape(shape))
