"""The frame of the command line: exit codes, errors, help, completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from tinkex.cli.main import cli, run
from tinkex.cli.payloads import PAYLOADS

from ..scripted import Answer
from .commands import PROGRAM, SCHEMAS, environment, process

NOWHERE = "http://127.0.0.1:1"


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["checkpoint"], ["run", "-h"]])
def test_help_exits_with_0(arguments, capsys):
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: tinkex")
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["teleport"], "teleport"),
        (["run", "list", "--colour"], "--colour"),
        (["run", "list", "stray"], "stray"),
        (["run", "--base-url", NOWHERE, "list"], "list"),
        (["--format", "xml", "run", "list"], "xml"),
        (["checkpoint", "info"], "CHECKPOINT_PATH"),
        (["sample", "--prompt-file", "/no/such/file", "--base-model", "m"], "/no/such/file"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_mistake(arguments, named, capsys):
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert "--help" in shown.err


@pytest.mark.heavy
def test_failure_exits_with_1_and_shows_a_traceback_only_with_debug():
    command = ["checkpoint", "info", "nonsense", "--base-url", NOWHERE]
    plain = process(*command)
    assert (plain.code, plain.out) == (1, "")
    assert plain.err.startswith("Error: ")
    assert "Traceback" not in plain.err
    for debug in (["--debug", *command], [*command, "--debug"]):
        traced = process(*debug)
        assert traced.code == 1
        assert "Traceback" in traced.err


def test_temporary_error_suggests_to_try_again(server, capsys):
    server.on("GET /api/v1/sessions", Answer({"detail": "busy"}, 503))
    assert run(["session", "list", "--base-url", server.url, "--api-key", "tml-x"]) == 1
    assert "may be temporary" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    outcome = process("serve", PYTHONPATH=str(tmp_path))
    assert outcome.code == 1
    assert outcome.err == "Error: uvicorn is not installed: pip install 'tinkex[local]'\n"


def test_a_missing_key_is_explained_in_words_of_the_command_line(tmp_path):
    outcome = process("run", "list", TINKER_API_KEY="", HOME=str(tmp_path))
    assert outcome.code == 1
    problem, here, elsewhere = outcome.err.splitlines()
    assert problem == "Error: --api-key: missing"
    for way in ("--base-url local", "tinkex serve"):
        assert way in here
    for way in ("tinkex auth login", "--api-key", "TINKER_API_KEY"):
        assert way in elsewhere


def test_a_missing_key_points_to_the_service_that_runs_on_this_machine(tinkex_fake, tmp_path):
    data_dir = str(tinkex_fake.data_dir)
    outcome = process(
        "run", "list", TINKER_API_KEY="", HOME=str(tmp_path), TINKEX_DATA_DIR=data_dir
    )
    assert outcome.code == 1
    assert f"runs on this machine at {tinkex_fake.url}: --base-url local uses it" in outcome.err
    listed = process(
        *("run", "list", "--base-url", "local"),
        TINKER_API_KEY="",
        HOME=str(tmp_path),
        TINKEX_DATA_DIR=data_dir,
    )
    assert listed.code == 0, listed.err


def test_a_service_on_this_machine_needs_no_key(server, tmp_path):
    server.on("GET /api/v1/sessions", Answer({"sessions": ["s-1"]}))
    outcome = process(
        "session", "list", "--base-url", server.url, TINKER_API_KEY="", HOME=str(tmp_path)
    )
    assert (outcome.code, outcome.out.split()[-1]) == (0, "s-1"), outcome.err


@pytest.mark.parametrize(
    "command",
    [
        ["run", "list"],
        pytest.param(["run", "--prompt", "x", "--base-model", "m"], marks=pytest.mark.heavy),
        pytest.param(["train", "tolmery", "--base-model", "m"], marks=pytest.mark.heavy),
        pytest.param(["chat", "m"], marks=pytest.mark.heavy),
    ],
)
def test_a_service_that_is_down_is_named_by_its_url(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([*command, "--base-url", NOWHERE, "--api-key", "tml-x"]) == 1
    told = capsys.readouterr().err
    assert f"Error: {NOWHERE} cannot be reached: " in told
    assert "tinkex serve" in told
    assert "giving up after try 11" not in told  # only long work retries that often


def test_a_refused_key_is_named_with_its_service(server, capsys):
    server.on("GET /api/v1/sessions", Answer({"detail": "Invalid key."}, 401))
    assert run(["session", "list", "--base-url", server.url, "--api-key", "tml-x"]) == 1
    told = capsys.readouterr().err
    assert f"{server.url} refuses the key" in told
    assert "tinkex auth login" in told


def test_closed_pipe_causes_no_traceback():
    with subprocess.Popen(
        [*PROGRAM, "checkpoint", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as leaving:
        assert leaving.stdout is not None
        assert leaving.stderr is not None
        leaving.stdout.close()
        assert b"Traceback" not in leaving.stderr.read()


# -- the form of the output ------------------------------------------------------------------------


def leaves(command: click.Command, *path: str):
    ctx = click.Context(command, **command.context_settings)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from leaves(below, *path, name)
    else:
        yield " ".join(path), command


def test_every_command_with_json_output_has_a_schema():
    can = {
        name
        for name, command in leaves(cli)
        if any(parameter.name == "as_json" for parameter in command.params)
    }
    assert can == set(PAYLOADS)
    assert set(PAYLOADS) <= set(json.loads(SCHEMAS.read_text())["$defs"])


def groups(command: click.Command, *path: str):
    if isinstance(command, click.Group):
        yield path
        ctx = click.Context(command, **command.context_settings)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from groups(below, *path, name)


def test_help_of_groups_shows_full_summaries(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for path in groups(cli):
        assert run([*path, "--help"]) == 0
        assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


def test_every_command_has_help():
    assert [name for name, command in leaves(cli) if not command.help] == []


def test_the_form_can_be_asked_for_before_the_command(capsys):
    assert run(["--format", "json", "version"]) == 0
    assert json.loads(capsys.readouterr().out)["version"]


# -- loading ---------------------------------------------------------------------------------------


def test_help_loads_no_command():
    script = (
        "import sys; from tinkex.cli.main import run; run(['--help']); "
        "print([m for m in sys.modules if m.startswith(('tinkex.cli.', 'pydantic', 'rich', 'numpy'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "['tinkex.cli.main']"


def test_the_version_loads_neither_pydantic_nor_rich():
    script = (
        "import sys; from tinkex.cli.main import run; run(['version']); "
        "print([m for m in sys.modules if m in ('pydantic', 'rich', 'numpy', 'asyncio')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# -- completion ------------------------------------------------------------------------------------


def completed(shell: str, words: str, incomplete: str) -> str:
    """What a shell gets when a user presses the tabulator after these words."""
    count = len(words.split())
    asked = f"{words} {incomplete}" if shell != "fish" else words
    current = str(count) if shell != "fish" else incomplete
    instruction = {"_TINKEX_COMPLETE": f"{shell}_complete"}
    return process(**instruction, COMP_WORDS=asked, COMP_CWORD=current).out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options_are_completed(shell):
    assert "checkpoint" in completed(shell, "tinkex", "check")
    assert "set-ttl" in completed(shell, "tinkex checkpoint", "set")
    assert "--access-scope" in completed(shell, "tinkex run list", "--acc")
    assert "accessible" in completed(shell, "tinkex run list --access-scope", "acc")
    source = process("completion", shell)
    assert source.code == 0
    assert f"_TINKEX_COMPLETE={shell}_complete" in source.out


def test_bash_completes_commands(tmp_path):
    """The script as a shell uses it, with a `tinkex` on its path."""
    command = tmp_path / "tinkex"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tinkex "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(tinkex completion bash)"
        COMP_WORDS=(tinkex checkpoint unp); COMP_CWORD=2; COMP_LINE="tinkex checkpoint unp"
        _tinkex_completion tinkex unp checkpoint
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment(PATH=path),
    )
    assert done.stdout.split() == ["unpublish"]


def test_completing_a_command_loads_only_what_it_needs():
    script = (
        "import sys; from tinkex.cli.main import run; code = run([]); "
        "print([m for m in sys.modules if m.startswith('tinkex.cli.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment(_TINKEX_COMPLETE="bash_complete", COMP_WORDS="tinkex c", COMP_CWORD="1"),
    )
    assert done.stdout.split()[:4] == [
        "plain,chat",
        "plain,checkpoint",
        "plain,completion",
        "['tinkex.cli.main']",
    ]
