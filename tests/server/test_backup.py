"""A service can start from a backup that was taken while the original was working."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from tinkex.cli.main import cli
from tinkex.errors import ConfigError
from tinkex.server.backup import back_up
from tinkex.testing import service

from .api import Api, Model, Sampler, datum


def train(model: Model, stop: threading.Event, said: list[object]) -> None:
    """Train and save until stopped; return the model's output after each step."""
    said.append(model.logprobs())
    while not stop.is_set():
        model.step()
        said.append(model.logprobs())
        model.save("last", overwrite=True)


def test_backups_taken_under_load_are_consistent(tmp_path):
    stop = threading.Event()
    said: list[list[object]] = [[], []]
    with (
        service("fake", data_dir=tmp_path / "live", snapshot_every=0.0) as running,
        Api(running.url) as api,
        Api(running.url) as other,
    ):
        models = [user.model() for user in (api, other)]
        kept = models[0].save("kept", "save_weights_for_sampler")
        sampler = api.sampler(model_path=kept)
        drawn = sampler.tokens(seed=5)
        threads = [
            threading.Thread(target=train, args=(model, stop, each))
            for model, each in zip(models, said, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            for number in range(4):
                back_up(tmp_path / "live", tmp_path / f"copy-{number}")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    for number in range(4):
        check(tmp_path / f"copy-{number}", models, said, kept, sampler, drawn)


def check(
    directory: Path,
    models: list[Model],
    said: list[list[object]],
    kept: str,
    sampler: Sampler,
    drawn: object,
) -> None:
    """Each run and its checkpoint are in the state after one of the steps."""
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        assert api.sampler(model_path=kept).tokens(seed=5) == drawn
        assert Sampler(api, sampler.sampler_id).tokens(seed=5, fields={"seq_id": 77}) == drawn
        for model, known in zip(models, said, strict=True):
            assert api.got(f"training_runs/{model.model_id}")["corrupted"] is False
            for saved in api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]:
                if saved["checkpoint_type"] == "training":
                    assert api.loaded(saved["tinker_path"], optimizer=True).logprobs() in known
            inputs = {"data": [datum()], "loss_fn": "cross_entropy"}
            again = Model(api, model.model_id).do("forward", forward_input=inputs, seq_id=None)
            told = [output["logprobs"]["data"] for output in again["loss_fn_outputs"]]
            assert told in known


def test_training_from_a_backup_gives_the_same_losses(tmp_path):
    with service("fake", data_dir=tmp_path / "live") as running, Api(running.url) as api:
        model = api.model()
        for _ in range(3):
            model.step()
        done = CliRunner().invoke(
            cli, ["backup", str(tmp_path / "copy"), "--data-dir", str(tmp_path / "live")]
        )
        assert done.exit_code == 0, done.output
        next_seq = model.next_seq
        expected = [model.step() for _ in range(2)]
    with service("fake", data_dir=tmp_path / "copy") as running, Api(running.url) as api:
        again = Model(api, model.model_id, next_seq)
        assert [again.step() for _ in range(2)] == expected


def test_a_backup_needs_a_data_directory_and_an_empty_target(tmp_path):
    with service("fake", data_dir=tmp_path / "live"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        with pytest.raises(ConfigError, match="is not empty"):
            back_up(tmp_path / "live", tmp_path / "full")
        with pytest.raises(ConfigError, match="is not the data directory"):
            back_up(tmp_path / "full", tmp_path / "copy")
        assert not Path(tmp_path / "copy").exists()
