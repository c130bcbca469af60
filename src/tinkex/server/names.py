"""Names of checkpoints, of the files in them and of temporary files beside them."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Final

from tinkex.errors import InvalidInputError

__all__ = ["ADAPTER_FILES", "scratch_path", "validate_name"]

#: The files of a checkpoint that other programs can load. Optimizer state and manifest are tinkex's own.
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


def validate_name(name: str) -> str:
    """Return `name` if it can name a checkpoint, and therefore the directory that holds it."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r:.200} is not a valid checkpoint name: use 1 to 255 of the characters A-Z, a-z, "
            "0-9, '.', '_' and '-', not starting with '.'",
            field="path",
        )
    return name


def scratch_path(path: Path) -> Path:
    """A new hidden path in the directory of `path`, for content that is not complete yet."""
    # Without the name of `path`: that may already have the greatest length a file system allows.
    return path.with_name(f".{secrets.token_hex(8)}.tmp")
