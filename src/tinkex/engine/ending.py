"""How the engine's process ends: with the service, and before the service when memory runs out."""

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
#: Of 1000: the kernel then prefers this process to all but those that ask for the same.
_OOM_SCORE: Final = 900


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if its interpreter is stuck.

    The kernel acts when the parent's *thread* ends that started us. That is the thread of the service's event loop,
    which lives as long as the service. Systems other than Linux have no such call; there the engine notices that its
    pipe has closed, unless it is stuck.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def be_killed_first() -> None:
    """Have the kernel choose this process when memory runs out: the service can start another engine."""
    with suppress(OSError):  # no such file on systems other than Linux
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
