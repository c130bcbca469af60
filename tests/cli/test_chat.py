"""`tinkex chat`, scripted through its standard input."""

from __future__ import annotations

import json
import os
import pty
import subprocess

import pytest

from .commands import PROGRAM, check, environment, run

TINY = "tinkex/tiny"


@pytest.fixture(scope="module")
def checkpoint(tinkex_fake):
    training = tinkex_fake.client().create_lora_training_client(TINY, rank=4)
    return training.save_weights_for_sampler("talk").result().path


def chat(running, *options, input):
    fixed = ["--base-url", running.url, "--max-tokens", 6, "--temperature", 0, "--seed", 1]
    return run("chat", *fixed, *options, input=input)


def test_each_line_is_a_question_and_each_has_an_answer(tinkex_fake):
    script = "Hello\n\nAnd you?\n/quit\nnever\n"
    outcome = chat(tinkex_fake, TINY, "--seed", "1", input=script)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") >= 2


def test_answers_are_remembered_until_reset(tinkex_fake):
    script = "Hello\nHello\n/reset\nHello\n"
    outcome = chat(tinkex_fake, "--base-model", TINY, "--format", "json", input=script)
    assert outcome.code == 0, outcome.err
    turns = [json.loads(line) for line in outcome.out.splitlines()]
    for turn in turns:
        check("chat", turn)
    assert [turn["question"] for turn in turns] == ["Hello"] * 3
    first, second, third = (turn["answers"] for turn in turns)
    assert first == third  # the conversation in between is forgotten
    assert set(first[0]) == {"model", "text", "tokens", "stop_reason"}
    assert first[0]["model"] == TINY
    assert 1 <= first[0]["tokens"] <= 6
    assert first[0]["stop_reason"] in {"stop", "length"}
    assert second[0]["model"] == TINY


def test_a_checkpoint_is_compared_with_its_base_model(tinkex_fake, checkpoint):
    options = [checkpoint, "--compare", "base"]
    outcome = chat(tinkex_fake, *options, "--json", input="Hello\n")
    assert outcome.code == 0, outcome.err
    (turn,) = map(json.loads, outcome.out.splitlines())
    assert [answer["model"] for answer in turn["answers"]] == [checkpoint, TINY]
    # A new adapter gives the same answers as its base model.
    assert turn["answers"][0]["text"] == turn["answers"][1]["text"]
    told = chat(tinkex_fake, *options, input="Hello\n")
    assert told.out.index(f"[{checkpoint}]") < told.out.index(f"[{TINY}]")


def test_a_system_message_changes_the_prompt(tinkex_fake):
    plain = chat(tinkex_fake, "--base-model", TINY, "--json", input="Hello\n")
    told = chat(tinkex_fake, "--base-model", TINY, "--system", "Sing.", "--json", input="Hello\n")
    assert told.code == plain.code == 0


def test_wrong_arguments_of_chat_are_explained(tinkex_fake):
    assert chat(tinkex_fake, input="").code == 2
    own = chat(tinkex_fake, "--base-model", TINY, "--compare", "base", input="")
    assert own.code == 1
    assert "is a base model itself" in own.err
    unknown = chat(tinkex_fake, "--base-model", "no/such", input="Hello\n")
    assert unknown.code == 1
    assert "no/such" in unknown.err
    long = chat(tinkex_fake, "--base-model", TINY, input="x" * 5000 + "\n")
    assert long.code == 1
    assert "context" in long.err


def test_two_models_answer_side_by_side_on_a_terminal(tinkex_fake, checkpoint):
    command = [*PROGRAM, "chat", "--model-path", checkpoint, "--compare", "base"]
    options = ["--base-url", tinkex_fake.url, "--max-tokens", "6", "--seed", "1"]
    terminal, end = pty.openpty()
    try:
        with subprocess.Popen(
            [*command, *options],
            stdin=end,
            stdout=end,
            stderr=end,
            env=environment(TERM="xterm", COLUMNS="200"),
        ) as chatting:
            os.close(end)
            os.write(terminal, b"Hello\n/what\n/reset\n/quit\n")
            shown = _read_to_the_end(terminal)
    finally:
        os.close(terminal)
    assert chatting.returncode == 0, shown
    assert "/quit ends the chat" in shown
    assert "New conversation." in shown
    heads = [line for line in shown.splitlines() if checkpoint in line and TINY in line]
    assert heads


def _read_to_the_end(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how a terminal ends on Linux
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")
