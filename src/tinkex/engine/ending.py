"""Tie the engine process to the service: it dies with the service, and the OOM killer picks it first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["be_killed_first", "die_with"]

_PR_SET_PDEATHSIG: Final = 1
#: On a scale of -1000 to 1000. The OOM killer prefers the process with the highest score.
_OOM_SCORE: Final = 900


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if its interpreter is stuck.

    The kernel sends the signal when the parent *thread* that started this process ends. That thread runs the
    service's event loop and lives as long as the service. Other systems than Linux have no such call: there the
    engine exits when its pipe closes, unless it is stuck.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def be_killed_first() -> None:
    """Make the OOM killer choose this process, not the service: the service can start another engine."""
    with suppress(OSError):  # no such file on systems other than Linux
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
