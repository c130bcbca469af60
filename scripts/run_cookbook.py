"""Run the unit tests of tinker-cookbook with the official SDK and with tinkex in its place.

python scripts/run_cookbook.py [--only official|tinkex] [pytest arguments…]
python scripts/run_cookbook.py --engines N [--only official|tinkex]

With --engines, recipes of the cookbook run instead, against a service of this machine with N engines. The environment is made once under .scratch/cookbook and kept until `make clean`. Prints a summary as
JSON; the exit code is 1 if a test passes with the official SDK and not with ours. Tests that need the
network fail with both and say nothing about either.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from xml.etree import ElementTree as ET

import cookbook_recipes  # type: ignore[import-not-found]  # beside this file when it runs

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".scratch" / "cookbook"
VERSION = "0.5.8"
SOURCES = HOME / f"tinker_cookbook-{VERSION}"
EXAMPLES = SOURCES / "tinker_cookbook" / "example_data"
PYTHON = HOME / "env" / "bin" / "python"

REQUIREMENTS = (
    f"tinker-cookbook[litellm,math-rl,modal]=={VERSION}",
    "tinker==0.36.0",
    "inspect-ai",
    "pandas",
    "plotly",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
)
#: The unit tests beside the code, and the only other tests that need no service. Run separately: in one run with tests
#: that need a key, the unit tests are skipped if no key is set.
SELECTED = (("tinker_cookbook",), ("tests/downstream_compat",))
#: Excluded: it does not test an SDK, and it leaves a process running.
LEFT_OUT = "tinker_cookbook/capture/store/client_test.py::test_ensure_daemon_claims_before_reuse"
#: The commands that run the tests with each SDK.
RUNNERS = {
    "official": ("-m",),
    "tinkex": ("-m", "tinkex.as_tinker", "-m"),
}
TEST_TIMEOUT = 120  # seconds for one test
RUN_TIMEOUT = 3600  # seconds for all tests with one SDK


class Outcome(NamedTuple):
    kind: str
    raised: str = ""


Outcomes = dict[str, Outcome]


def prepare() -> None:
    """Make the environment and unpack the sources, unless that was done for the same requirements."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = "\n".join([*REQUIREMENTS, *ours])
    ready = HOME / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME / "env", with_pip=True)
    constraint = ("--constraint", str(ROOT / "constraints.txt"))
    pip("install", *constraint, *REQUIREMENTS, *ours)
    pip("install", "--no-deps", "--editable", str(ROOT))
    pip(
        *("download", "--no-deps", "--no-binary", ":all:", "--dest", str(HOME)),
        f"tinker-cookbook=={VERSION}",
    )
    with tarfile.open(next(HOME.glob("tinker_cookbook-*.tar.gz"))) as archive:
        archive.extractall(HOME, filter="data")
    ready.write_text(wanted)


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run(sdk: str, extra: list[str]) -> tuple[Outcomes, dict[str, Any]]:
    """The outcome of every test with one SDK, and their numbers."""
    started = time.monotonic()
    outcomes: Outcomes = {}
    log = HOME / f"{sdk}.log"
    with log.open("w") as output:
        for targets in [extra] if extra else SELECTED:
            outcomes |= run_pytest(RUNNERS[sdk], targets, output)
    counted = Counter(outcome.kind for outcome in outcomes.values())
    return outcomes, {
        **{kind: counted[kind] for kind in ("passed", "failed", "errors", "skipped")},
        "seconds": round(time.monotonic() - started),
        "log": str(log.relative_to(ROOT)),
    }


def run_pytest(runner: Sequence[str], targets: Sequence[str], output: IO[str]) -> Outcomes:
    report = HOME / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        *(str(PYTHON), *runner, "pytest"),
        # Native tracebacks: for longer ones pytest parses sources, which can fail on Python 3.11.
        *("-q", "--tb=native", "-p", "no:cacheprovider", "--continue-on-collection-errors"),
        *(f"--timeout={TEST_TIMEOUT}", f"--junitxml={report}", f"--deselect={LEFT_OUT}"),
        *targets,
    ]
    try:
        subprocess.run(
            command,
            cwd=SOURCES,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        output.write(f"\nstopped after {RUN_TIMEOUT} s\n")
    return read_report(report)


def environment() -> dict[str, str]:
    """An environment without a service, a model hub or the caller's settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TINKER_", "TINKEX_", "HF_", "PYTEST_", "PYTHON"))
    }
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(HOME / "hub"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "WANDB_MODE": "disabled",
        "TINKER_TELEMETRY": "0",
    }
    return kept | offline | {"PYTHONDONTWRITEBYTECODE": "1"}


def read_report(report: Path) -> Outcomes:
    if not report.exists():  # the run crashed or was stopped
        return {}
    kinds = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  pytest wrote it for us
        name = "::".join(filter(None, [case.get("classname"), case.get("name")]))
        found = [Outcome(kinds[child.tag], raised(child)) for child in case if child.tag in kinds]
        outcomes[name] = found[0] if found else Outcome("passed")
    return outcomes


def raised(child: ET.Element) -> str:
    """The class of the exception that ended a test, without its message."""
    message = child.get("message", "").removeprefix('failed on setup with "')
    return message.partition(":")[0]


def compare(official: Outcomes, tinkex: Outcomes) -> dict[str, list[str]]:
    """Tests that fail only with tinkex, and those that fail with both SDKs for different reasons."""
    missing = Outcome("missing")
    pairs = [(name, found, tinkex.get(name, missing)) for name, found in official.items()]
    return {
        "passes_with_official_only": sorted(
            name for name, theirs, ours in pairs if theirs.kind == "passed" != ours.kind
        ),
        "ends_otherwise_with_tinkex": sorted(
            f"{name}: {theirs.raised or theirs.kind} / {ours.raised or ours.kind}"
            for name, theirs, ours in pairs
            if theirs.kind != "passed" and theirs != ours
        ),
    }


def run_recipes(engines: str, sdks: Sequence[str]) -> int:
    """Run the recipes with each SDK; 1 if one does not come to its end."""
    runs = HOME / "recipes"
    shutil.rmtree(runs, ignore_errors=True)
    with cookbook_recipes.serving(runs, engines) as service:
        found = {
            sdk: cookbook_recipes.run(
                [str(PYTHON), *RUNNERS[sdk]], service, runs / sdk, EXAMPLES, environment()
            )
            for sdk in sdks
        }
    print(json.dumps({"engines": engines, **found}, indent=2))
    return 0 if all(one["passed"] for of_sdk in found.values() for one in of_sdk.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNNERS, help="run with one of the two SDKs")
    parser.add_argument("--engines", help="run recipes against a service with so many engines")
    options, extra = parser.parse_known_args()
    prepare()
    if options.engines:
        return run_recipes(options.engines, [options.only] if options.only else list(RUNNERS))
    outcomes: dict[str, Outcomes] = {}
    summary: dict[str, Any] = {}
    for sdk in [options.only] if options.only else RUNNERS:
        outcomes[sdk], summary[sdk] = run(sdk, extra)
    if not options.only:
        summary |= compare(**outcomes)
    print(json.dumps(summary, indent=2))
    ran = all(numbers["passed"] for numbers in summary.values() if isinstance(numbers, dict))
    return 0 if ran and not summary.get("passes_with_official_only") else 1


if __name__ == "__main__":
    sys.exit(main())
