"""Fail if an installed package has a known vulnerability; print a note if this cannot be looked up.

A machine without a network must be able to run `make check`, so not being able to ask is told and passes. The
knowledge is pip-audit's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    command = [str(Path(sys.executable).with_name("pip-audit")), "--format=json", "--skip-editable"]
    asked = subprocess.run(
        [*command, "--progress-spinner=off", "--timeout=10"],
        capture_output=True,
        text=True,
        check=False,
    )
    if not asked.stdout.strip():
        reason = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"Dependencies not audited: {reason:.200}", file=sys.stderr)
        return 0
    packages = json.loads(asked.stdout)["dependencies"]
    unknown = [package for package in packages if "skip_reason" in package]
    found = [package for package in packages if package.get("vulns")]
    for package in found:
        for flaw in package["vulns"]:
            mended = ", ".join(flaw["fix_versions"]) or "no version yet"
            print(
                f"{package['name']} {package['version']}: {flaw['id']}, mended in {mended}",
                file=sys.stderr,
            )
    print(
        f"{len(packages) - len(unknown)} dependencies audited, {len(unknown)} could not be looked up, "
        f"{len(found)} with known vulnerabilities.",
        file=sys.stderr,
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
