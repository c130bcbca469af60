"""Real clients of both APIs, unmodified, each in an environment of its own.

`make test` runs those that install quickly; `make serving-clients` runs all, with a real language model too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.testing import RunningService, service
from tinkex.types import ModelInput

from ..environments import ROOT, environment

HERE = Path(__file__).parent / "clients"
TINY = "tinkex/tiny"
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", params=[TINY, SMOL])
def model(request) -> Iterator[tuple[RunningService, str]]:
    if request.param == SMOL and not request.config.getoption("--long"):
        pytest.skip("the real language model is in `make serving-clients`")
    with service("torch", (request.param,)) as running:
        yield running, request.param


@pytest.fixture
def all_clients(request):
    if not request.config.getoption("--long"):
        pytest.skip("takes minutes to install; in `make serving-clients`")


def run(program: str | Path, script: str, *arguments: str) -> str:
    variables = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "no_proxy": "*", "NO_PROXY": "*"}
    done = subprocess.run(
        [program, HERE / script, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_openai(model):
    running, name = model
    python = environment("openai", "openai")
    assert run(python, "openai_side.py", running.url, name) == "ok\n"


def test_anthropic(model):
    running, name = model
    python = environment("anthropic", "anthropic")
    assert run(python, "anthropic_side.py", running.url, name) == "ok\n"


@pytest.mark.usefixtures("all_clients")
def test_litellm(model):
    running, name = model
    assert "ok" in run(
        environment("litellm", "litellm", "mcp"), "litellm_side.py", running.url, name
    )


@pytest.mark.usefixtures("all_clients")
def test_inspect(model):
    running, name = model
    python = environment("inspect", "inspect-ai", "openai")
    assert "ok" in run(python, "inspect_side.py", running.url, name)


@pytest.mark.usefixtures("all_clients")
def test_lm_eval_scores_like_compute_logprobs(model):
    running, name = model
    python = environment("lm-eval", "lm-eval[api]", "transformers")
    client = running.client()
    directory = client.create_sampling_client(base_model=name).get_tokenizer().name_or_path
    out = run(python, "lm_eval_side.py", running.url, name, directory)
    found = json.loads(out.partition("RESULT ")[2])
    sampler = client.create_sampling_client(base_model=name)
    for (score, _), (context, whole) in zip(found["scores"], found["tokens"], strict=True):
        expected = sampler.compute_logprobs(ModelInput.from_ints(whole)).result()
        assert score == pytest.approx(sum(map(float, expected[len(context) :])), abs=1e-4)


@pytest.mark.usefixtures("all_clients")
def test_openai_for_node(model):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node is not installed")
    running, name = model
    home = ROOT / ".scratch" / "node-openai"
    if not (home / "node_modules" / "openai").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run([npm, "install", "--silent", "openai"], cwd=home, check=True)
    script = home / "openai_side.mjs"
    shutil.copy(HERE / "openai_side.mjs", script)
    done = subprocess.run(
        [node, script, running.url, name], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
