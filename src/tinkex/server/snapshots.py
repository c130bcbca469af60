"""Snapshots: the state of a model after a number of changes, so that a restart replays a minute of work, not all.

A snapshot is a checkpoint directory. A small file beside it, replaced atomically, names the current one. Later changes
are replayed from the journal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterator
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
        return self._of(model_id) / str(changes)

    def find(self, model_id: str) -> Snapshot | str | None:
        """The current snapshot of a model, or why it cannot be read; None if the model has none."""
        try:
            content = json.loads((self._of(model_id) / _CURRENT).read_text())
            changes, next_seq = int(content["changes"]), int(content["next_seq"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return f"the file {_CURRENT} of its snapshot is damaged"
        return Snapshot(self.place(model_id, changes), changes, next_seq)

    def commit(self, model_id: str, snapshot: Snapshot) -> None:
        """Make a written snapshot the current one and delete the others."""
        content = {"changes": snapshot.changes, "next_seq": snapshot.next_seq}
        write_whole(self._of(model_id) / _CURRENT, json.dumps(content))
        for other in self._of(model_id).iterdir():
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
        shutil.rmtree(self._of(model_id), ignore_errors=True)

    def forget_others(
        self,
        needed: Container[str],
        known: Callable[[str], bool],
        set_aside: Callable[[Path, str], object],
    ) -> None:
        """Delete the snapshots of models that have ended; set aside those of models that are not `known`."""
        for entry in self._entries():
            if entry.name in needed:
                continue
            if known(entry.name):
                self.forget(entry.name)
            else:
                set_aside(entry, "neither the database nor the journal knows this run")

    def model_ids(self) -> Iterator[str]:
        """The models that have a snapshot."""
        for entry in self._entries():
            if (entry / _CURRENT).is_file():
                yield entry.name

    def _entries(self) -> list[Path]:
        return sorted(self._directory.iterdir()) if self._directory.is_dir() else []

    def _of(self, model_id: str) -> Path:
        return self._directory / model_id
