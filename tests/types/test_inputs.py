import base64
import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.strategies import chunks, datums, model_inputs, text_chunks, token_ids, token_lists
from tests.types import refuses, refuses_field
from tinkex._client.tokenizers import set_tokenizer_loader
from tinkex.errors import InvalidInputError
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)

PNG = ImageChunk(data=b"\x89PNG", format="png", expected_tokens=7)


# -- text chunks ---------------------------------------------------------------------------------


def test_tokens_are_a_list_and_an_array():
    chunk = EncodedTextChunk(tokens=[1, 2, 3])
    assert chunk.tokens == [1, 2, 3]
    assert chunk.tokens_np.dtype == np.int32
    assert (chunk.length, chunk.type) == (3, "encoded_text")


def test_list_of_tokens_is_cached():
    chunk = EncodedTextChunk(tokens=[1, 2, 3])
    assert chunk.tokens is chunk.tokens


@given(text_chunks)
def test_reading_the_list_does_not_change_the_chunk(chunk):
    untouched = EncodedTextChunk(tokens=chunk.tokens_np)
    listed = list(chunk.tokens)
    for same in (chunk, pickle.loads(pickle.dumps(chunk)), copy.copy(chunk), chunk.model_copy()):
        assert same == untouched
        assert same.model_dump() == {"tokens": listed, "type": "encoded_text"}
        assert same.model_dump_json() == untouched.model_dump_json()
        assert repr(same) == repr(untouched)
    assert ModelInput(chunks=[chunk]).model_dump() == {
        "chunks": [{"tokens": listed, "type": "encoded_text"}]
    }


def test_cached_list_of_tokens_is_not_pickled():
    chunk = EncodedTextChunk(tokens=range(1000))
    size = len(pickle.dumps(chunk))
    _ = chunk.tokens
    assert len(pickle.dumps(chunk)) == size


def test_int32_arrays_are_not_copied():
    tokens = np.arange(5, dtype=np.int32)
    assert np.shares_memory(EncodedTextChunk(tokens=tokens).tokens_np, tokens)
    assert np.shares_memory(ModelInput.from_ints(tokens).to_numpy(), tokens)


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1.0, 2.0]), torch.tensor([1, 2])],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_may_be_any_sequence_of_whole_numbers(tokens):
    assert EncodedTextChunk(tokens=tokens).tokens == [1, 2]
    assert ModelInput.from_ints(tokens).to_ints() == [1, 2]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("12", "expected numbers, got str"),
        (5, "expected numbers, got int"),
        ([1, "2"], "got '2'"),
        ([1, None], "got None"),
        ([1.5], "expected integers"),
        ([2**31], "does not fit in int32"),
        ([-(2**31) - 1], "does not fit in int32"),
        ([[1, 2], [3, 4]], "one flat list"),
        ([[1], [2, 3]], "ragged"),
        (np.zeros((2, 2), np.int32), "one flat list"),
        (np.array(["a"]), "unsupported dtype"),
    ],
    ids=str,
)
def test_invalid_tokens_are_refused(tokens, words):
    with refuses("tokens", words):
        ModelInput.from_ints(tokens)
    with refuses_field("tokens", words):
        EncodedTextChunk(tokens=tokens)


def test_chunks_cannot_be_changed():
    chunk = EncodedTextChunk(tokens=[1])
    with pytest.raises(ValidationError, match="frozen"):
        chunk.tokens = [2]  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        PNG.format = "jpeg"  # type: ignore[misc]
    assert chunk.tokens == [1]


def test_a_copy_may_have_other_tokens():
    chunk = EncodedTextChunk(tokens=[1])
    assert chunk.model_copy(update={"tokens": [2, 3]}).tokens == [2, 3]
    assert chunk.tokens == [1]
    with refuses_field("tokens", "ragged"):
        chunk.model_copy(update={"tokens": [[1], [1, 2]]})


def test_deep_copies_share_nothing():
    tokens = np.array([1, 2], np.int32)
    deep = copy.deepcopy(ModelInput.from_ints(tokens))
    assert not np.shares_memory(deep.to_numpy(), tokens)
    assert deep.to_ints() == [1, 2]


# -- images and audio ----------------------------------------------------------------------------


