"""The install commands of the documentation work in a new environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ..cli.commands import environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "install.md"
INSTALLS = re.compile(r"\bpip3? (install|wheel)\b")


def command_blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_only_one_page_has_install_commands_for_a_new_environment():
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *ROOT.glob("docs/**/*.md")]
    saying = {
        page.relative_to(ROOT).as_posix()
        for page in pages
        for block in command_blocks(page)
        if INSTALLS.search(block) and re.search(r"\btinkex\[|[' ]\.\[", block)
    }
    assert saying == {"docs/install.md"}


def test_every_extra_for_users_is_explained():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = set(settings["project"]["optional-dependencies"]) - {"dev", "docs"}
    assert extras == set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))


def test_install_commands_work_in_a_new_environment(tmp_path, pytestconfig):
    if not pytestconfig.getoption("--wheel"):
        pytest.skip("`make wheel` installs the extra [local], which takes minutes")
    clone = tmp_path / "clone"
    kept_out = shutil.ignore_patterns(".*", "site", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=kept_out)
    from_clone, to_wheel = command_blocks(PAGE)
    trains = "tinkex train tolmery --base-url local --base-model tinkex/tiny --steps 1 --output run"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{from_clone}\n{to_wheel}\n{trains}"],
        cwd=clone,
        env=environment(PYTHONPATH="", TINKEX_DATA_DIR=str(tmp_path / "data")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((clone / "dist").glob("tinkex-*.whl"))
