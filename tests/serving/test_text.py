"""Text of streams: characters, stop strings, and answers split into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine import base_models
from tinkex.server.serving.answers import AnswerParser, Piece, ToolCall, thinking_of
from tinkex.server.serving.stops import StopFilter
from tinkex.server.serving.tools import HERMES, LLAMA, Tool, ToolUse
from tinkex.server.serving.vocabulary import TextDecoder, Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    spec = base_models.parse_spec(base_models.TINY)
    return Vocabulary(base_models.prepare(spec, tmp_path_factory.mktemp("models")))


def decoded(vocabulary, tokens) -> list[str]:
    decoder = TextDecoder(vocabulary)
    return [*(decoder.add(token) for token in tokens), decoder.end()]


def test_character_of_several_tokens_is_sent_when_it_is_complete(vocabulary):
    assert decoded(vocabulary, "aé€😀".encode()) == [
        "a",
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "😀",
        "",
    ]


def test_incomplete_character_is_replaced_at_the_end(vocabulary):
    assert decoded(vocabulary, [97, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text(vocabulary):
    assert decoded(vocabulary, [259, 97, 260]) == ["", "a", "", ""]


def test_end_tokens_are_those_of_model_and_tokenizer(vocabulary):
    assert vocabulary.stop_tokens == (257, 260)


# -- stop strings -------------------------------------------------------------------------------------


def passed(stops, parts) -> tuple[str, str | None]:
    kept = StopFilter(stops)
    text = "".join(kept.add(part) for part in parts)
    return text + kept.end(), kept.found


@given(
    st.text("ab#", max_size=30),
    st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_before_the_first_stop_string_is_passed_in_whatever_parts(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, stop = passed(stops, parts)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert found == (text[: min(ends)] if ends else text) or stop is not None
    assert (stop is None) == (not ends)
    assert not any(stop in found for stop in stops)
    assert text.startswith(found)


def test_beginning_of_a_stop_string_is_held_back():
    kept = StopFilter(["END"])
    assert [kept.add(part) for part in ("aE", "N", "x", "EN", "D", "more")] == [
        "a",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert kept.found == "END"


# -- reasoning and calls ------------------------------------------------------------------------------

ADD = Tool("add", None, {"type": "object"})


def tools(form=HERMES) -> ToolUse:
    return ToolUse((ADD,), form, "auto")


def taken_apart(text, thinking="none", use=None, size=1) -> list[Piece]:
    """The pieces of a text that arrives `size` characters at a time, adjacent ones joined."""
    parser = AnswerParser(thinking, use)
    pieces = [
        piece
        for start in range(0, len(text), size)
        for piece in parser.add(text[start : start + size])
    ]
    joined: list[Piece] = []
    for piece in [*pieces, *parser.end()]:
        if joined and piece.call is None and joined[-1].kind == piece.kind:
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
CALLED = Piece("call", call=ToolCall("add", {"x": 1}))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "thinking", "use", "pieces"),
    [
        ("plain < text", "none", None, [Piece("content", "plain < text")]),
        (
            "<think>why</think>\n\nso",
            "maybe",
            None,
            [Piece("reasoning", "why"), Piece("content", "so")],
        ),
        ("\nwhy\n</think>\nso", "open", None, [Piece("reasoning", "why"), Piece("content", "so")]),
        ("no <think>tag", "maybe", None, [Piece("content", "no <think>tag")]),
        ("<thin", "maybe", None, [Piece("content", "<thin")]),
        ("only reasoning", "open", None, [Piece("reasoning", "only reasoning")]),
        ("<think>a</think>", "none", None, [Piece("content", "<think>a</think>")]),
        (CALL, "none", tools(), [CALLED]),
        (
            f"Let me see.\n{CALL}\n{CALL}",
            "none",
            tools(),
            [Piece("content", "Let me see."), CALLED, CALLED],
        ),
        (f"<think>hm</think>\n{CALL}", "maybe", tools(), [Piece("reasoning", "hm"), CALLED]),
        (CALL, "none", None, [Piece("content", CALL)]),
        (
            "<tool_call>\nno call\n</tool_call>",
            "none",
            tools(),
            [Piece("content", "<tool_call>\nno call\n</tool_call>")],
        ),
        (
            '<tool_call>\n{"name": "a',
            "none",
            tools(),
            [Piece("content", '<tool_call>\n{"name": "a')],
        ),
        ('{"name": "add", "parameters": {"x": 1}}', "none", tools(LLAMA), [CALLED]),
        (
            '{"name": "add", "parameters": {"x": 1}}; {"name": "add", "parameters": {"x": 1}}',
            "none",
            tools(LLAMA),
            [CALLED, CALLED],
        ),
        ('{"other": 1}', "none", tools(LLAMA), [Piece("content", '{"other": 1}')]),
        ("words {1}", "none", tools(LLAMA), [Piece("content", "words {1}")]),
    ],
)
def test_parts_of_an_answer_do_not_depend_on_how_it_arrives(text, thinking, use, pieces, size):
    assert taken_apart(text, thinking, use, size) == pieces


def test_reasoning_is_recognized_by_template_and_prompt():
    assert thinking_of("… </think> …", "…assistant\n") == "maybe"
    assert thinking_of("… </think> …", "…assistant\n<think>\n") == "open"
    assert thinking_of("… </think> …", "…assistant\n<think>\n\n</think>\n\n") == "none"
    assert thinking_of("plain", "…assistant\n") == "none"


def test_numbers_of_the_engine_are_plain_in_json(vocabulary):
    """Tokens come from arrays; `token_bytes` takes both kinds of numbers."""
    assert vocabulary.token_bytes(int(np.int32(65))) == b"A"
