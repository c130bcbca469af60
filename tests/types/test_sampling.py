import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import sample_responses, sampled_sequences
from tests.types import refuses, refuses_field
from tinkex._wire import json_codec
from tinkex.errors import InvalidInputError
from tinkex.types import (
    CreateSamplingSessionRequest,
    JoinSamplingSessionResponse,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SampleStreamChunk,
    SamplingParams,
    TopkLogprobs,
)
from tinkex.types.sampling import EXTENSIONS

PROMPT = ModelInput.from_ints([1, 2])


# -- parameters ----------------------------------------------------------------------------------


def test_sampling_defaults():
    official = {
        "max_tokens": None,
        "seed": None,
        "stop": None,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    assert SamplingParams().model_dump() == official | dict.fromkeys(EXTENSIONS)


def test_extensions_are_absent_from_requests_unless_set():
    assert json.loads(json_codec.encode(SamplingParams())) == {
        "temperature": 1,
        "top_k": -1,
        "top_p": 1,
    }
    params = SamplingParams(logit_bias={7: 1.5}, json_schema={"default": None})
    written = json.loads(json_codec.encode(params))
    assert written["logit_bias"] == {"7": 1.5}
    assert written["json_schema"] == {"default": None}
    assert json_codec.from_object(written, SamplingParams) == params
    assert params.extensions == ["logit_bias", "json_schema"]


def test_request_has_at_most_one_constraint():
    with pytest.raises(InvalidInputError, match="json_schema and regex"):
        SamplingParams(json_schema={}, regex="a")


@pytest.mark.parametrize("stop", [None, "END", ["a", "b"], [1, 2], []])
def test_stop_is_text_texts_or_tokens(stop):
    params = SamplingParams(stop=stop)
    assert params.stop == stop
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("seed", "x"),
    ],
)
def test_parameters_out_of_range_are_refused(field, bad):
    with refuses_field(field):
        SamplingParams(**{field: bad})


@pytest.mark.parametrize("stop", [5, [1, "a"], [None], {"a": 1}])
def test_other_stops_are_refused(stop):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


def test_misspelt_parameters_are_refused_and_newer_ones_are_ignored_on_the_wire():
    with refuses("max_token", "SamplingParams; did you mean max_tokens"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with refuses("beam", "it has max_tokens, seed"):
        SamplingParams(beam=4)  # type: ignore[call-arg]
    request = {"prompt": {"chunks": []}, "sampling_params": {"beam": 4, "max_tokens": 1}}
    read = json_codec.from_object(request, SampleRequest)
    assert read.sampling_params == SamplingParams(max_tokens=1)


# -- requests ------------------------------------------------------------------------------------


def test_request_sends_counts_and_leaves_out_unset_fields():
    request = SampleRequest(prompt=PROMPT, sampling_params=SamplingParams())
    assert request.model_dump(exclude_none=True) == {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"temperature": 1, "top_k": -1, "top_p": 1},
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    }


@pytest.mark.parametrize("value", [None, True, False])
def test_prompt_logprobs_has_three_states(value):
    request = SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(), prompt_logprobs=value)
    written = request.model_dump(exclude_none=True)
    assert written.get("prompt_logprobs", None) is value
    assert ("prompt_logprobs" in written) is (value is not None)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("num_samples", 0),
        ("num_samples", -1),
        ("topk_prompt_logprobs", -1),
        ("topk_sample_logprobs", -1),
        ("prompt_alt_tokens_k", -1),
        ("prompt_logprobs_last_n", -1),
        ("prompt", [1, 2]),
        ("prompt", None),
        ("sampling_params", None),
        ("target_prompt_logprobs", {"data": [1], "dtype": "int8"}),
    ],
)
def test_requests_refuse_negative_counts_and_other_types(field, bad):
    fields = {"prompt": PROMPT, "sampling_params": SamplingParams()} | {field: bad}
    with refuses_field(field):
        SampleRequest(**fields)


def test_session_numbers_count_up_from_zero():
    with refuses_field("sampling_session_seq_id"):
        CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=-1)
    with refuses_field("client_counter"):
        JoinSamplingSessionResponse(client_counter=0)


# -- sequences -----------------------------------------------------------------------------------


def test_sequence_is_created_from_lists_or_arrays():
    lists = SampledSequence(
        stop_reason="stop", tokens=[1, 2], logprobs=[-0.5, None], topk_logprobs=[[[1, -0.5]], None]
    )
    arrays = SampledSequence(
        "stop",
        "id",
        np.array([1, 2], np.int32),
        np.array([-0.5, np.nan], np.float32),
        TopkLogprobs(np.array([[1], [0]], np.int32), np.array([[-0.5], [-99999.0]], np.float32)),
    )
    for sequence in (lists, arrays):
        assert sequence.tokens == [1, 2]
        assert sequence.tokens_np is not None
        assert sequence.tokens_np.dtype == np.int32
        assert sequence.logprobs is not None
        assert sequence.logprobs[0] == -0.5
        assert np.isnan(sequence.logprobs[1])
        assert sequence.topk_logprobs == [[(1, -0.5)], None]


