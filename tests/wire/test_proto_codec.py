import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import (
    arrays,
    datums,
    datums_with_spans,
    names,
    sample_responses,
    training_outputs,
    training_requests,
)
from tinkex._wire import tinkex_pb2 as pb
from tinkex._wire.proto_codec import (
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_response,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_response,
)
from tinkex.errors import DecodeError, InvalidInputError
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinkex.types.inputs import LossFnOutput

Decoder = Callable[[bytes], Any]
NOTHING = ForwardBackwardInput([], "ppo")


def packed(*numbers: float, dtype: str = "int64") -> bytes:
    return np.array(numbers, dtype).tobytes()


def by_words(value: Any) -> str:
    """Test ids show the expected message, not the bytes."""
    return value if isinstance(value, str) else "data"


# -- the schema ----------------------------------------------------------------------------------

# Protocol §5.2: message, then `number name` for each field.
SCHEMA = {
    "SampleResponse": "1 sequences, 2 prompt_logprobs, 3 topk_prompt_logprobs, "
    "4 prompt_cache_hit_tokens, 5 target_prompt_logprobs, 6 prompt_alt_tokens",
    "PromptAltTokens": "1 tokens, 2 logprobs",
    "SampledSequence": "1 stop_reason, 2 tokens, 3 logprobs, 4 topk_sampled_logprobs, 1001 kept_mass",
    "TopkLogprobs": "1 token_ids, 2 logprobs, 3 k, 4 length",
    "SparseCsr": "1 values, 2 crow_indices, 3 col_indices",
    "Tensor": "1 dense, 2 sparse_csr, 3 dtype, 4 shape",
    "BatchedTensor": "1 data, 2 offsets, 3 dtype, 4 trailing_shape",
    "ArrayRecord": "1 type_tag, 2 fields, 3 num_datums",
    "ForwardBackwardOutput": "1 loss_fn_output_type, 2 loss_fn_outputs, 3 metrics",
    "ForwardBackwardRequest": "1 model_id, 2 seq_id, 3 data, 4 loss_fn, 5 loss_fn_config, "
    "6 forward_only, 7 loss_fn_config_v2",
    "LossConfigValue": "1 number, 2 text",
    "Datum": "1 model_input, 2 loss_fn_inputs, 3 model_input_spans, 4 loss_fn_input_spans",
    "ProvenanceSpan": "1 prompt_tokens, 2 sampled_tokens",
    "PromptProvenanceSpan": "1 sequence_id, 2 offset, 3 length",
    "SampledProvenanceSpan": "1 sequence_id, 2 offset, 3 length",
    "Chunk": "1 encoded_text, 2 image, 3 dmel",
    "EncodedTextChunk": "1 tokens",
    "ImageChunk": "1 data, 2 format, 3 expected_tokens, 4 override_dimensions",
    "ImageDimensions": "1 width, 2 height",
    "DmelChunk": "1 dmel",
}


@pytest.mark.parametrize(("message", "fields"), SCHEMA.items())
def test_fields_have_the_numbers_of_the_protocol(message, fields):
    described = pb.DESCRIPTOR.message_types_by_name[message].fields
    assert ", ".join(f"{field.number} {field.name}" for field in described) == fields


def test_enums_have_the_numbers_of_the_protocol():
    assert dict(pb.StopReason.items()) == {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1}
    assert dict(pb.DType.items()) == {
        "DTYPE_UNSPECIFIED": 0,
        "DTYPE_FLOAT32": 1,
        "DTYPE_INT64": 2,
        "DTYPE_INT32": 3,
        "DTYPE_BFLOAT16": 4,
    }


# -- round trips ------------------------------------------------------------------------------


def same_response(first: SampleResponse, second: SampleResponse) -> bool:
    return (
        list(first.sequences) == list(second.sequences)
        and first.prompt_logprobs == second.prompt_logprobs
        and first.topk_prompt_logprobs == second.topk_prompt_logprobs
        and first.target_prompt_logprobs == second.target_prompt_logprobs
        and first.prompt_cache_hit_tokens == second.prompt_cache_hit_tokens
        and first.prompt_alt_tokens == second.prompt_alt_tokens
    )


@settings(max_examples=50)
@given(training_requests(datums | datums_with_spans))
def test_training_requests_round_trip(request):
    assert decode_forward_backward_request(encode_forward_backward_request(request)) == request


