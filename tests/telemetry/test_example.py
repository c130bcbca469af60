"""The example of the guide runs, and shows what the guide shows."""

from __future__ import annotations

import os
import subprocess
import sys

from ..client.helpers import ROOT


def test_the_example_shows_metrics_usage_and_traces(tinkex_fake):
    command = [sys.executable, "examples/observability.py", "--base-url", tinkex_fake.url]
    done = subprocess.run(
        [*command, "--steps", "2"],
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
