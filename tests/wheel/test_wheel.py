from __future__ import annotations

import json
import subprocess
import tomllib
import zipfile

import pytest

from ..cli.hub import TOKEN, hub
from ..scripted import Answer, ScriptedServer
from .conftest import ROOT

TINY = "tinkex/tiny"
NOWHERE = "http://127.0.0.1:1"


def test_wheel_is_small_and_has_every_file_of_the_package(wheel):
    sources = ROOT / "src" / "tinkex"
    ours = {
        f"tinkex/{file.relative_to(sources).as_posix()}"
        for file in sources.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    # Besides the package there is only the metadata of the wheel.
    assert {name for name in names if not name.startswith("tinkex-")} == ours
    assert wheel.stat().st_size < 2 << 20


def test_source_distribution_takes_every_tracked_file():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a clone: the files that belong to it are not known")
    top = {f"/{name.partition('/')[0]}" for name in tracked.stdout.splitlines()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    taken = set(settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    # hatchling adds pyproject.toml and .gitignore itself; .ci configures the forge.
    assert top - {"/pyproject.toml", "/.gitignore", "/.ci"} == taken


def test_base_install_brings_what_it_declares_and_no_more(base):
    outcome = base.run("python", "-c", "import tinkex, tinkex.cli.main; tinkex.ServiceClient")
    assert outcome.code == 0, outcome.err
    for absent in ("torch", "transformers", "httpx", "starlette", "pytest"):
        assert base.run("python", "-c", f"import {absent}").code == 1, absent
    assert base.run("python", "-m", "pip", "check").code == 0


def test_commands_of_the_base_install(base, server: ScriptedServer, tmp_path):
    assert base.tinkex("--help").out.startswith("Usage: tinkex")
    assert base.tinkex("version").out.startswith("tinkex ")
    assert base.tinkex("checkpoint", "push-hf", "--help").code == 0
    server.on("GET /api/v1/sessions", Answer({"sessions": ["s-1"]}))
    listed = base.tinkex("session", "list", "--json", "--base-url", server.url)
    assert json.loads(listed.out)["sessions"] == ["s-1"], listed.err


def test_doctor_of_the_base_install_says_what_is_missing(base):
    looked = base.tinkex("doctor", "--json", "--base-url", NOWHERE)
    findings = {one["name"]: one for one in json.loads(looked.out)["findings"]}
    assert findings["packages"]["ok"]  # needed for the local service only
    assert "torch" in findings["packages"]["found"]
    assert not findings["service"]["ok"]
    local = base.tinkex("doctor", "--json", "--base-url", "local")
    findings = {one["name"]: one for one in json.loads(local.out)["findings"]}
    assert "pip install 'tinkex[local]'" in findings["packages"]["advice"]
    assert "Traceback" not in looked.err + local.err


def test_missing_extra_is_named_in_the_error(base):
    pushed = base.tinkex("checkpoint", "push-hf", "tinker://run/weights/x", HF_TOKEN=TOKEN)
    assert pushed.code == 1
    assert "pip install 'tinkex[hf]'" in pushed.err
    served = base.tinkex("serve", "--port", "0")
    assert served.code == 1
    assert "pip install 'tinkex[local]'" in served.err
    assert "Traceback" not in pushed.err + served.err


def test_the_local_install_trains_and_pushes(local, tmp_path):
    here = {"TINKEX_DATA_DIR": str(tmp_path / "data"), "TINKER_BASE_URL": "local"}
    looked = local.tinkex("doctor", "--json", **here)
    assert looked.code == 0, looked.out + looked.err
    place = str(tmp_path / "run")
    trained = local.tinkex(
        *("train", "tolmery", "--base-model", TINY, "--steps", "1", "--rank", "4"),
        *("--output", place, "--json"),
        **here,
    )
    assert trained.code == 0, trained.err
    summary = json.loads(trained.out)
    assert (summary["status"], summary["steps"]) == ("finished", 1)
    with hub() as standing_in:
        pushed = local.tinkex(
            *("checkpoint", "push-hf", summary["sampler_path"], "--json"),
            HF_ENDPOINT=standing_in.url,
            HF_TOKEN=TOKEN,
            HF_HUB_DISABLE_XET="1",
            **here,
        )
        assert pushed.code == 0, pushed.err
        ((_, files),) = [one for one in standing_in.files.items() if one[1]]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(files)