def holds_rows(output: LossFnOutput) -> bool:
    """False where a later dimension is 0: the format does not store the number of empty rows."""
    return all(0 not in (tensor.shape or [])[1:] for tensor in output.values())


@settings(max_examples=50)
@given(training_outputs.filter(lambda output: all(map(holds_rows, output.loss_fn_outputs))))
def test_training_outputs_round_trip(output):
    assert decode_forward_backward_output(encode_forward_backward_output(output)) == output


@settings(max_examples=50)
@given(sample_responses)
def test_sample_responses_round_trip(response):
    assert same_response(decode_sample_response(encode_sample_response(response)), response)


# -- training requests ---------------------------------------------------------------------------


def test_a_forward_request_is_one_without_gradients():
    data = encode_forward_backward_request(ForwardRequest(NOTHING, "m", 3))
    assert pb.ForwardBackwardRequest.FromString(data).forward_only
    assert decode_forward_backward_request(data) == ForwardRequest(NOTHING, "m", 3)
    data = encode_forward_backward_request(ForwardBackwardRequest(NOTHING, "m", 3))
    assert not pb.ForwardBackwardRequest.FromString(data).forward_only


def test_sequence_number_zero_means_none():
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    assert decode_forward_backward_request(message.SerializeToString()).seq_id is None


def test_numbers_of_the_loss_config_are_written_twice_and_text_once():
    inputs = ForwardBackwardInput([], "custom", {"clip": 0.2, "loss_id": "l"})
    message = pb.ForwardBackwardRequest.FromString(
        encode_forward_backward_request(ForwardBackwardRequest(inputs, "m"))
    )
    assert dict(message.loss_fn_config) == {"clip": 0.2}
    assert message.loss_fn_config_v2["clip"].number == 0.2
    assert message.loss_fn_config_v2["loss_id"].text == "l"


def test_the_new_loss_config_supersedes_the_old_one():
    message = pb.ForwardBackwardRequest(loss_fn_config={"clip": 0.2})
    read = decode_forward_backward_request(message.SerializeToString())
    assert read == ForwardBackwardRequest(ForwardBackwardInput([], "", {"clip": 0.2}), "")  # type: ignore[arg-type]
    message.loss_fn_config_v2["mode"].text = "strict"
    read = decode_forward_backward_request(message.SerializeToString())
    assert isinstance(read, ForwardBackwardRequest)
    assert read.forward_backward_input.loss_fn_config == {"mode": "strict"}


def test_provenance_spans_keep_their_kind_and_order():
    spans: ProvenanceSpans = [
        PromptProvenanceSpan(sequence_id="a", length=2),
        SampledProvenanceSpan(sequence_id="a", offset=2, length=3),
    ]
    datum = Datum(ModelInput.from_ints([1])).with_provenance(spans, [])
    request = ForwardBackwardRequest(ForwardBackwardInput([datum], "stable_reinforce"), "m")
    read = decode_forward_backward_request(encode_forward_backward_request(request))
    assert isinstance(read, ForwardBackwardRequest)
    [again] = read.forward_backward_input.data
    assert (again.model_input_spans, again.loss_fn_input_spans) == (spans, [])


@given(arrays())
def test_tensors_are_read_without_copying(array):
    tensor = TensorData.from_numpy(array)
    inputs = ForwardBackwardInput([Datum(ModelInput.from_ints([1]), {"x": tensor})], "ppo")
    read = decode_forward_backward_request(
        encode_forward_backward_request(ForwardBackwardRequest(inputs, "m"))
    )
    assert isinstance(read, ForwardBackwardRequest)
    assert not read.forward_backward_input.data[0].loss_fn_inputs["x"].values.flags.owndata


def test_an_image_the_service_already_has_cannot_be_trained_on():
    chunk = ImageAssetPointerChunk(location="a", format="png")
    inputs = ForwardBackwardInput([Datum(ModelInput(chunks=[chunk]))], "ppo")
    with pytest.raises(InvalidInputError, match=r"^model_input: .*image_asset_pointer"):
        encode_forward_backward_request(ForwardBackwardRequest(inputs, "m"))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ForwardBackwardRequest(NOTHING, "m", 2**31), "seq_id"),
        (ForwardBackwardRequest(NOTHING, "m", "1"), "seq_id"),  # type: ignore[arg-type]
        (ForwardBackwardRequest(NOTHING, 5), "model_id"),  # type: ignore[arg-type]
        (ForwardBackwardRequest(NOTHING, "\ud800"), "model_id"),
        (ForwardBackwardRequest(ForwardBackwardInput([], None), "m"), "loss_fn"),  # type: ignore[arg-type]
    ],
)
def test_request_with_values_that_do_not_fit_protobuf_is_refused(request_, field):
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        encode_forward_backward_request(request_)


