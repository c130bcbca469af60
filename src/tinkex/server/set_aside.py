"""Keeps files that the service cannot use for the operator to inspect: `<data>/set-aside/<date>/…`.

The service never reads or deletes anything there.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

from tinkex.engine.files import flush, make_directory

__all__ = ["DIRECTORY", "SetAside"]

logger = logging.getLogger("tinkex.server")

DIRECTORY: Final = "set-aside"


class SetAside:
    """The set-aside directory of one data directory."""

    def __init__(self, data: Path, now: Callable[[], datetime]) -> None:
        self._data = data
        self._now = now

    def move(self, path: Path, why: str) -> Path:
        """Move a file or directory out of use and return its new path."""
        target = self._place(path)
        path.replace(target)
        flush(target.parent)
        flush(path.parent)
        logger.warning("%s is set aside as %s: %s", path, target, why)
        return target

    def copy(self, path: Path, why: str) -> Path:
        """Set aside a copy of a file that stays in use; return the path of the copy."""
        target = self._place(path)
        shutil.copyfile(path, target)
        target.chmod(0o600)
        flush(target)
        flush(target.parent)
        logger.warning("A copy of %s is set aside as %s: %s", path, target, why)
        return target

    def _place(self, path: Path) -> Path:
        day = self._data / DIRECTORY / self._now().strftime("%Y-%m-%d")
        place = day / path.relative_to(self._data)
        make_directory(place.parent, 0o700)
        number = 1
        while place.exists():  # the same name was set aside earlier today
            number += 1
            place = place.with_name(f"{path.name}.{number}")
        return place
