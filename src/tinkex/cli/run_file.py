"""`run.json`: the record of a training run, from which it can be reported and resumed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from tinkex.errors import InvalidInputError

__all__ = ["FILE", "RunSettings", "RunState", "SavedStep", "fingerprint"]

FILE: Final = "run.json"
_FORMAT: Final = 1


@dataclass(frozen=True)
class RunSettings:
    """The settings that determine the result of a run; a resumed run keeps all of them."""

    data: str
    base_model: str
    rank: int = 16
    learning_rate: float = 5e-4
    schedule: str = "cosine"
    warmup: int = 0
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    epochs: int = 3
    steps: int | None = None
    batch_size: int = 8
    packing: bool = False
    batch_tokens: int | None = None
    max_length: int | None = None
    too_long: str = "refuse"
    chat_template: bool = True
    system: str | None = None
    eval_fraction: float = 0.1
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class SavedStep:
    """A training checkpoint: the state after `step` steps."""

    step: int
    path: str


@dataclass
class RunState:
    """The settings and progress of a run."""

    settings: RunSettings
    data_sha256: str
    name: str = "train"
    model_id: str = ""
    status: str = "running"
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    checkpoints: list[SavedStep] = field(default_factory=list)
    resumed_from: str | None = None
    seconds: float = 0.0
    #: Tokens by kind, including repeated steps.
    used: dict[str, int] = field(default_factory=dict)
    sampler_path: str | None = None
    summary: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def last(self) -> SavedStep | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def back_to(self, saved: SavedStep | None) -> None:
        """Drop all progress after a checkpoint; without one, all progress."""
        step = 0 if saved is None else saved.step
        self.losses = self.losses[:step]
        self.evaluations = [(at, loss) for at, loss in self.evaluations if at <= step]
        self.checkpoints = [one for one in self.checkpoints if one.step <= step]
        if saved is None:
            self.evaluations, self.checkpoints = [], []
        self.status, self.summary, self.sampler_path = "running", None, None
        self.resumed_from = None if saved is None else saved.path

    def write(self, directory: Path) -> None:
        """Replace the file in one step, so that it is always complete."""
        directory.mkdir(parents=True, exist_ok=True)
        scratch = directory / f".{FILE}.{os.getpid()}"
        try:
            scratch.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")
            scratch.replace(directory / FILE)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def read(cls, file: Path) -> RunState:
        try:
            content = json.loads(file.read_text())
            if content.pop("format") != _FORMAT:
                raise ValueError("another format")
            content["settings"] = RunSettings(**content["settings"])
            content["checkpoints"] = [SavedStep(**saved) for saved in content["checkpoints"]]
            content["evaluations"] = [(int(at), float(loss)) for at, loss in content["evaluations"]]
            return cls(**content)
        except FileNotFoundError:
            raise InvalidInputError(f"there is no {file}", field="resume") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(
                f"{file} is not the record of a run: {error}", field="resume"
            ) from error

    def differences(self, given: dict[str, Any]) -> list[str]:
        """The given settings that differ from those of this run, as text."""
        own = asdict(self.settings)
        return [
            f"{one.name} was {own[one.name]!r}, not {given[one.name]!r}"
            for one in fields(RunSettings)
            if one.name in given and given[one.name] != own[one.name]
        ]


def fingerprint(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
