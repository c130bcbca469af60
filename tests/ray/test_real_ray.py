"""Real Ray clusters behind the service; `make ray` makes their environment, which takes minutes.

Ray listens on the machine's own address unless loopback is all there is, so everything runs in a network namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.environments import ROOT, environment

#: For a busy machine: Ray gives up on its own processes after 30 s.
_PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    # Otherwise engines get almost nothing of a busy machine: by default Ray lowers their priority to 15.
    "RAY_worker_niceness": "0",
    # Otherwise Ray kills engines when other programs of the machine use much memory.
    "RAY_memory_monitor_refresh_ms": "0",
}


@pytest.fixture(scope="module")
def python(request) -> Path:
    """The Python of an environment with Ray, torch and what our package needs, made once under .scratch."""
    if not request.config.getoption("--ray"):
        pytest.skip("make ray runs this")
    return environment("ray", "ray==2.60.0", f"{ROOT}[local]", "pytest", "hypothesis", "httpx")


@pytest.mark.parametrize(
    "name", ["test_training.py", "test_sampling.py", "test_nodes.py", "test_refusals.py"]
)
def test_ray_tests_pass_in_a_namespace(name, python, request):
    for tool in ("unshare", "ip"):
        assert shutil.which(tool), f"{tool} is missing: apt-get install util-linux iproute2"
    tests = [python, "-m", "pytest", "-q", "-x", ROOT / "tests" / "ray" / "inside" / name]
    if request.config.getoption("--long"):
        tests.append("--long")
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", *map(str, tests)]
    maps = [] if os.geteuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", "--net", *maps, *inside],
        cwd=ROOT,
        env={
            **os.environ,
            **_PATIENCE,
            "PYTHONPATH": str(
                ROOT / "src"
            ),  # this tree, not the copy that brought the requirements
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TINKEX_RAY_NAMESPACE": "1",
            "TINKEX_OFFICIAL_PYTHON": str(environment("tinker-0.36.0", "tinker==0.36.0")),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
