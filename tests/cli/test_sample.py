"""`tinkex sample`, and `tinkex run` as the Elixir command line has it; and the three ways to name a service."""

from __future__ import annotations

import json

import pytest

from .commands import payload, process, run
from .conftest import TINY

SHORT = ["--base-model", TINY, "--max-tokens", 4, "--seed", 7]


def quick(here, *options, **more):
    return payload("sample", here.quick("sample", *SHORT, *options, "--json", **more))


def test_from_a_prompt_for_people(here):
    outcome = here.type("sample", *SHORT, "--prompt", "Hello", "--num-samples", 2)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("Sample 1:\n")
    assert "\nSample 2:\n" in outcome.out
    assert outcome.out.count("stop_reason=") == 2
    assert "avg_logprob=-" in outcome.out
    assert "Sampling from" in outcome.err


def test_from_a_prompt_a_file_and_token_ids_alike(here, tmp_path):
    spoken = here.ask("sample", *SHORT, "--prompt", "Hello")
    (sequence,) = spoken["sequences"]
    assert len(sequence["tokens"]) == len(sequence["logprobs"]) == 4
    assert isinstance(sequence["text"], str)
    file = tmp_path / "prompt"
    for content in ("Hello", json.dumps(list(b"Hello")), json.dumps({"tokens": list(b"Hello")})):
        file.write_text(content)
        (again,) = quick(here, "--prompt-file", file)["sequences"]
        assert again["tokens"] == sequence["tokens"]
    piped = here.type(
        "run", *SHORT, "--prompt-file", "-", "--json", input="[72, 101, 108, 108, 111]"
    )
    assert payload("run sample", piped)["sequences"][0]["tokens"] == sequence["tokens"]


def test_from_a_checkpoint_into_a_file(here, tmp_path):
    path = here.trained().save_weights_for_sampler("drawn").result().path
    file = tmp_path / "deep" / "out.json"
    outcome = here.quick(
        "sample",
        "--model-path",
        path,
        "--prompt",
        "x",
        "--max-tokens",
        2,
        "--json",
        "--output",
        file,
    )
    assert (outcome.code, outcome.out) == (0, "")
    assert len(json.loads(file.read_text())["sequences"][0]["tokens"]) <= 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base-model", TINY],
        ["--base-model", TINY, "--prompt", "x", "--prompt-file", __file__],
        ["--prompt", "x"],
        ["--base-model", TINY, "--prompt", "x", "--temperature", -1],
        ["--base-model", TINY, "--prompt", "x", "--num-samples", 0],
        ["--base-model", TINY, "--prompt-file", "/no/such/file"],
    ],
)
def test_wrong_options_exit_with_2(arguments):
    assert run("sample", *arguments).code == 2


def test_invalid_input_is_reported(here, tmp_path):
    def told(*options, model=TINY):
        outcome = here.quick("sample", "--base-model", model, *options)
        assert (outcome.code, outcome.out) == (1, "")
        return outcome.err

    assert "context" in told("--prompt", "x" * 100_000)
    assert "no/such" in told("--prompt", "x", model="no/such")
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in told("--prompt-file", file)
    file.write_text('[1, "two"]')
    assert "not token ids" in told("--prompt-file", file)
    file.write_text("[999999]")
    assert "999999" in told("--prompt-file", file)
    unwritable = tmp_path / "prompt" / "out"
    assert "prompt" in told("--prompt", "x", "--max-tokens", 1, "--output", unwritable)


def test_every_way_to_name_a_service_is_the_same(here):
    """A URL, `local`, and either in the environment."""
    local = {"TINKEX_DATA_DIR": str(here.data_dir), "TINKER_API_KEY": ""}
    ways = [
        (["--base-url", here.url], {}),
        (["--base-url", "local"], local),
        ([], {"TINKER_BASE_URL": here.url}),
        ([], {"TINKER_BASE_URL": "local", **local}),
    ]
    totals = []
    for options, settings in ways:
        listed = process("run", "list", "--limit", 1, "--json", *options, **settings)
        totals.append(payload("run list", listed)["total"])
    assert totals == totals[:1] * 4
    sampled = process("sample", *SHORT, "--prompt", "x", "--json", "--base-url", "local", **local)
    assert payload("sample", sampled)["sequences"]