def test_an_image_is_base64_in_json_and_bytes_in_python():
    chunk = ImageChunk(data=b"\x00\xff", format="png")
    assert chunk.data == b"\x00\xff"
    assert chunk.model_dump(mode="json", exclude_none=True) == {
        "data": base64.b64encode(b"\x00\xff").decode(),
        "format": "png",
        "type": "image",
    }
    assert ImageChunk.model_validate_json(chunk.model_dump_json()) == chunk


@given(st.binary(max_size=40))
def test_base64_text_is_decoded(data):
    text = base64.b64encode(data).decode()
    assert ImageChunk(data=text, format="png").data == data
    assert DmelChunk(dmel=text).dmel == data


@pytest.mark.parametrize("data", ["!!", "abc", "ä", 5, None, [1]], ids=repr)
def test_image_data_that_is_neither_bytes_nor_base64_is_refused(data):
    with refuses_field("data"):
        ImageChunk(data=data, format="png")


def test_image_formats_are_png_and_jpeg():
    with refuses_field("format", "png.*jpeg"):
        ImageChunk(data=b"", format="gif")
    with refuses_field("format", "png.*jpeg"):
        ImageAssetPointerChunk(location="x", format="webp")


@pytest.mark.parametrize(
    "image",
    [ImageChunk(data=b"", format="png"), ImageAssetPointerChunk(location="a", format="jpeg")],
    ids=lambda chunk: chunk.type,
)
def test_length_of_an_image_needs_expected_tokens(image):
    with refuses("expected_tokens", "length of an image"):
        _ = image.length
    assert image.model_copy(update={"expected_tokens": 9}).length == 9
    with refuses("expected_tokens"):
        _ = ModelInput(chunks=[image]).length


@pytest.mark.parametrize("count", [-1, "x", 1.5])
def test_expected_tokens_must_be_a_count(count):
    with refuses_field("expected_tokens"):
        ImageChunk(data=b"", format="png", expected_tokens=count)


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


@given(
    st.booleans(),
    st.integers(0, 7),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=3),
    st.binary(max_size=4),
)
def test_length_of_audio_is_its_first_dimension(constant, dtype, shape, payload):
    header = bytes([254] * constant + [dtype]) + varint(len(shape)) + b"".join(map(varint, shape))
    assert DmelChunk(dmel=header + payload).length == shape[0]


def test_audio_without_dimensions_is_empty():
    assert DmelChunk(dmel=b"\x01\x00").length == 0


@given(st.binary(max_size=12))
def test_any_audio_header_gives_a_length_or_an_error(data):
    try:
        length, fault = DmelChunk(dmel=data).length, None
    except InvalidInputError as error:
        length, fault = 0, error.field
    assert length >= 0
    assert fault in {None, "dmel"}


@pytest.mark.parametrize("header", [b"", b"\x01", b"\x01\x01", b"\x01\x01\x80", b"\xfe\x01"])
def test_incomplete_audio_header_is_refused(header):
    with refuses("dmel", "incomplete"):
        _ = DmelChunk(dmel=header).length


# -- ModelInput ----------------------------------------------------------------------------------


@given(token_lists)
def test_ints_round_trip(tokens):
    model_input = ModelInput.from_ints(tokens)
    assert model_input.to_ints() == tokens
    assert model_input.length == len(tokens)


def test_ints_of_several_chunks_are_joined():
    model_input = ModelInput(chunks=[EncodedTextChunk(tokens=[1]), EncodedTextChunk(tokens=[2, 3])])
    assert model_input.to_ints() == [1, 2, 3]
    assert ModelInput.empty().to_ints() == []


@pytest.mark.parametrize("chunk", [PNG, DmelChunk(dmel=b"\x01\x00")], ids=lambda chunk: chunk.type)
def test_only_text_has_ints(chunk):
    with refuses("chunks", f"type {chunk.type} has no token ids"):
        ModelInput.from_ints([1]).append(chunk).to_ints()


def test_length_is_the_sum_of_the_chunks():
    assert ModelInput.from_ints([1, 2]).append(PNG).length == 9


def test_append_does_not_change_the_original():
    first = ModelInput.from_ints([1])
    second = first.append(PNG)
    assert len(first.chunks) == 1
    assert second.chunks == [*first.chunks, PNG]


@given(token_lists, token_ids)
def test_append_int_extends_the_last_text(tokens, token):
    first = ModelInput.from_ints(tokens)
    second = first.append_int(token)
    assert second.to_ints() == [*tokens, token]
    assert len(second.chunks) == 1
    assert first.to_ints() == tokens


