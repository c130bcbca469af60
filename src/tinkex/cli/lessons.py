"""Lines of JSON as training sequences: their tokens, and which of them are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tinkex.errors import InvalidInputError

from .templates import Message, answer_of

if TYPE_CHECKING:
    from tinkex.types import Datum

__all__ = [
    "DataLine",
    "Lesson",
    "find_data",
    "lessons_of",
    "plain_lessons",
    "read_records",
    "within",
]

_BUNDLED: Final = "tolmery"
#: Names of the two fields of a pair; the bundled data use the second.
_PAIRS: Final = (("prompt", "completion"), ("question", "answer"))
_SPLITS: Final = {
    "train": "train",
    **dict.fromkeys(("test", "eval", "valid", "validation", "dev"), "eval"),
}
#: For files in another format, such as one JSON list, or plain text.
_WHOLE_LINES: Final = """each line must be one object; `jq -c '.[]' FILE` makes such lines of a JSON list, \
`jq -Rc 'select(. != "") | {text: .}' FILE` of lines of text"""
#: Lines that a message names; the others are only counted.
_NAMED: Final = 5


@dataclass(frozen=True)
class DataLine:
    """One line of the data; `split` is None if the line has none. A text is one message of the assistant."""

    line: int
    messages: tuple[Message, ...]
    split: str | None = None
    form: Literal["conversation", "pair", "text"] = "conversation"


@dataclass(frozen=True, eq=False)
class Lesson:
    """A sequence of tokens, and for each token whether it is learned."""

    line: int
    tokens: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def count(self) -> int:
        """The number of learned tokens; the first token is never learned, as nothing predicts it."""
        return int(self.learned[1:].sum())

    def datum(self, weight: float) -> Datum:
        """Each token predicts the next one; learned tokens have this `weight` in the loss, others 0."""
        from tinkex.types import Datum, ModelInput

        return Datum(
            model_input=ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": self.tokens[1:].astype(np.int64),
                "weights": self.learned[1:].astype(np.float32) * np.float32(weight),
            },
        )


# -- reading ----------------------------------------------------------------------------------------


def find_data(name: str) -> Path:
    """The path of a data file; `tolmery` is the bundled one, unless a file has that name."""
    path = Path(name)
    if not path.exists() and name == _BUNDLED:
        return Path(str(files("tinkex.data").joinpath("tolmery.jsonl")))
    if not path.is_file():
        raise InvalidInputError(f"there is no file {name}", field="data")
    return path


def read_records(path: Path) -> list[DataLine]:
    """All lines of a file; the error for an unreadable line names its number."""
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                records.append(_record(number, line))
            except InvalidInputError as error:
                raise InvalidInputError(
                    f"{path}, line {number}: {error.args[0]}", field="data"
                ) from None
    if not records:
        raise InvalidInputError(f"{path} holds no examples", field="data")
    return records


def _record(number: int, line: bytes) -> DataLine:
    try:
        content = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"is not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"is not JSON: {error.msg} at column {error.colno}; {_WHOLE_LINES}"
        ) from None
    except ValueError:
        raise InvalidInputError("has a number of thousands of digits") from None
    except RecursionError:
        raise InvalidInputError("has thousands of objects or lists inside each other") from None
    if not isinstance(content, dict):
        raise InvalidInputError(f"is not a JSON object but {_kind(content)}; {_WHOLE_LINES}")
    split = _split(content.get("split"))
    if "messages" in content:
        return DataLine(number, _messages(content["messages"]), split)
    for asked, answered in _PAIRS:
        if asked in content or answered in content:
            prompt, completion = (_text(content, name) for name in (asked, answered))
            if not completion:
                raise InvalidInputError(f'"{answered}" is empty; nothing can be learned from it')
            pair = ({"role": "user", "content": prompt},)
            reply = {"role": "assistant", "content": completion}
            return DataLine(number, (*pair, reply), split, "pair")
    if "text" in content:
        text = _text(content, "text")
        if not text:
            raise InvalidInputError('"text" is empty; nothing can be learned from it')
        return DataLine(number, ({"role": "assistant", "content": text},), split, "text")
    known = ", ".join(map(repr, content)) or "nothing"
    raise InvalidInputError(
        f'needs "messages", or "prompt" and "completion", or "text"; it has {known:.200}'
    )


def _messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise InvalidInputError('"messages" must be a list of messages')
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidInputError(f"messages.{index} is not an object but {_kind(message)}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise InvalidInputError(
                    f'messages.{index} needs a "{name}" that is text, not {_kind(message.get(name))}'
                )
            _check_characters(message[name], f"messages.{index}.{name}")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise InvalidInputError("has no message of the assistant; nothing can be learned from it")
    return tuple(messages)


def _text(content: dict[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise InvalidInputError(f'needs a "{name}" that is text, not {_kind(value)}')
    _check_characters(value, name)
    return value


def _check_characters(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise InvalidInputError(
            f'"{name}" has {half}, half of a character without its other half'
        ) from None


def _split(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in _SPLITS:
        raise InvalidInputError(f'"split" must be one of {", ".join(_SPLITS)}, not {value!r:.80}')
    return _SPLITS[value]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


# -- tokens -----------------------------------------------------------------------------------------


def lessons_of(record: DataLine, tokenizer: Any, system: str | None = None) -> Iterator[Lesson]:
    """A conversation as one sequence in which the assistant's messages are learned.

    Some templates write a message differently once others follow. Each such message becomes a separate sequence.
    """
    messages = list(record.messages)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tokens: list[int] = []
    learned: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not message["content"]:
            continue
        try:
            prompt, answer = answer_of(tokenizer, messages[:index], message)
        except InvalidInputError as error:
            raise InvalidInputError(f"line {record.line}: {error.args[0]}", field="data") from error
        if tokens and prompt[: len(tokens)] != tokens:
            yield _lesson(record.line, tokens, learned)
            tokens, learned = [], []
        learned += [False] * (len(prompt) - len(tokens)) + [True] * len(answer)
        tokens = prompt + answer
    yield _lesson(record.line, tokens, learned)


def plain_lessons(record: DataLine, tokenizer: Any) -> Iterator[Lesson]:
    """A pair or a text without a chat template: the prompt of a pair, what is learned, the end token."""
    if record.form == "conversation":
        raise InvalidInputError(
            f"line {record.line}: a conversation needs a chat template; pairs and texts work without one",
            field="data",
        )
    *asked, answered = (message["content"] for message in record.messages)
    # The tokenizer puts its token for the beginning, if it has one, before a text too.
    prompt = list(tokenizer.encode("".join(asked)))
    completion = tokenizer.encode(answered, add_special_tokens=False)
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answer = [*completion, *ends]
    lesson = _lesson(record.line, prompt + answer, [False] * len(prompt) + [True] * len(answer))
    if not lesson.count:
        raise InvalidInputError(
            f"line {record.line}: the example is a single token, so nothing predicts it",
            field="data",
        )
    yield lesson


def _lesson(line: int, tokens: list[int], learned: list[bool]) -> Lesson:
    return Lesson(line, np.array(tokens, np.int32), np.array(learned, np.bool_))


# -- lengths ----------------------------------------------------------------------------------------


def within(
    lessons: Sequence[Lesson], limit: int | None, too_long: str
) -> tuple[list[Lesson], str | None]:
    """The lessons that fit, and a note on the others: refused, truncated, or skipped.

    A lesson is also skipped if truncating it removes all learned tokens.
    """
    if limit is None:
        return list(lessons), None
    beyond = [lesson for lesson in lessons if lesson.length > limit]
    if not beyond:
        return list(lessons), None
    named = ", ".join(f"line {lesson.line} ({lesson.length})" for lesson in beyond[:_NAMED])
    more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
    told = f"{len(beyond)} of {len(lessons)} examples are longer than {limit} tokens: {named}{more}"
    if too_long == "refuse":
        raise InvalidInputError(
            f"{told}; --too-long truncate shortens them, --too-long skip drops them", field="data"
        )
    if too_long == "skip":
        kept = [lesson for lesson in lessons if lesson.length <= limit]
        return kept, f"{told}; they are skipped"
    cut = [lesson if lesson.length <= limit else _cut(lesson, limit) for lesson in lessons]
    kept = [lesson for lesson in cut if lesson.count]
    lost = len(lessons) - len(kept)
    return kept, f"{told}; they are truncated" + (f", {lost} of them skipped" if lost else "")


def _cut(lesson: Lesson, limit: int) -> Lesson:
    return replace(lesson, tokens=lesson.tokens[:limit], learned=lesson.learned[:limit])
