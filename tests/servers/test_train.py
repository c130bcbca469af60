"""`tinkex train` from the first step to the last checkpoint, against each of the recorded servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkex._client.tokenizers import set_tokenizer_loader

from ..cli.commands import run
from .letters import Letters
from .skyrl import SkyRL
from .tuft import TuFT


@pytest.fixture(autouse=True)
def letters() -> Iterator[None]:
    set_tokenizer_loader(lambda *_: Letters())
    yield
    set_tokenizer_loader(None)


def train(server: SkyRL | TuFT, tmp_path: Path) -> Any:
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{word}?", "completion": "aha"} for word in ("one", "two", "six", "ten")]
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    given = ["--base-model", "some/model", "--rank", 4, "--batch-size", 2, "--save-every", 1]
    where = ["--base-url", server.url, "--output", tmp_path / "out", "--format", "json"]
    trained = run("train", data, *given, *where)
    assert trained.code == 0, trained.err
    return json.loads(trained.out)


@pytest.mark.parametrize("name", ["skyrl", "tuft"])
def test_a_run_ends_with_its_loss_and_its_checkpoints(name, request, tmp_path):
    server = request.getfixturevalue(name)
    summary = train(server, tmp_path)
    # Every logprob of the dialects is -0.5, and the weights of a step sum to 1.
    assert summary["loss"] == {"first": pytest.approx(0.5), "last": pytest.approx(0.5)}
    assert "/sampler_weights/" in json.dumps(summary)