def test_append_int_adds_a_text_chunk_if_the_last_is_not_text():
    assert ModelInput.empty().append_int(4).to_ints() == [4]
    after_image = ModelInput(chunks=[PNG]).append_int(4)
    assert after_image.chunks == [PNG, EncodedTextChunk(tokens=[4])]


def test_append_int_refuses_invalid_tokens():
    with refuses("tokens", "expected integers"):
        ModelInput.empty().append_int(1.5)  # type: ignore[arg-type]


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_text_is_encoded_without_a_template():
    assert ModelInput.from_text("hi", Tokenizer()).to_ints() == [104, 105]
    with refuses("text", "expected str, got bytes"):
        ModelInput.from_text(b"hi", Tokenizer())  # type: ignore[arg-type]


class Trainer:
    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()


def test_text_can_be_encoded_with_the_tokenizer_of_a_model():
    assert ModelInput.from_text("hi", training_client=Trainer()).to_ints() == [104, 105]
    set_tokenizer_loader(lambda name, revision: Tokenizer() if name == "some/model" else None)
    try:
        assert ModelInput.from_text("hi", model_name="some/model").to_ints() == [104, 105]
    finally:
        set_tokenizer_loader(None)
    with refuses("tokenizer", "model_name"):
        ModelInput.from_text("hi", "some/model")
    with refuses("model_name", "give a tokenizer"):
        ModelInput.from_text("hi")


@given(chunks)
def test_kind_of_a_chunk_is_inferred_without_its_tag(chunk):
    written = chunk.model_dump(mode="json")
    untagged = {name: value for name, value in written.items() if name != "type"}
    for form in (written, untagged):
        assert ModelInput.model_validate({"chunks": [form]}).chunks == [chunk]


@pytest.mark.parametrize(
    "chunk", [5, "text", {}, {"type": "video"}, {"type": []}, {"width": 3}], ids=str
)
def test_chunks_of_unknown_kind_are_refused(chunk):
    with refuses_field("chunks.0"):
        ModelInput.model_validate({"chunks": [chunk]})


def test_misspelt_fields_are_refused():
    with refuses_field("token", "did you mean tokens"):
        EncodedTextChunk(tokens=[1], token=[2])  # type: ignore[call-arg]
    with refuses_field("chunk", "did you mean chunks"):
        ModelInput(chunks=[], chunk=[])  # type: ignore[call-arg]


@given(model_inputs)
def test_inputs_can_be_dumped_pickled_and_copied(model_input):
    for again in (
        ModelInput.model_validate(model_input.model_dump()),
        ModelInput.model_validate_json(model_input.model_dump_json()),
        pickle.loads(pickle.dumps(model_input)),
        copy.copy(model_input),
        copy.deepcopy(model_input),
        model_input.model_copy(),
        model_input.model_copy(deep=True),
    ):
        assert again == model_input


def test_inputs_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        ModelInput.empty().chunks = []  # type: ignore[misc]


def test_inputs_compare_by_value():
    assert ModelInput.from_ints([1, 2]) == ModelInput(chunks=[{"tokens": [1, 2]}])
    assert ModelInput.from_ints([1, 2]) != ModelInput.from_ints([1, 3])
    assert EncodedTextChunk(tokens=[1]) != [1]


# -- Datum ---------------------------------------------------------------------------------------

INPUT = ModelInput.from_ints([1, 2, 3])


@pytest.mark.parametrize(
    ("key", "dtype"),
    [
        ("target_tokens", "int64"),
        ("weights", "float32"),
        ("advantages", "float32"),
        ("logprobs", "float32"),
        ("clip_low_threshold", "float32"),
        ("clip_high_threshold", "float32"),
        ("sequence_ratio_mask", "float32"),
    ],
)
def test_lists_get_the_dtype_of_their_key(key, dtype):
    flat = Datum(INPUT, {key: [1, 2, 3]}).loss_fn_inputs[key]
    assert (flat.dtype, flat.shape, flat.data) == (dtype, [3], [1, 2, 3])
    nested = Datum(INPUT, {key: [[1, 2], [3, 4]]}).loss_fn_inputs[key]
    assert (nested.dtype, nested.shape) == (dtype, [2, 2])