@pytest.mark.parametrize("bad", [None, [1], "\ud800", b"x"], ids=ascii)
def test_loss_config_accepts_only_numbers_and_text(bad):
    inputs = ForwardBackwardInput([], "ppo", {"clip": bad})
    with pytest.raises(
        InvalidInputError, match=r"^loss_fn_config\.clip: expected a number or text"
    ):
        encode_forward_backward_request(ForwardBackwardRequest(inputs, "m"))


# -- training results ----------------------------------------------------------------------------


def record(count: int, **columns: pb.BatchedTensor) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="tinker:ArrayRecord")
    written = message.loss_fn_outputs.add(num_datums=count)
    for name, column in columns.items():
        written.fields[name].CopyFrom(column)
    return message.SerializeToString()


def column(data: bytes, *offsets: int, dtype: Any = pb.DTYPE_FLOAT32, trailing: Any = ()) -> Any:
    return pb.BatchedTensor(
        data=data, offsets=packed(*offsets), dtype=dtype, trailing_shape=trailing
    )


def outputs(data: bytes) -> list[LossFnOutput]:
    return decode_forward_backward_output(data).loss_fn_outputs


FLOATS = packed(1, 2, 3, 4, dtype="float32")


def test_datums_of_one_record_may_differ_in_length():
    read = outputs(record(3, x=column(FLOATS, 0, 12, 12, 16)))
    assert [output["x"].data for output in read] == [[1, 2, 3], [], [4]]
    assert [output["x"].shape for output in read] == [[3], [0], [1]]


def test_later_dimensions_are_shared():
    read = outputs(record(2, x=column(FLOATS, 0, 8, 16, trailing=[2])))
    assert [output["x"].tolist() for output in read] == [[[1, 2]], [[3, 4]]]


def test_narrow_numbers_are_widened():
    [output] = outputs(
        record(
            1,
            i=column(packed(-1, 7, dtype="int32"), 0, 8, dtype=pb.DTYPE_INT32),
            b=column(
                np.array([0x3FC0, 0xC000], np.uint16).tobytes(), 0, 4, dtype=pb.DTYPE_BFLOAT16
            ),
        )
    )
    assert output["i"] == TensorData([-1, 7], "int64", [2])
    assert output["b"] == TensorData([1.5, -2.0], "float32", [2])


def test_one_record_holds_all_datums_of_one_layout():
    def of(*shape: int) -> LossFnOutput:
        return {"x": TensorData.from_numpy(np.zeros(shape, np.float32))}

    layouts = [of(2), of(5), of(1, 2), of(3, 2), of(1, 3), {}, of(4)]
    data = encode_forward_backward_output(ForwardBackwardOutput("x", layouts))
    message = pb.ForwardBackwardOutput.FromString(data)
    assert [part.num_datums for part in message.loss_fn_outputs] == [2, 2, 1, 1, 1]
    assert outputs(data) == layouts


def test_sparse_outputs_are_written_dense():
    sparse = TensorData([7], "int64", [2, 3], [0, 1, 1], [2])
    [read] = outputs(encode_forward_backward_output(ForwardBackwardOutput("x", [{"x": sparse}])))
    assert read["x"].tolist() == [[0, 0, 7], [0, 0, 0]]


@pytest.mark.parametrize(
    ("written", "kind"),
    [("", "ArrayRecord"), ("a.b:Loss", "Loss"), ("Loss", "Loss"), ("a:b:c", "c")],
)
def test_kind_of_output_is_the_part_after_the_last_colon(written, kind):
    message = pb.ForwardBackwardOutput(loss_fn_output_type=written)
    read = decode_forward_backward_output(message.SerializeToString())
    assert read == ForwardBackwardOutput(kind, [], {})


