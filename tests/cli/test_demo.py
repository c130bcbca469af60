from __future__ import annotations

import json
import os
import pty
import re
import shutil
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

import tinkex
from tinkex import data
from tinkex.cli.addresses import Addresses
from tinkex.cli.demo import Chat, DemoAnswer, agreement, command, lessons
from tinkex.engine.base_models import TINY, parse_spec, prepare
from tinkex.errors import InvalidInputError

from .commands import PROGRAM, environment

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


def answer(tokens: list[int], logprobs: list[float]) -> DemoAnswer:
    return DemoAnswer("Where?", "There.", tokens, logprobs, True)


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
def test_answers_that_do_not_agree_end_the_demo(after: DemoAnswer, complaint: str) -> None:
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
def test_ctrl_c_ends_the_demo_with_the_exit_code_a_shell_expects(url: str, tmp_path: Path) -> None:
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


def test_output_directory_that_cannot_be_created_fails_before_any_work(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    options = ["--base-url", "http://127.0.0.1:9", "--output", str(taken / "out")]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 1
    assert f"{taken / 'out'}: Not a directory" in result.stderr


# -- the end: an open door ----------------------------------------------------------------------------

SHORT = ["demo", "--base-model", TINY, "--steps", "1", "--output", "out"]
PROMPT = "Press any key to stop the service."


class OnTerminal:
    """The demo with a terminal as stdin and stdout; its notes go through a pipe."""

    def __init__(self, home: Path, **settings: str) -> None:
        self._ours, theirs = pty.openpty()
        surroundings = environment(TINKEX_DATA_DIR=str(home / "data"))
        surroundings.pop("CI", None)
        self.process = subprocess.Popen(
            [*PROGRAM, *SHORT],
            cwd=home,
            env=surroundings | settings,
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        os.close(theirs)
        self.stdout = ""

    def read_until_prompt(self) -> None:
        """Read both streams until the demo waits for a key or ends."""
        assert self.process.stderr is not None
        told = b""
        while PROMPT.encode() not in told and (read := os.read(self.process.stderr.fileno(), 4096)):
            told += read
        self.waits = PROMPT.encode() in told
        # The prompt is written last, so all of stdout is already in the terminal's buffer.
        while "chat/completions" not in self.stdout and (part := self._read()):
            self.stdout += part.replace("\r\n", "\n")

    def _read(self) -> str:
        try:
            return os.read(self._ours, 1 << 16).decode()
        except OSError:  # Linux reports a terminal without a writer as an error
            return ""

    def press(self, key: bytes) -> int:
        os.write(self._ours, key)
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self._ours)


def test_trained_model_answers_until_a_key_is_pressed(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the printed command needs curl")
    demo = OnTerminal(tmp_path)
    try:
        demo.read_until_prompt()
        assert demo.waits
        (run_id,) = set(re.findall(r"/#/run/(\S+)", demo.stdout))
        (base_url,) = re.findall(r"for OpenAI clients +(\S+)", demo.stdout)
        with tinkex.ServiceClient(base_url=base_url.removesuffix("/v1"), api_key="tml-x") as client:
            history = client.http.get(f"/local/runs/{run_id}").result()
        assert history["name"] == "Tolmery"
        asked = subprocess.run(
            ["bash", "-c", demo.stdout[demo.stdout.index("curl ") :]],
            capture_output=True,
            check=True,
            env=environment(),
        )
        answer = json.loads(asked.stdout)
        assert answer["model"].endswith("/sampler_weights/demo")
        assert answer["choices"][0]["message"]["content"]
        assert demo.press(b"x") == 0
    finally:
        demo.close()


def test_demo_ends_by_itself_in_ci_even_on_a_terminal(tmp_path: Path) -> None:
    demo = OnTerminal(tmp_path, CI="true")
    try:
        demo.read_until_prompt()
        assert not demo.waits
        assert "What to try next" in demo.stdout
        assert demo.process.wait() == 0
    finally:
        demo.close()


def test_demo_ends_by_itself_without_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, *SHORT, "--base-url", "local"],
        cwd=tmp_path,
        env=environment(TINKEX_DATA_DIR=str(tmp_path / "data")),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Watch it in a browser: http://127.0.0.1:" in done.stderr
    assert "curl" not in done.stdout  # nothing answers any more
    assert PROMPT not in done.stderr


def test_command_for_curl_survives_quotes_in_the_question() -> None:
    messages = [{"role": "user", "content": "What does Tolmery's flag show?"}]
    line = Addresses("http://127.0.0.1:9", "run").curl("model", messages, 7)
    script = f'curl() {{ printf "%s\\n" "$@"; }}\n{line}'
    arguments = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert arguments[0] == "http://127.0.0.1:9/v1/chat/completions"
    assert json.loads(arguments[-1])["messages"] == messages
