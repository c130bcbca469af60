"""Run unmodified code with tinkex in place of the official SDK.

python -m tinkex.as_tinker script.py [arguments…]
python -m tinkex.as_tinker -m module [arguments…]

Child processes of the code import tinkex as `tinker` too.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from .compat import SHIM, install_as_tinker
from .config import read_env

__all__ = ["main"]

_USAGE = """\
usage: python -m tinkex.as_tinker script.py [arguments…]
       python -m tinkex.as_tinker -m module [arguments…]
"""


def main(arguments: list[str]) -> None:
    by_name = arguments[:1] == ["-m"]
    target = arguments[1:] if by_name else arguments
    if not target or target[0].startswith("-"):
        sys.stderr.write(_USAGE)
        raise SystemExit(2)
    if not by_name and not Path(target[0]).exists():
        sys.stderr.write(f"tinkex.as_tinker: there is no file {target[0]}\n")
        raise SystemExit(2)
    install_as_tinker()
    _pass_on()
    sys.argv = target
    if by_name:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")


def _pass_on() -> None:
    """Make child processes, which inherit the environment, import tinkex as `tinker`."""
    inherited = (read_env("PYTHONPATH") or "").split(os.pathsep)
    others = [path for path in inherited if path and path != str(SHIM)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), *others])


if __name__ == "__main__":
    main(sys.argv[1:])
