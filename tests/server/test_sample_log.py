"""Samples of a run on disk, read while the run is deleted, and after files were cut short."""

from __future__ import annotations

import pytest

from tinkex.errors import NotFoundError
from tinkex.server.dashboard.samples import SampleLog


@pytest.fixture
def log(tmp_path):
    made = SampleLog(tmp_path)
    made.append([(1.0, 0.0, {"text": text}) for text in ("first", "second")])
    return made


def test_samples_whose_file_is_gone_are_none(log, tmp_path):
    (tmp_path / "samples.jsonl").unlink()
    assert log.at(1.0, "logged", 0, 10) == ([], 0)
    with pytest.raises(NotFoundError, match="no sample 0"):
        log.whole(0)


@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_a_damaged_sample_costs_no_other(log, tmp_path, damage):
    file = tmp_path / "samples.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + (bytes(9) if damage == "zeros" else b""))
    (first, second), total = log.at(1.0, "logged", 0, 10)
    assert (first["text"], first["cut"], total) == ("first", False, 2)
    assert "text" not in second
    assert (second["number"], second["cut"]) == (1, True)
    assert b"first" in log.whole(0)
    if damage == "cut":
        with pytest.raises(NotFoundError, match="no sample 1"):
            log.whole(1)


def test_an_index_that_was_cut_short_still_finds_the_samples_before(log, tmp_path):
    file = tmp_path / "samples.index"
    file.write_bytes(file.read_bytes()[:-3])
    found, total = log.at(1.0, "logged", 0, 10)
    assert ([sample["text"] for sample in found], total) == (["first"], 1)
