"""Fields of a message are counted in its bytes, as the parser would find them."""

from __future__ import annotations

import pytest

from tinkex._wire.proto_size import has_more_fields
from tinkex._wire.tinkex_pb2 import DTYPE_INT64, ForwardBackwardRequest
from tinkex.errors import DecodeError

KIND = ForwardBackwardRequest.DESCRIPTOR


def message(datums: int = 1, chunks: int = 1) -> ForwardBackwardRequest:
    """Three fields, and for each datum one, four for each chunk, seven for its tensor."""
    request = ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(datums):
        datum = request.data.add()
        for _ in range(chunks):
            datum.model_input.add().encoded_text.tokens = b"\0" * 400
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = b"\0" * 400, DTYPE_INT64
        tensor.shape.extend([50])
    return request


@pytest.mark.parametrize(("datums", "chunks"), [(1, 1), (3, 1), (2, 5), (0, 0)])
def test_every_field_of_every_message_counts(datums, chunks):
    # A chunk: its entry, the kind of chunk, the tokens. A tensor: its entry, name, value, three fields and the one
    # byte of its packed shape.
    count = 3 + datums * (1 + 3 * chunks + 7)
    data = message(datums, chunks).SerializeToString()
    assert not has_more_fields(data, KIND, count)
    assert has_more_fields(data, KIND, count - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"\x1a\x00" * 1000,  # empty datums
        b"\x1a\xd0\x0f" + b"\x0a\x00" * 1000,  # one datum of empty chunks
        b"\x2a\x00" * 1000,  # entries of a map
        b"\x30\x01" * 1000,  # one field repeated
        b"\x98\x06\x01" * 1000,  # an unknown field
    ],
    ids=["datums", "chunks", "map", "repeated", "unknown"],
)
def test_many_tiny_fields_are_found(data):
    assert has_more_fields(data, KIND, 999)


def test_each_byte_of_a_packed_list_counts():
    request = message()
    request.data[0].loss_fn_inputs["target_tokens"].shape.extend([1] * 5000)
    assert has_more_fields(request.SerializeToString(), KIND, 5000)


@pytest.mark.parametrize(
    "data",
    [b"\x1a\x05ab", b"\x0a", b"\x10\xff", b"\xff" * 20, b"\x1b", b"\x1a\xff\xff\xff\xff\x0f"],
)
def test_invalid_protobuf_bytes_are_refused(data):
    with pytest.raises(DecodeError):
        has_more_fields(data, KIND, 1000)
