"""Every example and the notebook run unchanged against a real service and check their own results."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted({path.stem for path in EXAMPLES.glob("[!_]*.py")} - {"run_all"})
NOTEBOOK = EXAMPLES / "first_look.ipynb"


def run(example: Path, url: str, api_key: str, output: Path) -> None:
    """Run an example like `python example --base-url URL`, inside a prepared process."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["TINKER_API_KEY"] = api_key
    sys.argv = [str(example), "--base-url", url]
    sys.path.insert(0, str(example.parent))
    runpy.run_path(str(example), run_name="__main__")


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> argparse.Namespace:
    """The options that `parsed` of the examples reads from a command line."""
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    shared = runpy.run_path(str(EXAMPLES / "_shared.py"))
    options: argparse.Namespace = shared["parsed"](None, prompt="hi", max_tokens=4, temperature=0.7)
    return options


def test_examples_read_options_from_the_environment(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://elsewhere:1")
    monkeypatch.setenv("TINKER_BASE_MODEL", "some/model")
    monkeypatch.setenv("TINKER_MAX_TOKENS", "9")
    monkeypatch.setenv("TINKER_TEMPERATURE", " ")
    found = options_of(monkeypatch, "--base-model", "other/model")
    assert (found.base_url, found.base_model) == ("http://elsewhere:1", "other/model")
    assert (found.prompt, found.max_tokens, found.temperature) == ("hi", 9, 0.7)


@pytest.fixture(scope="module")
def processes():
    """Creates processes that have imported the slow modules already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tinkex._client.service",
            "torch",
            "transformers.modeling_utils",
            "transformers.models.auto.tokenization_auto",
        ]
    )
    return context


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_its_assertions_hold(name, processes, tinkex_tiny, tmp_path):
    output = tmp_path / "output"
    arguments = (EXAMPLES / f"{name}.py", tinkex_tiny.url, tinkex_tiny.api_key, output)
    process = processes.Process(target=run, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, output.read_text()[-3000:]
    assert output.read_text()


def run_all(tinkex_tiny, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "run_all.py", "--base-url", tinkex_tiny.url, *names],
        env=os.environ | {"TINKER_API_KEY": tinkex_tiny.api_key},
        capture_output=True,
        text=True,
        check=False,
    )


def test_run_all_runs_only_the_named_examples(tinkex_tiny):
    done = run_all(tinkex_tiny, "heartbeat_probe", "file_upload")
    assert done.returncode == 0, done.stderr
    assert re.search(r"1/2 heartbeat_probe\n(?s:.+)2/2 file_upload\n(?s:.+)All 2 done", done.stdout)


def test_run_all_stops_at_the_first_failure(tinkex_tiny):
    done = run_all(tinkex_tiny, "no_such_example", "file_upload")
    assert done.returncode == 1
    assert "no_such_example failed" in done.stderr
    assert "2/2" not in done.stdout


def test_every_example_is_in_the_list_and_in_the_index():
    listed = runpy.run_path(str(EXAMPLES / "run_all.py"))["EXAMPLES"]
    assert sorted(listed) == NAMES
    index = re.findall(
        r"^\| \[(\w+)\]\(\w+\.py\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert index == [*listed, "run_all"]


def test_the_notebook_runs(tinkex_tiny, tmp_path):
    executed = tmp_path / "executed"
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "execute", NOTEBOOK, "--output", executed],
        # `local` finds the running service here.
        env=os.environ | {"TINKEX_DATA_DIR": str(tinkex_tiny.data_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert pictures(executed.with_suffix(".ipynb")) == pictures(NOTEBOOK) == 3


def test_notebook_is_small():
    assert NOTEBOOK.stat().st_size < 300_000


def pictures(notebook: Path) -> int:
    """The number of pictures stored in the notebook."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)
