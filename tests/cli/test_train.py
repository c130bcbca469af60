"""`tinkex train` against real services: one that really trains, and one with the fake engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from pydantic import BaseModel, ConfigDict

from tinkex.cli.lessons import Lesson
from tinkex.cli.run_file import RunSettings, RunState
from tinkex.cli.training_loop import Trainer

from .commands import PROGRAM, environment, payload, process, run

TINY = "tinkex/tiny"
WORDS = ["one", "two", "six", "ten"]


@pytest.fixture
def data(tmp_path):
    """Short questions that all have the same answer, which a model learns quickly."""
    file = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{word}?", "completion": "aha"} for word in WORDS * 2]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def train(running, data, output, *options):
    given = ["--base-model", TINY, "--rank", 4, "--learning-rate", 0.01, "--batch-size", 2]
    where = ["--base-url", running.url, "--output", output, "--format", "json"]
    return run("train", data, *given, *where, *options)


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Losses(Forbidding):
    first: float | None
    last: float | None


class HeldOut(Forbidding):
    before: float | None
    after: float | None


class Summary(Forbidding):
    """The complete summary: an added or missing field is a change for programs that read it."""

    status: str
    base_model: str
    model_id: str
    steps: int
    steps_planned: int
    examples: dict[str, int]
    notes: list[str]
    tokens: int
    usage: dict[str, int]
    cost: float | None
    seconds: float
    loss: Losses
    held_out_loss: HeldOut
    evaluations: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]
    training_path: str | None
    sampler_path: str | None
    resumed_from: str | None
    loss_curve: str
    run_file: str
    settings: dict[str, Any]


# -- with a model that learns -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tinkex_tiny, tmp_path_factory):
    """A run of six steps with a checkpoint after the third, and its results."""
    place = tmp_path_factory.mktemp("trained")
    data = place / "data.jsonl"
    lines = [{"prompt": f"{word}?", "completion": "aha"} for word in WORDS * 2]
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    options = ["--steps", 6, "--save-every", 3, "--eval-every", 2, "--eval-fraction", 0.25]
    outcome = train(tinkex_tiny, data, place / "run", "--schedule", "cosine", *options)
    assert outcome.code == 0, outcome.err
    return place, data, outcome


def test_training_lowers_the_loss_on_what_was_held_out(trained):
    place, _, outcome = trained
    summary = Summary.model_validate_json(outcome.out)
    before, after = summary.held_out_loss.before, summary.held_out_loss.after
    assert before is not None
    assert after is not None
    assert after < 0.9 * before
    assert summary.status == "finished"
    assert summary.examples == {"train": 6, "held_out": 2}
    assert [one["step"] for one in summary.evaluations] == [0, 2, 4, 6]
    assert [one["step"] for one in summary.checkpoints] == [3, 6]
    assert "step 6/6 · loss" in outcome.err
    drawing = ET.parse(place / "run" / "loss.svg").getroot()
    assert drawing.tag.endswith("svg")
    recorded = json.loads((place / "run" / "run.json").read_text())
    assert recorded["status"] == "finished"
    assert len(recorded["losses"]) == 6


def test_run_resumed_from_a_checkpoint_equals_an_uninterrupted_run(trained, tinkex_tiny, tmp_path):
    place, _, outcome = trained
    whole = json.loads(outcome.out)
    shutil.copytree(place / "run", tmp_path / "again")
    middle = whole["checkpoints"][0]["path"]
    where = ["--base-url", tinkex_tiny.url, "--output", tmp_path / "again", "--eval-every", 2]
    resumed = run("train", "--resume", middle, *where, "--json")
    assert resumed.code == 0, resumed.err
    again = json.loads(resumed.out)
    assert again["resumed_from"] == middle
    assert again["model_id"] != whole["model_id"]
    assert again["held_out_loss"] == whole["held_out_loss"]
    assert again["evaluations"] == whole["evaluations"]
    losses = [
        json.loads((one / "run.json").read_text())["losses"]
        for one in (place / "run", tmp_path / "again")
    ]
    assert losses[0] == losses[1]


def test_a_run_keeps_its_settings_and_its_data(trained, tinkex_tiny, tmp_path):
    place, data, _ = trained
    shutil.copytree(place / "run", tmp_path / "run")
    where = ["--resume", tmp_path / "run", "--base-url", tinkex_tiny.url]
    other = run("train", *where, "--learning-rate", 0.5, "--batch-size", 2)
    assert other.code == 1
    assert "learning_rate was 0.01, not 0.5" in other.err
    assert "batch_size" not in other.err
    changed = tmp_path / "data.jsonl"
    changed.write_text(data.read_text() + '{"prompt": "x", "completion": "y"}\n')
    assert "has changed since the run started" in run("train", changed, *where).err
    unknown = ["--resume", "tinker://other/weights/x", "--output", tmp_path / "run"]
    assert "is not a checkpoint of the run" in run("train", *unknown).err
    done = run("train", *where, "--json")
    assert done.code == 0
    assert "nothing is left to do" in done.err
    assert json.loads(done.out)["status"] == "finished"


# -- with one that only seems to --------------------------------------------------------------------


def test_interrupted_run_resumes_to_the_same_result(tinkex_fake, tmp_path):
    client = tinkex_fake.client()
    lessons = [lesson(n) for n in range(4)]
    plan = [[0, 1], [2, 0], [1], [2, 1], [0, 2]]

    def fresh() -> RunState:
        return RunState(RunSettings("data", TINY, learning_rate=0.1), "sha")

    def trainer(model, record, **options) -> Trainer:
        return Trainer(model, record, lessons[:3], lessons[3:], plan, **options)

    whole = fresh()
    assert trainer(client.create_lora_training_client(TINY, rank=4, seed=1), whole).train()

    stopped, model = fresh(), client.create_lora_training_client(TINY, rank=4, seed=1)
    options: dict[str, Any] = {"keep": lambda: stopped.write(tmp_path)}
    assert not trainer(model, stopped, stopped=lambda: stopped.step >= 2, **options).train()
    read = RunState.read(tmp_path / "run.json")
    assert read == stopped
    assert read.last is not None
    assert 2 <= read.last.step == read.step < 5
    assert read.sampler_path is None

    read.back_to(read.last)
    again = client.create_training_client_from_state_with_optimizer(read.last.path)
    assert trainer(again, read).train()
    assert read.losses == whole.losses
    assert read.evaluations == whole.evaluations
    assert read.sampler_path is not None


def lesson(number) -> Lesson:
    import numpy as np

    tokens = np.array([number, 7, 8, number + 1], np.int32)
    return Lesson(number, tokens, np.array([False, False, True, True]))


def test_ctrl_c_saves_a_checkpoint_and_prints_the_resume_command(tinkex_fake, data, tmp_path):
    output = tmp_path / "my run"
    options = ["--base-url", tinkex_fake.url, "--output", output, "--steps", 20_000]
    command = [*PROGRAM, "train", data, "--base-model", TINY, *options]
    with subprocess.Popen(
        [str(part) for part in command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as training:
        assert training.stderr is not None
        said, asked = [], False
        for line in training.stderr:
            said.append(line)
            if not asked and line.startswith("step ") and not line.startswith("step 0/"):
                training.send_signal(signal.SIGINT)
                asked = True
    assert training.returncode == 130, said
    recorded = RunState.read(output / "run.json")
    assert recorded.status == "interrupted"
    assert recorded.last is not None
    assert recorded.last.step == recorded.step
    assert said[-1].startswith(
        f"Saved after step {recorded.step}. Resume with: tinkex train --resume '"
    )
    assert tinkex_fake.url in said[-1]
    assert (output / "loss.svg").exists()


def test_packing_fills_steps_by_tokens_and_the_summary_is_readable(tinkex_fake, data, tmp_path):
    where = ["--base-url", tinkex_fake.url, "--output", tmp_path / "run"]
    options = ["--packing", "--batch-tokens", 100, "--epochs", 1, "--eval-fraction", 0]
    told = run("train", data, "--base-model", TINY, *where, *options)
    assert told.code == 0, told.err
    assert "finished, 3 of 3 steps" in told.out  # three of some thirty tokens fit into a hundred
    assert "Held out" not in told.out
    assert "tinker://" in told.out


def test_lines_of_text_are_learned_without_a_template(tinkex_fake, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "Once upon a time."}\n{"text": "The end."}\n')
    where = ["--base-url", tinkex_fake.url, "-o", tmp_path / "run"]
    told = run("train", file, "--base-model", TINY, "--eval-fraction", 0, "--json", *where)
    assert told.code == 0, told.err
    bytes_and_ends = len("Once upon a time.") + len(
        "The end."
    )  # each byte and the end, less the first
    assert json.loads(told.out)["tokens"] == bytes_and_ends * 3


def test_the_name_of_a_file_may_be_any_bytes(tinkex_fake, data, tmp_path):
    named = data.rename(tmp_path / os.fsdecode(b"\xe9t\xe9.jsonl"))
    told = train(tinkex_fake, named, tmp_path / "run", "--steps", 1)
    assert told.code == 0, told.err
    summary = json.loads(told.out)
    assert summary["settings"]["data"] == str(named)
    shown = tinkex_fake.client().http.get(f"/local/runs/{summary['model_id']}").result()
    assert shown["name"] == "?t?"


@pytest.mark.parametrize("address", ["local", None])
def test_run_on_the_service_of_this_machine_is_shown_in_the_dashboard(
    address, tinkex_fake, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tinkex_fake.data_dir))
    where = ["--base-url", address or tinkex_fake.url, "--output", tmp_path / "run"]
    told = run("train", data, "--base-model", TINY, "--steps", 1, "--json", *where)
    summary = json.loads(told.out)
    assert f"{tinkex_fake.url}/#/run/{summary['model_id']}" in told.err
    shown = tinkex_fake.client().http.get(f"/local/runs/{summary['model_id']}").result()
    assert shown["name"] == data.stem


def test_run_on_another_service_names_no_dashboard(tinkex_fake, data, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "empty"))
    where = ["--base-url", tinkex_fake.url, "--output", tmp_path / "run"]
    told = run("train", data, "--base-model", TINY, "--steps", 1, *where)
    assert told.code == 0, told.err
    assert "#/run/" not in told.err


# -- what it costs ------------------------------------------------------------------------------------


def test_dry_run_predicts_the_usage_of_the_run_and_trains_nothing(tinkex_fake, data, tmp_path):
    output = tmp_path / "run"
    options = ["--steps", 5, "--eval-every", 2, "--eval-fraction", 0.25, "--price", "training=2"]
    rest = tinkex_fake.client().create_rest_client()
    runs = rest.list_training_runs().result().cursor
    dry = train(tinkex_fake, data, output, *options, "--dry-run")
    expected = payload("train", dry)
    assert expected["status"] == "dry run"
    assert (expected["steps"], expected["steps_planned"]) == (0, 5)
    assert not output.exists()
    assert rest.list_training_runs().result().cursor == runs
    done = train(tinkex_fake, data, output, *options)
    summary = Summary.model_validate(payload("train", done))
    assert expected["tokens"] == summary.tokens
    assert expected["usage"] == summary.usage
    assert summary.usage["training"] > summary.tokens  # evaluations read tokens too
    assert expected["cost"] == summary.cost == pytest.approx(summary.usage["training"] * 2e-6)
    # A second dry run works although the directory holds a run, and does not change it.
    again = train(tinkex_fake, data, output, *options, "--dry-run")
    assert json.loads(again.out) == expected
    assert RunState.read(output / "run.json").status == "finished"


def test_dry_run_of_a_resumed_run_prices_only_remaining_steps(trained, tinkex_tiny, tmp_path):
    place, _, outcome = trained
    whole = json.loads(outcome.out)
    shutil.copytree(place / "run", tmp_path / "again")
    middle = whole["checkpoints"][0]["path"]
    where = ["--base-url", tinkex_tiny.url, "--output", tmp_path / "again", "--eval-every", 2]
    recorded = (tmp_path / "again" / "run.json").read_text()
    dry = run("train", "--resume", middle, *where, "--json", "--dry-run")
    assert dry.code == 0, dry.err
    assert (tmp_path / "again" / "run.json").read_text() == recorded
    expected = json.loads(dry.out)
    assert (expected["steps"], expected["steps_planned"], expected["cost"]) == (3, 6, None)
    resumed = json.loads(run("train", "--resume", middle, *where, "--json").out)
    # Usage of earlier attempts still counts, even if the steps are repeated.
    assert resumed["usage"]["training"] == (
        whole["usage"]["training"] + expected["usage"]["training"]
    )


def test_table_shows_costs(tinkex_fake, data, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text(f'["{TINY}"]\ntraining = 1000')
    where = ["--base-url", tinkex_fake.url, "--output", tmp_path / "run", "--prices", prices]
    command = ["train", data, "--base-model", TINY, "--steps", 2, *where]
    dry = run(*command, "--dry-run")
    assert dry.code == 0, dry.err
    assert "Run:     2 steps on 7 examples, 1 held out\n" in dry.out
    cost = re.search(r"^Cost: +(\$\d+\.\d+)$", dry.out, re.MULTILINE)
    assert cost is not None
    done = run(*command)
    assert re.search(rf"^Cost: +{re.escape(cost[1])}$", done.out, re.MULTILINE), done.out
    unknown = run(*command[:-2], "--dry-run")
    assert "unknown; see --prices" in unknown.out


@pytest.mark.parametrize("price", ["training", "training=x", "writing=1", "training=-1"])
def test_invalid_price_is_refused(tinkex_fake, data, tmp_path, price):
    refused = train(tinkex_fake, data, tmp_path / "run", "--dry-run", "--price", price)
    assert refused.code != 0
    assert "training" in refused.err


def test_directory_with_a_run_is_overwritten_only_with_overwrite(tinkex_fake, data, tmp_path):
    output = tmp_path / "run"
    assert train(tinkex_fake, data, output, "--resume", "auto", "--steps", 1).code == 0
    refused = train(tinkex_fake, data, output, "--steps", 1)
    assert refused.code == 1
    assert "--resume auto resumes it" in refused.err
    assert train(tinkex_fake, data, output, "--steps", 2, "--overwrite").code == 0
    assert RunState.read(output / "run.json").step == 2


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ([], 1, "1 of 8 examples are longer than 40 tokens: line 3 ("),
        (["--too-long", "skip"], 0, "they are skipped"),
        (["--too-long", "truncate"], 0, "they are truncated"),
    ],
)
def test_examples_that_are_too_long_are_counted_and_named(
    tinkex_fake, data, tmp_path, options, code, says
):
    lines = data.read_text().splitlines()
    lines[2] = json.dumps({"prompt": "?", "completion": "a" * 40})
    data.write_text("\n".join(lines))
    limits = ["--max-length", 40, "--eval-fraction", 0, "--steps", 1, *options]
    outcome = train(tinkex_fake, data, tmp_path / "run", *limits)
    assert outcome.code == code
    assert says in outcome.err
    if code == 0:
        summary = Summary.model_validate_json(outcome.out)
        assert summary.notes
        assert summary.examples["train"] == (7 if "skip" in options else 8)


def test_more_tokens_than_the_context_are_refused_too(tinkex_fake, data, tmp_path):
    data.write_text(json.dumps({"prompt": "?", "completion": "a" * 3000}))
    outcome = train(tinkex_fake, data, tmp_path / "run")
    assert outcome.code == 1
    assert "longer than 2048 tokens" in outcome.err


def test_missing_arguments_are_named(data, tmp_path):
    assert run("train", data).code == 2
    assert run("train", "--base-model", TINY).code == 2
    assert run("train", data, "--base-model", TINY, "--batch-tokens", 5).code == 2
    missing = run("train", "--resume", tmp_path / "nowhere")
    assert missing.code == 1
    assert "there is no" in missing.err
    (tmp_path / "run.json").write_text('{"format": 1}')
    assert "is not the record of a run" in run("train", "--resume", tmp_path).err


def test_a_broken_line_is_one_line_on_stderr_and_nothing_else(data, tmp_path):
    data.write_text(data.read_text() + '{"prompt": "x", "completion": 7}\n')
    where = ["--base-url", "http://127.0.0.1:9", "--output", tmp_path / "run"]
    outcome = process("train", data, "--base-model", TINY, *where)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.strip().endswith('line 9: needs a "completion" that is text, not a number')
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_is_missing_to_start_a_run_is_named(data, tmp_path):
    no_model = run("train", data, "--output", tmp_path / "run")
    no_data = run("train", "--base-model", TINY, "--output", tmp_path / "run")
    assert (no_model.code, no_data.code) == (2, 2)
    assert "give --base-model" in no_model.err
    assert "`tinkex model list`" in no_model.err
    assert "give DATA" in no_data.err
    assert "--base-model" not in no_data.err
