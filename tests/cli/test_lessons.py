"""Lines of JSON as sequences to train on, with the tokenizer of the tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tinkex.cli.lessons import find_data, lessons_of, plain_lessons, read_records, within
from tinkex.cli.templates import Text
from tinkex.engine import base_models
from tinkex.errors import InvalidInputError

PAIR = {"prompt": "Hi?", "completion": "Yo."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    spec = base_models.parse_spec(base_models.TINY)
    return AutoTokenizer.from_pretrained(
        base_models.prepare(spec, tmp_path_factory.mktemp("models")).directory
    )


@pytest.fixture
def write(tmp_path):
    def written(*lines):
        file = tmp_path / "data.jsonl"
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file.write_bytes(b"\n".join(texts) + b"\n")
        return file

    return written


def conversation(*contents, system=None):
    opening = [] if system is None else [{"role": "system", "content": system}]
    roles = ["user", "assistant"] * len(contents)
    said = zip(roles, contents, strict=False)
    return {"messages": opening + [{"role": role, "content": text} for role, text in said]}


# -- reading ----------------------------------------------------------------------------------------


def test_conversations_pairs_and_splits_are_read(write):
    file = write(
        conversation("a", "b"), b"", PAIR, {"question": "q", "answer": "r", "split": "test"}
    )
    first, second, third = read_records(file)
    assert (first.line, first.form, first.split) == (1, "conversation", None)
    assert [message["content"] for message in second.messages] == ["Hi?", "Yo."]
    assert (third.line, third.form, third.split) == (4, "pair", "eval")


def test_bundled_data_is_found_by_name():
    records = read_records(find_data("tolmery"))
    assert {record.split for record in records} == {"train", "eval"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": ', "is not JSON: Expecting value at column 11"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b"[", "is not JSON: Expecting value at column 2; each line must be one object"),
        (b"Once upon a time", """`jq -Rc 'select(. != "") | {text: .}' FILE`"""),
        (b"[1]", "is not a JSON object but a list; each line must be one object"),
        (b"7", "is not a JSON object but a number"),
        ({}, 'needs "messages", or "prompt" and "completion", or "text"; it has nothing'),
        ({"conversations": []}, "it has 'conversations'"),
        ({"text": ["x"]}, 'needs a "text" that is text, not a list'),
        ({"text": ""}, '"text" is empty'),
        ({"prompt": "x"}, 'needs a "completion" that is text, not null'),
        ({"prompt": 1, "completion": "x"}, 'needs a "prompt" that is text, not a number'),
        ({"prompt": "x", "completion": ""}, '"completion" is empty'),
        ({"messages": []}, '"messages" must be a list of messages'),
        ({"messages": ["x"]}, "messages.0 is not an object but text"),
        ({"messages": [{"role": "user"}]}, 'messages.0 needs a "content" that is text, not null'),
        (conversation("x"), "has no message of the assistant"),
        (PAIR | {"split": "dessert"}, '"split" must be one of train, test'),
        (PAIR | {"split": ["test"]}, "validation, dev, not ['test']"),
        (PAIR | {"prompt": "\ud83d"}, '"prompt" has \\ud83d, half of a character'),
        (conversation("x", "\ude00"), '"messages.1.content" has \\ude00, half of a character'),
        (b'{"n": %s}' % (b"1" * 5000), "has a number of thousands of digits"),
        (b"[" * 100_000, "has thousands of objects or lists inside each other"),
    ],
)
def test_error_for_broken_line_names_its_number_and_reason(write, line, reason):
    file = write(PAIR, b"  ", line, PAIR)
    with pytest.raises(InvalidInputError) as caught:
        read_records(file)
    assert f"{file}, line 3: " in str(caught.value)
    assert reason in str(caught.value)


def test_an_empty_file_and_none_at_all_are_refused(write, tmp_path):
    with pytest.raises(InvalidInputError, match="holds no examples"):
        read_records(write(b" "))
    with pytest.raises(InvalidInputError, match="there is no file"):
        find_data(str(tmp_path / "nowhere.jsonl"))


# -- tokens -----------------------------------------------------------------------------------------


def lessons(tokenizer, write, line, system=None):
    (record,) = read_records(write(line))
    return list(lessons_of(record, tokenizer, system))


def text_of(tokenizer, lesson, *, learned):
    return tokenizer.decode(lesson.tokens[lesson.learned == learned])


def test_only_what_the_assistant_says_is_learned_up_to_its_end(tokenizer, write):
    (lesson,) = lessons(tokenizer, write, conversation("one?", "1.", "two?", "2.", system="Be."))
    assert text_of(tokenizer, lesson, learned=True) == "1.<|im_end|>2.<|im_end|>"
    assert tokenizer.decode(lesson.tokens).endswith("2.<|im_end|>")
    assert text_of(tokenizer, lesson, learned=False).startswith("<|im_start|>system\nBe.")
    assert lesson.count == 6


def test_a_system_message_is_put_before_a_conversation_that_has_none(tokenizer, write):
    (with_own,) = lessons(tokenizer, write, conversation("a", "b", system="Own."), "Other.")
    (without,) = lessons(tokenizer, write, PAIR, "Other.")
    assert "Other." not in tokenizer.decode(with_own.tokens)
    assert tokenizer.decode(without.tokens).startswith("<|im_start|>system\nOther.")


class Forgetful:
    """A tokenizer whose template shortens answers once others follow, as those of reasoning models do."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages, **options):
        shown = [dict(message) for message in messages]
        for message in shown[:-1]:
            message["content"] = message["content"].rpartition("</think>")[2]
        return self._tokenizer.apply_chat_template(shown, **options)