def test_a_record_without_fields_still_counts_its_datums():
    assert outputs(record(3)) == [{}, {}, {}]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (record(-1), r"loss_fn_outputs\.0\.num_datums: -1 datums"),
        (record(2**62), r"loss_fn_outputs\.0\.num_datums: .* datums"),
        (
            record(2, x=column(FLOATS, 0, 16)),
            r"0\.x\.offsets: must increase from 0 to 16 in 3 entries",
        ),
        (record(1, x=column(FLOATS)), r"x\.offsets: must increase"),
        (record(1, x=column(FLOATS, 0, 20)), r"x\.offsets: must increase"),
        (record(1, x=column(FLOATS, 4, 16)), r"x\.offsets: must increase"),
        (record(3, x=column(FLOATS, 0, 12, 8, 16)), r"x\.offsets: must increase"),
        (record(2, x=column(FLOATS, 0, -8, 16)), r"x\.offsets: must increase"),
        (record(2, x=column(FLOATS, 0, 2, 16)), r"x: a slice of 2 bytes is not whole rows"),
        (record(2, x=column(FLOATS, 0, 4, 16, trailing=[2])), r"x: a slice of 4 bytes"),
        (record(1, x=column(FLOATS, 0, 16, trailing=[0])), r"x: shape: "),
        (record(1, x=column(FLOATS, 0, 16, trailing=[-1, -1])), r"x: shape: .*0 or more"),
        (record(1, x=column(FLOATS, 0, 16, trailing=[2**40, 2**40])), r"x: a slice of 16 bytes"),
        (record(1, x=column(FLOATS[:-1], 0, 15)), r"x: 15 bytes are not whole float32 numbers"),
        (record(1, x=column(FLOATS, 0, 16, dtype=0)), r"x: unknown dtype 0"),
        (record(1, x=column(FLOATS, 0, 16, dtype=9)), r"x: unknown dtype 9"),
        (
            record(1, x=pb.BatchedTensor(data=FLOATS, offsets=b"\0" * 9, dtype=pb.DTYPE_FLOAT32)),
            r"x\.offsets: 9 bytes are not whole int64 numbers",
        ),
    ],
    ids=by_words,
)
def test_ragged_records_are_refused(data, words):
    with pytest.raises(DecodeError, match=words):
        decode_forward_backward_output(data)


# -- tensors and chunks --------------------------------------------------------------------------


def training(*, tensor: pb.Tensor | None = None, chunk: Any = None, span: Any = None) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    datum = message.data.add()
    if tensor is not None:
        datum.loss_fn_inputs["x"].CopyFrom(tensor)
    if chunk is not None:
        datum.model_input.append(chunk)
    if span is not None:
        datum.model_input_spans.append(span)
    return message.SerializeToString()


def dense(data: bytes, *shape: int, dtype: Any = pb.DTYPE_INT64) -> pb.Tensor:
    return pb.Tensor(dense=data, dtype=dtype, shape=shape)


def sparse(**fields: bytes) -> pb.Tensor:
    listed = {"values": packed(7), "crow_indices": packed(0, 1), "col_indices": packed(2)} | fields
    return pb.Tensor(sparse_csr=pb.SparseCsr(**listed), dtype=pb.DTYPE_INT64, shape=[1, 3])


