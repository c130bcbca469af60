"""Samples of runs: a file of JSON lines per run, and an index of fixed-width records to find them by step.

A page shows a few samples of one step and only the beginning of long ones, so that a sample of 10 MB costs as little as
a short one. The whole can be read one at a time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import orjson

from tinkex.engine.files import make_directory
from tinkex.errors import NotFoundError

from .thinning import Records

__all__ = ["Order", "SampleLog", "shortened"]

Order = Literal["logged", "best", "worst"]

_INDEX: Final = np.dtype(
    [
        ("step", "<f8"),
        ("time", "<f8"),
        ("reward", "<f8"),  # NaN if there is none
        ("place", "<u8"),
        ("length", "<u8"),
        ("group", "<u8"),  # a checksum of the group's name; 0 if there is no group
    ]
)
#: Characters of a text, and tokens, that a list of samples shows.
SHOWN_CHARACTERS: Final = 4_000
SHOWN_TOKENS: Final = 1_000
#: Alternatives of a token that a list of samples shows, and that a report may have.
SHOWN_ALTERNATIVES: Final = 10
MAX_ALTERNATIVES: Final = 100
#: Bytes of samples that one page reads, or a single longer sample.
_READ_BYTES: Final = 32 << 20
#: Tokens, logprobs and alternatives in one page: a token of two bytes takes a hundred in memory and in the answer.
PAGE_ITEMS: Final = 200_000


class SampleLog:
    """The samples of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lines = directory / "samples.jsonl"
        self._index_file = directory / "samples.index"

    # -- writing -------------------------------------------------------------------------------

    def append(self, samples: Sequence[tuple[float, float, Mapping[str, Any]]]) -> int:
        """Append samples, each with its step and time; return their bytes."""
        make_directory(self._directory, 0o700)
        index = np.zeros(len(samples), _INDEX)
        with self._lines.open("ab") as lines:
            place = start = lines.tell()
            for number, (step, time, sample) in enumerate(samples):
                line = orjson.dumps({"step": step, "time": time, **sample}) + b"\n"
                lines.write(line)
                index[number] = (step, time, _reward(sample), place, len(line), _group(sample))
                place += len(line)
        # Written last: a line without an index record is never read.
        with self._index_file.open("ab") as records:
            records.truncate(records.tell() - records.tell() % _INDEX.itemsize)
            records.write(index.tobytes())
        return place - start + index.nbytes

    # -- reading -------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The size of both files."""
        return sum(map(_size, (self._lines, self._index_file)))

    def steps(self) -> list[dict[str, Any]]:
        """The steps that have samples, with their number and mean reward."""
        index = self._index()
        steps, where, counts = np.unique(index["step"], return_inverse=True, return_counts=True)
        rewarded = ~np.isnan(index["reward"])
        sums = np.bincount(where[rewarded], index["reward"][rewarded], len(steps))
        known = np.bincount(where[rewarded], minlength=len(steps))
        return [
            {
                "step": int(step),
                "samples": int(count),
                "reward": float(total / number) if number else None,
            }
            for step, count, total, number in zip(steps, counts, sums, known, strict=True)
        ]

    def at(
        self, step: float, order: Order, offset: int, limit: int
    ) -> tuple[list[dict[str, Any]], int]:
        """Some samples of a step, shortened, and the number of samples of the step."""
        index = self._index()
        places = np.flatnonzero(index["step"] == step)
        if order != "logged":
            reward = index["reward"][places]
            ranked = np.where(np.isnan(reward), -math.inf, reward)
            by_reward = np.argsort(-ranked, kind="stable")
            if order == "worst":
                ranked = np.where(np.isnan(reward), math.inf, reward)
                by_reward = np.argsort(ranked, kind="stable")
            places = places[by_reward]
        shown: list[dict[str, Any]] = []
        bytes_left, items_left = _READ_BYTES, PAGE_ITEMS
        try:
            lines = self._lines.open("rb")
        except FileNotFoundError:  # the run is being deleted
            return [], 0
        with lines:
            for place in places[offset : offset + limit]:
                sample = _short(lines, int(place), index[place])
                shown.append(sample)
                bytes_left -= sample["bytes"]
                items_left -= _items(sample)
                if bytes_left < 0 or items_left < 0:  # a page of very long samples is short
                    break
        return shown, len(places)

    def whole(self, number: int) -> bytes:
        """One sample as JSON."""
        index = self._index()
        found = b""
        if 0 <= number < len(index):
            with suppress(FileNotFoundError), self._lines.open("rb") as lines:
                found = _read(lines, index[number])
        if not found:
            raise NotFoundError(f"There is no sample {number} in this run.")
        return found.rstrip(b"\n")

    def _index(self) -> Records:
        try:
            return np.fromfile(self._index_file, _INDEX)
        except FileNotFoundError:
            return np.empty(0, _INDEX)


def _read(lines: BinaryIO, record: Any) -> bytes:
    """The line of a sample; nothing if the file was cut short, as by a power cut."""
    length = int(record["length"])
    lines.seek(int(record["place"]))
    found = lines.read(length)
    return found if len(found) == length else b""


def _short(lines: BinaryIO, number: int, record: Any) -> dict[str, Any]:
    """A sample as a list shows it; one that cannot be read has no content."""
    try:
        sample = shortened(orjson.loads(_read(lines, record)))
    except ValueError:
        sample = {"cut": True}
    return {"number": number, "bytes": int(record["length"]), **sample}


def shortened(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with the beginning of its texts and tokens; `cut` says that there is more."""
    cut = False
    for name in ("prompt", "text"):
        text = sample.get(name)
        if isinstance(text, str) and len(text) > SHOWN_CHARACTERS:
            sample[name], cut = text[:SHOWN_CHARACTERS], True
    for name in ("prompt_tokens", "tokens", "logprobs", "alternatives"):
        values = sample.get(name)
        if isinstance(values, list) and len(values) > SHOWN_TOKENS:
            sample[name], cut = values[:SHOWN_TOKENS], True
    rows = sample.get("alternatives")
    if isinstance(rows, list) and any(len(row) > SHOWN_ALTERNATIVES for row in rows):
        sample["alternatives"], cut = [row[:SHOWN_ALTERNATIVES] for row in rows], True
    sample["cut"] = cut
    return sample


def _items(sample: Mapping[str, Any]) -> int:
    """What a shortened sample has of tokens and numbers."""
    lists = [sample.get(name) or () for name in ("prompt_tokens", "tokens", "logprobs")]
    return sum(map(len, [*lists, *(sample.get("alternatives") or ())]))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _reward(sample: Mapping[str, Any]) -> float:
    reward = sample.get("reward")
    return math.nan if reward is None else float(reward)


def _group(sample: Mapping[str, Any]) -> int:
    group = sample.get("group")
    return 0 if group is None else zlib.crc32(str(group).encode()) or 1