def test_arrays_of_a_sequence_are_not_copied():
    tokens, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    sequence = SampledSequence("length", tokens=tokens, logprobs=logprobs)
    assert sequence.tokens_np is tokens
    assert sequence.logprobs_np is logprobs


def test_sequence_needs_only_a_stop_reason():
    sequence = SampledSequence("length")
    assert (sequence.tokens, sequence.logprobs, sequence.topk_logprobs) == ([], None, None)
    assert sequence.sequence_id == ""


def test_lists_of_a_sequence_are_cached():
    sequence = SampledSequence("stop", tokens=[1], logprobs=[-0.5])
    assert sequence.tokens is sequence.tokens
    assert sequence.logprobs is sequence.logprobs


@given(sampled_sequences())
def test_sequences_pickle_copy_and_compare_by_value(sequence):
    _ = sequence.tokens, sequence.logprobs
    for again in (
        pickle.loads(pickle.dumps(sequence)),
        copy.copy(sequence),
        copy.deepcopy(sequence),
        dataclasses.replace(sequence),
    ):
        assert again == sequence
        assert again.tokens == sequence.tokens
    assert sequence != SampledSequence(sequence.stop_reason, tokens=[*sequence.tokens, 1])


def test_stop_reason_can_be_none():
    assert SampledSequence(None, tokens=[1]).stop_reason is None


def test_repr_of_a_long_sequence_is_short():
    assert len(repr(SampledSequence("stop", tokens=range(100_000)))) < 400


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"stop_reason": 5}, "stop_reason", "5"),
        ({"stop_reason": ["stop"]}, "stop_reason", "must be length or stop"),
        ({"tokens": [1.5]}, "tokens", "expected integers"),
        ({"tokens": ["a"]}, "tokens", "got 'a'"),
        ({"tokens": [2**31]}, "tokens", "does not fit"),
        ({"tokens": [[1], [2]]}, "tokens", "one flat list"),
        ({"tokens": [[1], [2, 3]]}, "tokens", "ragged"),
        ({"logprobs": ["a"]}, "logprobs", "got 'a'"),
        ({"logprobs": [[0.5]]}, "logprobs", "one flat list"),
        ({"topk_logprobs": [[[1]]]}, "topk_logprobs", "pair"),
        ({"topk_logprobs": 5}, "topk_logprobs", "rows"),
    ],
    ids=str,
)
def test_sequences_refuse_invalid_values(fields, field, words):
    with refuses(field, words):
        SampledSequence(**{"stop_reason": "stop"} | fields)


# -- responses -----------------------------------------------------------------------------------


def test_prompt_logprobs_are_none_where_nothing_was_computed():
    response = SampleResponse([], np.array([np.nan, -0.5], np.float32))
    assert response.prompt_logprobs == [None, -0.5]
    assert SampleResponse([]).prompt_logprobs is None
    assert SampleResponse([]).topk_prompt_logprobs is None


def test_topk_prompt_logprobs_are_pairs_or_none():
    table = TopkLogprobs.from_rows([None, [[3, -0.5], [4, -1.5]]])
    response = SampleResponse([], topk_prompt_logprobs_np=table)
    assert response.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.5)]]


@settings(max_examples=30)
@given(sample_responses)
def test_responses_pickle(response):
    again = pickle.loads(pickle.dumps(response))
    assert again.sequences == response.sequences
    assert again.prompt_logprobs == response.prompt_logprobs
    assert again.topk_prompt_logprobs == response.topk_prompt_logprobs
    assert again.target_prompt_logprobs == response.target_prompt_logprobs
    assert again.prompt_alt_tokens == response.prompt_alt_tokens


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "event", "done"),
    [
        (SampleStreamChunk(token="a", token_id=1), "token", False),
        (SampleStreamChunk(finish_reason="stop", total_tokens=3), "done", True),
        (SampleStreamChunk(error="no"), "error", True),
    ],
)
def test_a_stream_chunk_is_a_token_the_end_or_an_error(chunk, event, done):
    assert (chunk.event_type, chunk.done) == (event, done)


def test_an_unknown_stop_reason_is_kept():
    drawn = SampledSequence("content_filter", tokens=[1])  # type: ignore[arg-type]
    assert str(drawn.stop_reason) == "content_filter"


def test_response_accepts_lists_like_a_sequence():
    response = SampleResponse(
        [], prompt_logprobs=[None, -1.0], topk_prompt_logprobs=[None, [(3, -0.5)]]
    )
    assert response.prompt_logprobs == [None, -1.0]
    assert response.topk_prompt_logprobs == [None, [(3, -0.5)]]
    with refuses("prompt_logprobs"):
        SampleResponse([], prompt_logprobs=["x"])