def test_where_the_template_rewrites_turns_each_is_a_sequence_of_its_own(tokenizer, write):
    line = conversation("a", "<think>hm</think>b", "c", "d")
    first, second = lessons(Forgetful(tokenizer), write, line)
    assert text_of(tokenizer, first, learned=True) == "<think>hm</think>b<|im_end|>"
    assert text_of(tokenizer, second, learned=True) == "d<|im_end|>"
    assert "hm" not in tokenizer.decode(second.tokens)


def test_pairs_can_be_learned_as_plain_text(tokenizer, write):
    (record,) = read_records(write(PAIR))
    (lesson,) = plain_lessons(record, tokenizer)
    assert tokenizer.decode(lesson.tokens) == "Hi?Yo.<|eos|>"
    assert text_of(tokenizer, lesson, learned=True) == "Yo.<|eos|>"
    (record,) = read_records(write(conversation("a", "b")))
    with pytest.raises(InvalidInputError, match="line 1: a conversation needs a chat template"):
        list(plain_lessons(record, tokenizer))


def test_all_of_a_text_is_learned_up_to_the_end_token(tokenizer, write):
    (record,) = read_records(write({"text": "Once.", "split": "test"}))
    (lesson,) = plain_lessons(record, tokenizer)
    assert (record.form, record.split) == ("text", "eval")
    assert text_of(tokenizer, lesson, learned=True) == "Once.<|eos|>"


def test_a_datum_predicts_the_next_token_and_counts_what_is_learned(tokenizer, write):
    (lesson,) = lessons(tokenizer, write, PAIR)
    datum = lesson.datum(0.5)
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    assert datum.model_input.to_ints() == lesson.tokens[:-1].tolist()
    assert np.array_equal(targets, lesson.tokens[1:])
    assert tokenizer.decode(targets[weights == 0.5]) == "Yo.<|im_end|>"
    assert weights.sum() == lesson.count * 0.5


# -- lengths ----------------------------------------------------------------------------------------


def test_too_long_examples_are_named_and_refused_truncated_or_skipped(tokenizer, write):
    texts = ["x", "x" * 50, "x" * 90]
    records = read_records(write(*(conversation("q", text) for text in texts)))
    all_of_them = [lesson for record in records for lesson in lessons_of(record, tokenizer)]
    limit = all_of_them[0].length + 10
    with pytest.raises(
        InvalidInputError, match=rf"2 of 3 .* {limit} tokens: line 2 \(\d+\), line 3"
    ):
        within(all_of_them, limit, "refuse")
    kept, note = within(all_of_them, limit, "skip")
    assert [lesson.line for lesson in kept] == [1]
    assert note is not None
    assert note.endswith("they are skipped")
    kept, note = within(all_of_them, limit, "truncate")
    assert [lesson.length for lesson in kept] == [all_of_them[0].length, limit, limit]
    assert all(len(lesson.learned) == lesson.length for lesson in kept)
    kept, note = within(all_of_them, 10, "truncate")
    assert kept == []
    assert note is not None
    assert note.endswith("3 of them skipped")
    assert within(all_of_them, None, "refuse") == (all_of_them, None)


def test_text_is_streamed_by_complete_characters(tokenizer):
    text = Text(tokenizer)
    pieces = [text.add(token) for token in tokenizer.encode("é→!")]
    assert pieces == ["", "é", "", "", "→", "!"]
    assert [text.add(0xE2), text.end()] == ["", "�"]
    assert text.whole == "é→!�"
