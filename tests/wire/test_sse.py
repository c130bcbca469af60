from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._wire.sse import ServerSentEvent, SSEDecoder
from tinkex.errors import DecodeError


def decode(*chunks: bytes, **options: int) -> list[ServerSentEvent]:
    decoder = SSEDecoder(**options)
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def decode_all(chunks: Iterable[bytes]) -> tuple[list[ServerSentEvent], list[ServerSentEvent]]:
    decoder = SSEDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    return events, decoder.flush()


def refuses(chunks: Iterable[bytes]) -> bool:
    decoder = SSEDecoder(max_event_bytes=24)
    try:
        for chunk in chunks:
            decoder.feed(chunk)
    except DecodeError:
        return True
    return False


def bytewise(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    bounds = [0, *sorted(places), len(stream)]
    return [stream[start:end] for start, end in pairwise(bounds)]


@st.composite
def cut_streams(draw: Any, streams: st.SearchStrategy[bytes]) -> tuple[bytes, list[bytes]]:
    stream = draw(streams)
    places = draw(st.lists(st.integers(0, len(stream)), max_size=12))
    return stream, cut(stream, places)


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
pieces = st.sampled_from(
    [
        b"data",
        b"event",
        b"id",
        b"retry",
        b":",
        b": ",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"\xef\xbb\xbf",
        "żółw🐢".encode(),
        b"\xff\xf0\x9f",
        b"\0",
        b"17",
        b"text",
    ]
)
# Mostly valid lines, sometimes arbitrary bytes.
wild_streams = st.lists(pieces | st.binary(max_size=6), max_size=40).map(b"".join)


class TestFields:
    def test_all_fields(self):
        stream = b"event: update\nid: 7\nretry: 1500\ndata: hello\n\n"

        assert decode(stream) == [ServerSentEvent("update", "hello", "7", 1500)]

    def test_data_lines_are_joined_by_newlines(self):
        assert decode(b"data: a\ndata:\ndata: b\n\n") == [ServerSentEvent(data="a\n\nb")]

    def test_exactly_one_leading_space_is_stripped(self):
        assert [event.data for event in decode(b"data:a\n\ndata: a\n\ndata:  a \n\n")] == [
            "a",
            "a",
            " a ",
        ]

    def test_only_the_first_colon_separates(self):
        assert decode(b"data: a: b\n\n") == [ServerSentEvent(data="a: b")]

    def test_name_without_colon_has_an_empty_value(self):
        assert decode(b"data\n\n") == [ServerSentEvent(data="")]

    @pytest.mark.parametrize("line", [b": ping", b":", b"unknown: x", b"Data: x", b" data: x"])
    def test_comments_and_unknown_names_are_ignored(self, line):
        assert decode(line + b"\n\n") == []
        assert decode(b"data: a\n" + line + b"\ndata: b\n\n") == [ServerSentEvent(data="a\nb")]

    def test_fields_do_not_leak_into_the_next_event(self):
        first, second = decode(b"event: x\nretry: 5\ndata: a\n\ndata: b\n\n")

        assert first == ServerSentEvent("x", "a", None, 5)
        assert second == ServerSentEvent(None, "b", None, None)

    def test_id_is_kept_until_the_next_id(self):
        stream = b"id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\n"

        assert [event.id for event in decode(stream)] == ["1", "1", ""]

    def test_id_with_nul_is_ignored(self):
        assert decode(b"id: 1\0\ndata: a\n\n") == [ServerSentEvent(data="a")]

    @pytest.mark.parametrize(
        "value", [b"", b"-1", b"+1", b"1.5", b"1_0", b"soon", "٣".encode(), b"9" * 5000]
    )
    def test_retry_that_is_not_a_number_is_ignored(self, value):
        assert decode(b"retry: " + value + b"\ndata: a\n\n") == [ServerSentEvent(data="a")]

    @pytest.mark.parametrize(
        ("line", "event"),
        [
            (b"event: done", ServerSentEvent(event="done")),
            (b"id: 3", ServerSentEvent(id="3")),
            (b"retry: 0", ServerSentEvent(retry=0)),
        ],
    )
    def test_an_event_needs_no_data(self, line, event):
        assert decode(line + b"\n\n") == [event]

    def test_blank_lines_alone_are_no_events(self):
        assert decode(b"\n\r\n\r\n\n\n") == []
        assert decode(b"id: 1\n\n\n\n") == [ServerSentEvent(id="1")]


class TestText:
    def test_bom_is_dropped_at_the_start_only(self):
        assert decode(*bytewise(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")) == [
            ServerSentEvent(data="a")
        ]

    def test_characters_can_be_split_between_chunks(self):
        assert decode(*bytewise("data: żółw🐢\n\n".encode())) == [ServerSentEvent(data="żółw🐢")]

    def test_malformed_bytes_are_replaced(self):
        assert decode(b"data: a\xffb\n\n") == [ServerSentEvent(data="a\ufffdb")]

    def test_only_cr_and_lf_end_lines(self):
        text = "a\x0bb\x0cc\x1cd\x85e\u2028f"

        assert decode(f"data: {text}\n\n".encode()) == [ServerSentEvent(data=text)]

    @pytest.mark.parametrize(
        ("data", "value"),
        [
            ('{"a": [1, null]}', {"a": [1, None]}),
            ("3", 3),
            ("[DONE]", "[DONE]"),
            ("{", "{"),
            ("", ""),
            ("NaN", "NaN"),
            ("[" * 100_000, "[" * 100_000),
        ],
    )
    def test_json_falls_back_to_the_text(self, data, value):
        assert ServerSentEvent(data=data).json() == value


class TestCuts:
    def test_cr_ends_an_event_without_waiting_for_more(self):
        decoder = SSEDecoder()

        assert decoder.feed(b"data: a\r\r") == [ServerSentEvent(data="a")]
        assert decoder.feed(b"") == []
        assert decoder.feed(b"\ndata: b\r\n\r") == [ServerSentEvent(data="b")]
        assert decoder.feed(b"\n") == []

    def test_only_an_lf_right_after_a_cr_is_skipped(self):
        assert decode(b"data: a\rdata: b", b"\n\n") == [ServerSentEvent(data="a\nb")]
        assert decode(b"data: a\r", b"\n", b"\n") == [ServerSentEvent(data="a")]

    @given(cut_streams(wild_streams))
    def test_chunk_borders_do_not_change_the_events(self, example):
        stream, chunks = example

        whole = decode_all([stream])
        assert decode_all(chunks) == whole
        assert decode_all(bytewise(stream)) == whole

    @given(
        st.lists(
            st.tuples(
                st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])),
                line_ends,
            ),
            min_size=1,
        ),
        st.data(),
    )
    def test_every_line_ending_gives_the_same_events(self, lines, data):
        stream = b"".join(b"data: " + text.encode() + end for text, end in lines) + b"\n\n"
        places = data.draw(st.lists(st.integers(0, len(stream)), max_size=5))

        # After a CR the first of the two LFs belongs to it; the second is the blank line.
        assert decode(*cut(stream, places)) == [
            ServerSentEvent(data="\n".join(text for text, _ in lines))
        ]

    def test_event_is_returned_with_the_chunk_that_completes_it(self):
        decoder = SSEDecoder()

        assert decoder.feed(b"data: a\n") == []
        assert decoder.feed(b"\ndata: b\n\ndata: c") == [
            ServerSentEvent(data="a"),
            ServerSentEvent(data="b"),
        ]
        assert decoder.feed(b"\n\n") == [ServerSentEvent(data="c")]


