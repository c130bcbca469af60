"""Snapshots: the state of a model after a number of changes, so that a restart replays a minute of work, not all.

A snapshot is a checkpoint directory. A small file beside it, replaced atomically, names the current one. Later changes
are replayed from the journal.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tinkex.engine.files import write_whole

__all__ = ["Snapshot", "Snapshots"]

_CURRENT: Final = "current.json"


@dataclass(frozen=True)
class Snapshot:
    """A model after `changes` changes; `next_seq` was the next number to run."""

    directory: Path
    changes: int
    next_seq: int


class Snapshots:
    """The snapshots of all models of a data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, model_id: str, changes: int) -> Path:
        return self.of_model(model_id) / str(changes)

    def find(self, model_id: str) -> Snapshot | str | None:
        """The current snapshot of a model, or why it cannot be read; None if the model has none."""
        try:
            content = json.loads((self.of_model(model_id) / _CURRENT).read_text())
            changes, next_seq = int(content["changes"]), int(content["next_seq"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return f"the file {_CURRENT} of its snapshot is damaged"
        return Snapshot(self.place(model_id, changes), changes, next_seq)

    def commit(self, model_id: str, snapshot: Snapshot) -> None:
        """Make a written snapshot the current one and delete the others."""
        content = {"changes": snapshot.changes, "next_seq": snapshot.next_seq}
        write_whole(self.of_model(model_id) / _CURRENT, json.dumps(content))
        for other in self.of_model(model_id).iterdir():
            if other.name.isdigit() and other != snapshot.directory:
                shutil.rmtree(other, ignore_errors=True)

    def clear_scratch(self) -> None:
        """Remove incomplete files that a crash left."""
        for leftover in self._directory.glob("*/.*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()

    def forget(self, model_id: str) -> None:
        shutil.rmtree(self.of_model(model_id), ignore_errors=True)

    def all_ids(self) -> list[str]:
        """The models that have a directory here, with a complete snapshot or without."""
        if not self._directory.is_dir():
            return []
        return sorted(entry.name for entry in self._directory.iterdir())

    def model_ids(self) -> list[str]:
        """The models that have a snapshot."""
        return [each for each in self.all_ids() if (self.of_model(each) / _CURRENT).is_file()]

    def of_model(self, model_id: str) -> Path:
        """The directory of a model's snapshots."""
        return self._directory / model_id
