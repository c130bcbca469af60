"""Memory size of the device that models run on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

__all__ = ["memory_of"]

#: Files with the memory limit of a container, for control groups version 2 and 1.
_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_of(device: torch.device, limits: Sequence[Path] = _LIMITS) -> int:
    """Total memory of a device in bytes; for the CPU at most the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in limits:
        with suppress(OSError, ValueError):  # no such file, or its content is "max"
            found = min(found, int(limit.read_text()))
    return found
