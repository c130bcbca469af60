"""Write the reference pages that the code knows best.

python scripts/docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tinkex._wire.operations import OPERATIONS
from tinkex.config import settings

ROOT = Path(__file__).resolve().parent.parent


def configuration() -> str:
    rows = [
        f"| {f'`{row.name}`' if row.name else '–'} | {f'`{row.env}`' if row.env else '–'} "
        f"| {_shown(row.default)} | {row.doc} |"
        for row in settings()
    ]
    return "\n".join(
        [
            "# Configuration",
            "",
            "A setting is taken from the arguments of the client (or of `tinkex.Config`), else from",
            "`tinkex.set_defaults(…)`, else from the environment, else from the built-in value. Times are seconds.",
            "The environment is read when a `Config` is made and never later; `tinkex.config.snapshot()` shows what it",
            "says, without secrets.",
            "",
            "| setting | environment | built in | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _shown(value: object) -> str:
    return "–" if value is None or value in ((), {}) else f"`{value}`"


def operations() -> str:
    rows = [
        f"| `{row.name}` | {row.method} | `{row.path}` | {'queued' if row.queued else 'at once'} "
        f"| {row.pool.value} | {f'`{row.flag}`' if row.flag else ''} |"
        for row in OPERATIONS.values()
    ]
    return "\n".join(
        [
            "# Operations of the protocol",
            "",
            "| operation | method | path | answered | pool | only with flag |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


PAGES = {"docs/configuration.md": configuration, "docs/reference/operations.md": operations}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"{name} is out of date: run make docs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
