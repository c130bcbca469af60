"""Whether a file that the user named is a Python which can run an engine; found out before an engine is started in it."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from tinkex.errors import ConfigError

__all__ = ["check_python"]

#: Seconds in which a Python must have started, on a busy machine with slow disks too.
_STARTING: Final = 60.0
#: Exit codes by which a Python tells that it is one.
_GOOD, _OLD = 79, 80
_SCRIPT: Final = f"import sys; sys.exit({_GOOD} if sys.version_info >= (3, 11) else {_OLD})"


def check_python(python: Path, seconds: float = _STARTING) -> None:
    """Raise `ConfigError` if a file is no Python, an old one, or one that does not answer."""
    what = (
        "give the Python of the environment in which vLLM is installed, such as ~/vllm/bin/python"
    )
    try:
        process = subprocess.Popen(  # noqa: S603 - the user names it
            [python, "-c", _SCRIPT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        reason = f"{python} cannot be run ({error.strerror}); {what}"
        raise ConfigError(reason, field="sampler_python") from None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):  # with all that it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reason = f"{python} did not answer within {seconds:g} s; {what}"
        raise ConfigError(reason, field="sampler_python") from None
    if code == _OLD:
        raise ConfigError(f"{python} is older than Python 3.11", field="sampler_python")
    if code != _GOOD:
        raise ConfigError(f"{python} is no Python; {what}", field="sampler_python")
