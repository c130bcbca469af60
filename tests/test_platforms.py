"""Windows has no fcntl, resource or uvloop: the client works without them, and the service says what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .scripted import Answer, ScriptedServer

WITHOUT_UNIX = """
import sys
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios", "uvloop")))
"""


def run_without_unix(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", WITHOUT_UNIX + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_client_works_without_unix_modules(server: ScriptedServer):
    server.on("GET /api/v1/healthz", Answer({"status": "ok"}))
    done = run_without_unix(
        f"""
import tinkex
with tinkex.ServiceClient(base_url={server.url!r}, api_key="tml-key") as service:
    print(service.health().status)
"""
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import tinkex; tinkex.local()",
        "import sys; from tinkex.cli.main import run; sys.exit(run(['serve']))",
        "import sys; from tinkex.cli.main import run; sys.exit(run(['session', 'list', '--base-url', 'local']))",
    ],
    ids=["tinkex.local", "tinkex serve", "--base-url local"],
)
def test_service_says_which_platforms_it_needs(code):
    done = run_without_unix(code)
    assert done.returncode != 0
    assert "needs Linux or macOS; on Windows run it in WSL" in done.stderr


def test_missing_key_is_explained_where_no_service_can_run(tmp_path):
    (tmp_path / "lock").touch()  # of a service in WSL that shares the directory
    code = f"""
import os, sys
os.environ.pop("TINKER_API_KEY", None)
os.environ.update(TINKEX_DATA_DIR={str(tmp_path)!r}, HOME={str(tmp_path)!r})
from tinkex.cli.main import run
sys.exit(run(["run", "list"]))
"""
    done = run_without_unix(code)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: --api-key: missing"), done.stderr