def test_tensor_without_dimensions_has_no_shape():
    data = training(tensor=dense(packed(1, 2)))
    read = decode_forward_backward_request(data)
    assert isinstance(read, ForwardBackwardRequest)
    assert read.forward_backward_input.data[0].loss_fn_inputs["x"] == TensorData([1, 2], "int64")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            training(tensor=pb.Tensor(dense=packed(1))),
            r"data\.0\.loss_fn_inputs\.x: unknown dtype 0",
        ),
        (training(tensor=dense(b"", dtype=7)), "x: unknown dtype 7"),
        (training(tensor=dense(b"\0" * 7)), "x: 7 bytes are not whole int64"),
        (training(tensor=dense(packed(1), 2)), r"x: shape: \[2\] needs 2"),
        (training(tensor=dense(packed(1), -1)), "x: shape: .*0 or more"),
        (training(tensor=dense(b"", 0, 2**62, 2**62)), "x: shape: "),
        (training(tensor=dense(packed(1), *[1] * 70)), "x: shape: "),
        (
            training(tensor=sparse(crow_indices=packed(0, 2))),
            "x: sparse_crow_indices: must increase",
        ),
        (training(tensor=sparse(crow_indices=b"")), "x: sparse_crow_indices: must increase"),
        (training(tensor=sparse(col_indices=packed(3))), r"x: sparse_col_indices: .*\[0, 3\)"),
        (training(tensor=sparse(col_indices=b"\0" * 9)), r"x\.col_indices: 9 bytes"),
        (training(tensor=sparse(values=b"\0" * 9)), "x: 9 bytes are not whole int64"),
        (training(chunk=pb.Chunk()), r"data\.0\.model_input: unknown kind of chunk"),
        (
            training(chunk=pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"abc"))),
            "model_input: 3 bytes are not whole int32",
        ),
        (
            training(chunk=pb.Chunk(image=pb.ImageChunk(format="gif"))),
            "model_input: unknown image format 'gif'",
        ),
        (
            training(chunk=pb.Chunk(image=pb.ImageChunk(format="png", expected_tokens=-1))),
            r"model_input\.expected_tokens: -1 tokens",
        ),
        (training(span=pb.ProvenanceSpan()), "model_input_spans: sequence_id: "),
        (
            training(
                span=pb.ProvenanceSpan(
                    prompt_tokens=pb.PromptProvenanceSpan(sequence_id="s", offset=-1)
                )
            ),
            "model_input_spans: offset: .*not -1",
        ),
    ],
    ids=by_words,
)
def test_invalid_training_data_is_refused(data, words):
    with pytest.raises(DecodeError, match=words):
        decode_forward_backward_request(data)


def test_images_keep_a_missing_length():
    images = [ImageChunk(data=b"a", format="png", expected_tokens=count) for count in (None, 0, 5)]
    inputs = ForwardBackwardInput([Datum(ModelInput(chunks=images))], "ppo")
    read = decode_forward_backward_request(
        encode_forward_backward_request(ForwardBackwardRequest(inputs, "m"))
    )
    assert isinstance(read, ForwardBackwardRequest)
    assert read.forward_backward_input.data[0].model_input.chunks == images


# -- samples -------------------------------------------------------------------------------------


def test_sequences_get_the_ids_of_their_promise():
    data = encode_sample_response(
        SampleResponse([SampledSequence("stop"), SampledSequence("length")])
    )
    read = decode_sample_response(data, ["a", "b"])
    assert [sequence.sequence_id for sequence in read.sequences] == ["a", "b"]
    assert [sequence.stop_reason for sequence in read.sequences] == ["stop", "length"]
    with pytest.raises(DecodeError, match="sequences: 2 sequences for 1 ids"):
        decode_sample_response(data, ["a"])


def test_empty_logprobs_are_none():
    message = pb.SampleResponse(sequences=[pb.SampledSequence(tokens=packed(1, dtype="int32"))])
    [sequence] = decode_sample_response(message.SerializeToString()).sequences
    assert (sequence.tokens, sequence.logprobs, sequence.topk_logprobs) == ([1], None, None)
    message.sequences[0].logprobs = b""
    assert decode_sample_response(message.SerializeToString()).sequences[0].logprobs is None


def test_prompt_logprobs_are_none_where_nan():
    message = pb.SampleResponse(prompt_logprobs=packed(np.nan, -0.5, dtype="float32"))
    assert decode_sample_response(message.SerializeToString()).prompt_logprobs == [None, -0.5]
    assert decode_sample_response(b"").prompt_logprobs is None


def table(length: int, k: int, ids: bytes, scores: bytes) -> bytes:
    topk = pb.TopkLogprobs(token_ids=ids, logprobs=scores, k=k, length=length)
    return pb.SampleResponse(topk_prompt_logprobs=topk).SerializeToString()


def test_padding_of_topk_tables_is_left_out():
    data = table(
        2,
        2,
        packed(5, 0, 0, 0, dtype="int32"),
        packed(-0.5, -99999, -99999, -99999, dtype="float32"),
    )
    assert decode_sample_response(data).topk_prompt_logprobs == [[(5, -0.5)], None]


@pytest.mark.parametrize(("length", "k"), [(0, 0), (0, 3), (3, 0)])
def test_an_empty_topk_table_is_none(length, k):
    assert decode_sample_response(table(length, k, b"", b"")).topk_prompt_logprobs is None


