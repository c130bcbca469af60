"""The example of the guide runs and prints the output shown in the guide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from ..client.helpers import ROOT


def test_the_example_shows_metrics_usage_and_traces_and_draws_them(tinkex_fake, tmp_path):
    command = [sys.executable, "examples/observability.py", "--base-url", tinkex_fake.url]
    picture = tmp_path / "picture.svg"
    done = subprocess.run(
        [*command, "--steps", "2", "--picture", picture],
        cwd=ROOT,
        env={**os.environ, "TINKER_API_KEY": tinkex_fake.api_key},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for shown in ("tinkex_requests_total", "tinkex/tiny", "tinkex.forward_backward"):
        assert shown in done.stdout
    assert "step 2/2" in done.stderr
    check_picture(picture)


def test_picture_in_the_guide_matches_the_example():
    guide = (ROOT / "docs/guides/observability.md").read_text()
    assert "(../pictures/observability.svg)" in guide
    check_picture(ROOT / "docs/pictures/observability.svg")


def check_picture(file: Path) -> None:
    drawn = ET.parse(file).getroot()
    text = " ".join("".join(drawn.itertext()).split())
    for shown in ("examples/observability.py", "tinkex_requests_total", "tinkex.forward_backward"):
        assert shown in text
    assert "url(http" not in file.read_text()  # the page loads nothing from the network