class TestFlush:
    @pytest.mark.parametrize("rest", [b"data: a", b"data: a\n", b"data: a\r", b"event:x\ndata: a"])
    def test_returns_the_incomplete_event(self, rest):
        decoder = SSEDecoder()
        decoder.feed(rest)

        assert [event.data for event in decoder.flush()] == ["a"]
        assert decoder.flush() == []

    @pytest.mark.parametrize("stream", [b"", b"data: a\n\n", b": comment"])
    def test_returns_nothing_without_an_incomplete_event(self, stream):
        decoder = SSEDecoder()
        decoder.feed(stream)

        assert decoder.flush() == []

    def test_next_stream_starts_new_but_keeps_the_last_id(self):
        decoder = SSEDecoder()
        decoder.feed(b"id: 9\ndata: a\n\ndata: cut off\r")
        decoder.flush()

        assert decoder.feed(b"\xef\xbb\xbfdata: b\n\n") == [ServerSentEvent(data="b", id="9")]


class TestLimit:
    @pytest.mark.parametrize(
        "stream", [b"x" * 33, b"data: " + b"x" * 27, b"data: x\n" * 14, b"data\n" * 33]
    )
    @pytest.mark.parametrize("split", [lambda stream: [stream], bytewise])
    def test_an_event_too_long_is_refused(self, stream, split):
        with pytest.raises(DecodeError, match="longer than 32 bytes") as caught:
            decode(*split(stream), max_event_bytes=32)

        assert caught.value.field == "event"

    def test_the_limit_is_per_event(self):
        decoder = SSEDecoder(max_event_bytes=32)
        event = b"data: " + b"x" * 26 + b"\n\n"

        assert len(decoder.feed(event * 100)) == 100

    def test_ignored_lines_do_not_count_towards_the_limit(self):
        decoder = SSEDecoder(max_event_bytes=32)

        assert decoder.feed(b": ping\n" * 100) == []
        assert decoder.feed(b"data: a\n\n") == [ServerSentEvent(data="a")]

    @given(cut_streams(wild_streams))
    def test_chunk_borders_do_not_change_the_limit(self, example):
        stream, chunks = example
        assert refuses(chunks) == refuses([stream]) == refuses(bytewise(stream))

    def test_a_long_line_in_single_bytes(self):
        # With a scan of the buffer at every feed this would take minutes.
        line = b"data: " + b"x" * 1_000_000 + b"\n\n"

        (event,) = decode(*bytewise(line))
        assert len(event.data) == 1_000_000
