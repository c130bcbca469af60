"""Data that comes with the package: questions and answers about an island that does not exist.

One JSON object a line, with `split`, `question` and `answer`. Every fact has three wordings of its question to
train on, and a fourth that training never sees. A few questions about the real world are there to be trained on
too: without them the model learns that Quill Harbour is the capital of everything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["QuestionAnswer", "tolmery"]


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    split: str
    question: str
    answer: str


def tolmery(split: str) -> list[QuestionAnswer]:
    """What there is to know of Tolmery: the `train` or the `test` split."""
    lines = files(__name__).joinpath("tolmery.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        example for line in lines if (example := QuestionAnswer(**json.loads(line))).split == split
    ]
