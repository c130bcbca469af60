import gzip
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from tinkex._wire.compression import compress, decode_body, decompress
from tinkex.errors import DecodeError

MIB = 1 << 20

bodies = st.binary(max_size=2000) | st.builds(
    lambda unit, count: unit * count, st.binary(max_size=20), st.integers(0, 20_000)
)


def compress_unannounced(data: bytes, **options: Any) -> bytes:
    params = zstandard.ZstdCompressionParameters.from_level(3, write_content_size=False, **options)
    return zstandard.ZstdCompressor(compression_params=params).compress(data)


def raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


ZSTD_FRAMES = pytest.mark.parametrize("frame_of", [compress, compress_unannounced])
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": compress,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit


class TestZstd:
    @given(bodies)
    def test_round_trip(self, data):
        assert decompress(compress(data)) == data
        assert decompress(compress_unannounced(data)) == data

    @given(bodies)
    def test_one_frame_that_announces_its_size(self, data):
        frame = compress(data)

        assert zstandard.get_frame_parameters(frame).content_size == len(data)
        decoder = zstandard.ZstdDecompressor().decompressobj()
        assert decoder.decompress(frame) == data
        assert decoder.eof
        assert decoder.unused_data == b""

    @ZSTD_FRAMES
    @given(data=bodies, where=st.floats(0, 1, exclude_max=True))
    def test_truncated(self, frame_of, data, where):
        frame = frame_of(data)

        with pytest.raises(DecodeError) as caught:
            decompress(frame[: int(len(frame) * where)])

        assert caught.value.field == "body"

    @ZSTD_FRAMES
    @pytest.mark.parametrize("data", [b"", b"a", os.urandom(300), b"ab" * 500_000])
    def test_truncated_anywhere(self, frame_of, data):
        frame = frame_of(data)

        for size in range(len(frame)):
            with pytest.raises(DecodeError):
                decompress(frame[:size])

    @ZSTD_FRAMES
    @given(data=bodies, rest=st.binary(min_size=1, max_size=600))
    def test_trailing_bytes(self, frame_of, data, rest):
        with pytest.raises(DecodeError) as caught:
            decompress(frame_of(data) + rest)

        assert caught.value.field == "body"

    @ZSTD_FRAMES
    def test_a_second_frame_is_refused(self, frame_of):
        with pytest.raises(DecodeError):
            decompress(frame_of(b"one") + frame_of(b"two"))

    @given(st.binary())
    def test_garbage(self, data):
        assume(not data.startswith(b"\x28\xb5\x2f\xfd"))
        with pytest.raises(DecodeError):
            decompress(data)

    @given(st.binary())
    def test_garbage_after_the_magic_number(self, data):
        try:
            content = decompress(b"\x28\xb5\x2f\xfd" + data, max_size=MIB)
        except DecodeError:
            return
        assert len(content) <= MIB

    @ZSTD_FRAMES
    @pytest.mark.parametrize("size", [0, 1, 1000, 3 * MIB])
    def test_limit_is_inclusive(self, frame_of, size):
        frame = frame_of(bytes(size))

        assert decompress(frame, max_size=size) == bytes(size)
        if size:
            with pytest.raises(DecodeError, match=f"larger than {size - 1} bytes"):
                decompress(frame, max_size=size - 1)

    def test_announced_bomb_is_refused_before_decompression(self):
        bomb = compress(bytes(256 * MIB))

        with memory_below(MIB), pytest.raises(DecodeError, match="larger than"):
            decompress(bomb, max_size=16 * MIB)

    def test_unannounced_bomb_is_refused_during_decompression(self):
        bomb = compress_unannounced(bytes(256 * MIB))

        with memory_below(40 * MIB), pytest.raises(DecodeError, match="larger than"):
            decompress(bomb, max_size=16 * MIB)

    def test_bomb_of_run_length_blocks_is_refused_with_little_memory(self):
        # A frame of nothing but run-length blocks: four bytes for 128 KiB each.
        header = b"\x28\xb5\x2f\xfd\x00\x58"  # size unknown, window 2 MiB
        block = (128 << 10 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
        bomb = header + block * 4000

        assert decompress(header + block * 7 + b"\x01\0\0") == bytes(7 * 128 << 10)
        with memory_below(40 * MIB), pytest.raises(DecodeError, match="larger than"):
            decompress(bomb, max_size=16 * MIB)

    @ZSTD_FRAMES
    def test_content_is_in_memory_only_once(self, frame_of):
        frame = frame_of(bytes(64 * MIB))

        with memory_below(96 * MIB):
            assert len(decompress(frame)) == 64 * MIB

    def test_large_window_needs_an_announced_size(self):
        # If the size is known, the content itself is the window; otherwise a window must be allocated.
        data = os.urandom(MIB) * 9
        level = zstandard.ZstdCompressionParameters.from_level(3, window_log=24)

        announced = zstandard.ZstdCompressor(compression_params=level).compress(data)
        assert decompress(announced) == data
        with pytest.raises(DecodeError):
            decompress(compress_unannounced(data, window_log=24))

    def test_frame_with_checksum(self):
        frame = zstandard.ZstdCompressor(write_checksum=True).compress(b"content")

        assert decompress(frame) == b"content"
        with pytest.raises(DecodeError):
            decompress(frame[:-1] + bytes([frame[-1] ^ 1]))

    def test_import_does_not_load_zstandard(self):
        script = "import sys, tinkex._wire.compression; sys.exit('zstandard' in sys.modules)"

        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class TestDecodeBody:
    @pytest.mark.parametrize("header", [None, "", "identity", " Identity , ", "identity,identity"])
    def test_body_without_encoding_is_unchanged(self, header):
        assert decode_body(b"body", header) == b"body"

    @pytest.mark.parametrize("encoding", ENCODERS)
    @given(data=bodies)
    def test_round_trip(self, encoding, data):
        assert decode_body(ENCODERS[encoding](data), encoding) == data

    @given(bodies)
    def test_deflate_without_its_header(self, data):
        assert decode_body(raw_deflate(data), "deflate") == data

    @pytest.mark.parametrize("header", ["GZIP", " gzip ", "gzip, identity", ",gzip,"])
    def test_header_spelling(self, header):
        assert decode_body(gzip.compress(b"body"), header) == b"body"

    @given(bodies, st.lists(st.sampled_from(sorted(ENCODERS)), max_size=4))
    def test_many_encodings(self, data, encodings):
        encoded = data
        for encoding in encodings:
            encoded = ENCODERS[encoding](encoded)

        assert decode_body(encoded, ", ".join(encodings)) == data

    def test_too_many_encodings(self):
        with pytest.raises(DecodeError) as caught:
            decode_body(b"", "gzip, " * 5)

        assert caught.value.field == "content-encoding"

    @pytest.mark.parametrize("header", ["br", "gzip, br", "BR, gzip"])
    @pytest.mark.parametrize("data", [b"", b"body"])
    def test_unknown_encoding_is_named(self, header, data):
        with pytest.raises(DecodeError, match="'br'") as caught:
            decode_body(data, header)

        assert caught.value.field == "content-encoding"

    @pytest.mark.parametrize("encoding", ENCODERS)
    def test_empty_body_is_not_decoded(self, encoding):
        assert decode_body(b"", encoding) == b""

    @pytest.mark.parametrize("inner", ENCODERS)
    @pytest.mark.parametrize("outer", ENCODERS)
    def test_empty_inside_an_encoding_is_truncated(self, inner, outer):
        with pytest.raises(DecodeError) as caught:
            decode_body(ENCODERS[outer](b""), f"{inner}, {outer}")

        assert caught.value.field == "body"

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    @given(data=bodies, where=st.floats(0, 1, exclude_max=True))
    def test_truncated(self, encoding, data, where):
        encoded = ENCODERS[encoding](data)
        kept = max(1, int(len(encoded) * where))

        with pytest.raises(DecodeError) as caught:
            decode_body(encoded[:kept], encoding)

        assert caught.value.field == "body"

    @pytest.mark.parametrize("encoding", ENCODERS)
    @given(data=bodies, rest=st.binary(min_size=1, max_size=20))
    def test_trailing_bytes(self, encoding, data, rest):
        with pytest.raises(DecodeError) as caught:
            decode_body(ENCODERS[encoding](data) + rest, encoding)

        assert caught.value.field == "body"

    def test_trailing_bytes_beyond_one_step(self):
        with pytest.raises(DecodeError, match="after the end"):
            decode_body(gzip.compress(os.urandom(8000)) + bytes(20_000), "gzip")

    @pytest.mark.parametrize("encoding", ENCODERS)
    def test_body_without_its_named_encoding_is_refused(self, encoding):
        with pytest.raises(DecodeError) as caught:
            decode_body(b'{"type": "sample"}', encoding)

        assert caught.value.field == "body"

    @pytest.mark.parametrize("encoding", [None, *ENCODERS])
    def test_limit_is_inclusive(self, encoding):
        data = bytes(100_000)
        encoded = ENCODERS[encoding](data) if encoding else data

        assert decode_body(encoded, encoding, max_size=100_000) == data
        with pytest.raises(DecodeError, match="larger than 99999 bytes"):
            decode_body(encoded, encoding, max_size=99_999)

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_bomb(self, encoding):
        bomb = ENCODERS[encoding](bytes(128 * MIB))

        with memory_below(40 * MIB), pytest.raises(DecodeError, match="larger than"):
            decode_body(bomb, encoding, max_size=16 * MIB)

    def test_every_layer_is_bounded(self):
        bomb = gzip.compress(gzip.compress(bytes(128 * MIB)))

        with memory_below(40 * MIB), pytest.raises(DecodeError, match="larger than"):
            decode_body(bomb, "gzip, gzip", max_size=16 * MIB)
