"""How much memory there is where models run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

__all__ = ["memory_of"]

#: Where the limit of a container stands, in the two versions of control groups.
_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_of(device: torch.device, limits: Sequence[Path] = _LIMITS) -> int:
    """Bytes of memory of a device, used or not; for the CPU what this process may have of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in limits:
        with suppress(OSError, ValueError):  # not there, or "max"
            found = min(found, int(limit.read_text()))
    return found
