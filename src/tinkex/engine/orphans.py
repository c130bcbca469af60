"""Ending with the process that started this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["die_with"]

_PR_SET_PDEATHSIG: Final = 1


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