def test_lists_under_other_keys_are_refused():
    with refuses("loss_fn_inputs.mine", "lists are accepted for target_tokens"):
        Datum(INPUT, {"mine": [1]})


def test_typed_tensors_are_accepted_under_any_key():
    tensor = TensorData([1], "int64")
    inputs = {"a": tensor, "b": np.array([0.5]), "c": torch.tensor([True])}
    converted = Datum(INPUT, inputs).loss_fn_inputs
    assert converted["a"] is tensor
    assert (converted["b"].dtype, converted["c"].dtype) == ("float32", "int64")


def test_numpy_inputs_are_not_copied():
    weights = np.ones(3, np.float32)
    datum = Datum(INPUT, {"weights": weights})
    assert np.shares_memory(datum.loss_fn_inputs["weights"].values, weights)


def test_only_wide_torch_targets_are_sent_sparse():
    wide = torch.zeros(4, 50, dtype=torch.int64)
    wide[1, 7] = 3
    inputs = {"target_tokens": wide, "weights": wide.float(), "mine": wide}
    converted = Datum(INPUT, inputs).loss_fn_inputs
    assert [tensor.is_sparse for tensor in converted.values()] == [True, True, False]
    for tensor in converted.values():
        assert torch.equal(tensor.to_torch().long(), wide)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[1], [2, 3]], "ragged"),
        (["a"], "expected numbers, got 'a'"),
        ("abc", "got str"),
        (None, "got NoneType"),
        (5, "got int"),
        ({"data": [1]}, "got dict"),
        (np.array([True]), "unsupported dtype bool"),
        (np.array(["a"]), "unsupported dtype"),
    ],
    ids=str,
)
def test_loss_inputs_that_are_not_tensors_are_refused(value, words):
    with refuses("loss_fn_inputs.weights", words):
        Datum(INPUT, {"weights": value})


def test_target_tokens_must_be_whole_numbers():
    with refuses("loss_fn_inputs.target_tokens", "expected integers"):
        Datum(INPUT, {"target_tokens": [1.5]})


def test_a_datum_needs_an_input_and_a_mapping():
    with refuses("model_input", "got list"):
        Datum([1, 2])  # type: ignore[arg-type]
    with refuses("loss_fn_inputs", "expected a mapping, got list"):
        Datum(INPUT, [1])  # type: ignore[arg-type]


@settings(max_examples=50)
@given(datums)
def test_datums_pickle_and_copy(datum):
    for again in (pickle.loads(pickle.dumps(datum)), copy.copy(datum), copy.deepcopy(datum)):
        assert again == datum


# -- provenance ----------------------------------------------------------------------------------


def test_datum_can_have_provenance_spans():
    prompt = PromptProvenanceSpan(sequence_id="s", length=2)
    sampled = SampledProvenanceSpan(sequence_id="s", offset=2, length=1)
    datum = Datum(INPUT, {"weights": [1.0]})
    traced = datum.with_provenance([prompt, sampled], [sampled])
    assert (traced.model_input_spans, traced.loss_fn_input_spans) == ([prompt, sampled], [sampled])
    assert traced.loss_fn_inputs == datum.loss_fn_inputs
    assert datum.model_input_spans is None


def test_both_kinds_of_spans_must_be_given_together():
    with refuses("spans", "must be given together"):
        Datum(INPUT, {}, [PromptProvenanceSpan(sequence_id="s", length=1)])


def test_spans_are_immutable_and_keyword_only():
    span = PromptProvenanceSpan(sequence_id="s", length=1)
    assert span == pickle.loads(pickle.dumps(span))
    assert span.offset == 0
    sampled: object = SampledProvenanceSpan(sequence_id="s", length=1)
    assert span != sampled
    with pytest.raises(TypeError):
        PromptProvenanceSpan("s", 0, 1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        span.length = 2  # type: ignore[misc]


@pytest.mark.parametrize("kind", [PromptProvenanceSpan, SampledProvenanceSpan])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_id", ""),
        ("sequence_id", 5),
        ("offset", -1),
        ("offset", 0.5),
        ("length", -1),
        ("length", "x"),
        ("length", None),
        ("length", True),
    ],
)
def test_spans_refuse_invalid_positions(kind, field, value):
    fields = {"sequence_id": "s", "offset": 0, "length": 1} | {field: value}
    with refuses(field, "must be"):
        kind(**fields)