def test_wide_arrays_of_a_response_are_narrowed():
    response = SampleResponse(
        [SampledSequence("stop", "", np.array([1]), np.array([-0.5]))],
        np.array([-0.25]),
        TopkLogprobs(np.array([[3]]), np.array([[-0.5]])),
    )
    read = decode_sample_response(encode_sample_response(response))
    assert same_response(read, response)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            pb.SampleResponse(sequences=[pb.SampledSequence(tokens=b"abc")]).SerializeToString(),
            "tokens: 3 bytes are not whole int32",
        ),
        (
            pb.SampleResponse(sequences=[pb.SampledSequence(logprobs=b"abc")]).SerializeToString(),
            "logprobs: 3 bytes are not whole float32",
        ),
        (pb.SampleResponse(prompt_logprobs=b"a").SerializeToString(), "prompt_logprobs: 1 bytes"),
        (table(1, 2, packed(1, dtype="int32"), FLOATS[:8]), "topk_prompt_logprobs: .*1 × 2 cells"),
        (table(2**31, 2**31, b"", b""), "topk_prompt_logprobs: does not contain"),
        (table(1, 1, b"abc", FLOATS[:4]), r"topk_prompt_logprobs\.token_ids: 3 bytes"),
        (
            pb.SampleResponse(target_prompt_logprobs=pb.Tensor()).SerializeToString(),
            "target_prompt_logprobs: unknown dtype 0",
        ),
        (
            pb.SampleResponse(prompt_alt_tokens=pb.PromptAltTokens()).SerializeToString(),
            r"prompt_alt_tokens\.tokens: unknown dtype 0",
        ),
    ],
    ids=by_words,
)
def test_invalid_samples_are_refused(data, words):
    with pytest.raises(DecodeError, match=words):
        decode_sample_response(data)


# -- damaged bytes -------------------------------------------------------------------------------

MESSAGES: dict[str, tuple[Decoder, st.SearchStrategy[bytes]]] = {
    "request": (
        decode_forward_backward_request,
        training_requests(datums | datums_with_spans).map(encode_forward_backward_request),
    ),
    "output": (
        decode_forward_backward_output,
        training_outputs.map(encode_forward_backward_output),
    ),
    "sample": (decode_sample_response, sample_responses.map(encode_sample_response)),
}
each_message = pytest.mark.parametrize(("decode", "messages"), MESSAGES.values(), ids=MESSAGES)


def reads_or_refuses(decode: Decoder, data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(data)


@each_message
@settings(max_examples=25)
@given(data=st.data())
def test_messages_cut_at_any_byte_are_read_or_refused(decode, messages, data):
    whole = data.draw(messages)
    for end in range(len(whole)):
        reads_or_refuses(decode, whole[:end])


@each_message
@settings(max_examples=60)
@given(data=st.data())
def test_messages_with_one_byte_changed_are_read_or_refused(decode, messages, data):
    whole = bytearray(data.draw(messages.filter(bool)))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    reads_or_refuses(decode, bytes(whole))


@each_message
@given(data=st.binary(max_size=60))
def test_random_bytes_are_read_or_refused(decode, messages, data):
    reads_or_refuses(decode, data)


@each_message
@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\x07",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\xff" * 20,
        b"\x0b",
        b"{}",
    ],
    ids=["no length", "length past the end", "negative length", "no end", "open group", "JSON"],
)
def test_invalid_protobuf_is_refused(decode, messages, data):
    with pytest.raises(DecodeError, match=r"^body: is not a \w+ message"):
        decode(data)


@each_message
def test_memoryview_is_accepted(decode, messages):
    assert decode(memoryview(b"")) is not None


@given(names)
def test_fields_of_a_newer_release_are_ignored(name):
    unknown = b"\xfa\x3e" + bytes([len(name)]) + name.encode()  # field 1007, text
    assert decode_sample_response(unknown).sequences == []


def test_sample_with_unknown_stop_reason_is_kept():
    drawn = pb.SampledSequence(stop_reason=7, tokens=packed(5, dtype="int32"))  # type: ignore[arg-type]
    read = decode_sample_response(pb.SampleResponse(sequences=[drawn]).SerializeToString())
    assert (read.sequences[0].stop_reason, read.sequences[0].tokens) == (None, [5])
