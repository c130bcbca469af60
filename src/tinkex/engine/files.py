"""Making sure that what was written stays written."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["flush"]


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
