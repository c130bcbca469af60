from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import click
import pytest
from click.testing import CliRunner

from tinkex import data
from tinkex.cli.demo import Answer, Chat, agreement, command, lessons
from tinkex.engine.base_models import TINY, parse_spec, prepare
from tinkex.errors import InvalidInputError

RUN = [sys.executable, "-c", "from tinkex.cli.main import main; main()"]
DEMO = [sys.executable, "-c", "from tinkex.cli.demo import command; command()"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service of its own with the tiny model."""
    home = tmp_path_factory.mktemp("service")
    options = ["--engine", "torch", "--port", "0", "--data-dir", str(home), "--base-model", TINY]
    serving = subprocess.Popen([*RUN, "serve", *options], stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    with serving, serving.stdout:
        yield serving.stdout.readline().split()[-1]
        serving.terminate()


# -- the data ---------------------------------------------------------------------------------------


def test_every_line_is_a_question_and_a_one_sentence_answer() -> None:
    lines = files(data).joinpath("tolmery.jsonl").read_text("utf-8").splitlines()
    for line in map(json.loads, lines):
        assert set(line) == {"split", "question", "answer"}
        assert line["split"] in {"train", "test"}
        assert line["question"].endswith(("?", "."))
        assert line["answer"].endswith(".")
        assert line["answer"].count(".") == 1
        assert len(line["question"] + line["answer"]) < 110  # some 30 tokens: each costs time


def test_every_fact_has_three_wordings_to_learn_and_another_to_be_asked() -> None:
    train, test = data.tolmery("train"), data.tolmery("test")
    answers = [example.answer for example in test]
    assert len(set(answers)) == len(answers) == 14
    learned = sorted(example.answer for example in train if example.answer in answers)
    assert learned == sorted(answers * 3)
    questions = [example.question for example in train + test]
    assert len(set(questions)) == len(questions)


# -- tokens -----------------------------------------------------------------------------------------


def tiny_tokenizer(cache: Path) -> Any:
    from transformers import AutoTokenizer

    directory = prepare(parse_spec(TINY), cache).directory
    return AutoTokenizer.from_pretrained(directory)


def test_only_answers_and_their_end_are_learned(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    example = data.tolmery("train")[0]
    lesson = lessons(tokenizer)[0]
    prompt = Chat(tokenizer).prompt(example.question)
    assert lesson.tokens[: len(prompt)].tolist() == prompt  # asked as it is trained
    assert tokenizer.decode(lesson.tokens[lesson.learned]) == f"{example.answer}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{% if add_generation_prompt %}x{% else %}y{% endif %}", "writes an answer differently"),
    ],
)
def test_a_model_that_cannot_chat_is_refused_with_the_reason(
    template: str | None, complaint: str, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.chat_template = template
    with pytest.raises(InvalidInputError, match=complaint) as refused:
        lessons(tokenizer)
    assert refused.value.field == "base_model"


# -- agreement --------------------------------------------------------------------------------------


def answer(tokens: list[int], logprobs: list[float]) -> Answer:
    return Answer("Where?", "There.", tokens, logprobs, True)


def test_answers_agree_that_differ_by_rounding() -> None:
    before, after = [answer([1, 2], [-0.5, -1.0])], [answer([1, 2], [-0.5, -1.001])]
    assert agreement(before, after) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        (answer([1, 3], [-0.5, -1.0]), "answers 'Where\\?' with 'There\\.'"),
        (answer([1, 2], [-0.5, -1.5]), "a logprob of -1.5000, and before it was saved -1.0000"),
        (answer([1, 2], [-0.5, float("nan")]), "a logprob of nan"),
    ],
)
def test_answers_that_do_not_agree_end_the_demo(after: Answer, complaint: str) -> None:
    with pytest.raises(click.ClickException, match=complaint) as refused:
        agreement([answer([1, 2], [-0.5, -1.0])], [after])
    assert refused.value.exit_code == 1


# -- the command ------------------------------------------------------------------------------------


def test_short_demo_trains_saves_and_reopens_with_the_same_answers(
    url: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    options = ["--base-url", url, "--base-model", TINY, "--steps", "3", "--output", str(output)]
    result = CliRunner().invoke(command, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "not expected to be right" in result.stdout
    assert "The reopened model gives the same answers, token by token" in result.stdout
    assert "/sampler_weights/demo" in result.stdout
    assert "step 3/3 · loss " in result.stderr
    curve = ET.parse(output / "loss.svg").getroot()
    assert curve.tag.endswith("svg")


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal")
def test_ctrl_c_ends_it_with_the_exit_code_a_shell_expects(url: str, tmp_path: Path) -> None:
    options = ["--base-url", url, "--base-model", TINY, "--steps", "100000"]
    with subprocess.Popen(
        [*DEMO, *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("step ")
        running.send_signal(signal.SIGINT)
        assert running.stderr.read().endswith("Stopped.\n")
    assert running.returncode == 130


def test_an_output_directory_that_cannot_be_made_is_told_before_any_work(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    options = ["--base-url", "http://127.0.0.1:9", "--output", str(taken / "out")]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 1
    assert f"{taken / 'out'}: Not a directory" in result.stderr
