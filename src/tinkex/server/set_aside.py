"""What a service finds and cannot use is kept for a person to look at: `<data>/set-aside/<date>/…`.

Nothing here is ever read or deleted by the service.
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
    """The place for such things in one data directory."""

    def __init__(self, data: Path, now: Callable[[], datetime]) -> None:
        self._data = data
        self._now = now

    def move(self, path: Path, why: str) -> Path:
        """Take a file or directory out of use; where it is now."""
        target = self._place(path)
        path.replace(target)
        flush(target.parent)
        flush(path.parent)
        logger.warning("%s is set aside as %s: %s", path, target, why)
        return target

    def copy(self, path: Path, why: str) -> Path:
        """Keep a copy of a file that stays in use."""
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
