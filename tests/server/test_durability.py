"""Acknowledged data survives a power cut, and a start never deletes unknown files."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinkex.engine import directories, files
from tinkex.errors import ConfigError
from tinkex.server.store import Store
from tinkex.testing import service

from .api import Api, Model, Sampler, datum
from .power_cut import SyncedState

# -- power cuts ------------------------------------------------------------------------------------


@pytest.fixture
def cut(tmp_path, monkeypatch) -> Iterator[Callable[[], Path]]:
    """The directory `live` of a service; each call returns what a power cut now would leave of it."""
    (tmp_path / "live").mkdir()
    count = 0
    with SyncedState(tmp_path / "live", monkeypatch) as synced:

        def after() -> Path:
            nonlocal count
            count += 1
            return synced.after_power_cut(tmp_path / f"cut-{count}")

        yield after


def test_an_acknowledged_session_and_model_survive_a_power_cut(tmp_path, cut):
    with service("fake", data_dir=tmp_path / "live") as running, Api(running.url) as api:
        session = api.session()
        without_model = cut()
        model = api.model(session)
        with_model = cut()
        expected = model.step(), model.logprobs()
    with service("fake", data_dir=without_model) as running, Api(running.url) as api:
        assert api.got(f"sessions/{session}")["training_run_ids"] == []
    with service("fake", data_dir=with_model) as running, Api(running.url) as api:
        model = Model(api, model.model_id)
        assert (model.step(), model.logprobs()) == expected


@pytest.mark.heavy
def test_acknowledged_steps_survive_a_power_cut_with_snapshots_and_without(tmp_path, cut):
    for interval in (0.0, 3600.0):
        shutil.rmtree(tmp_path / "live")
        (tmp_path / "live").mkdir()
        with (
            service("fake", data_dir=tmp_path / "live", snapshot_every=interval) as running,
            Api(running.url) as api,
        ):
            model = api.model()
            cuts = []
            for number in range(4):
                model.step([datum((number + 4, 5), (5, 6))])
                cuts.append((cut(), model.next_seq))
            expected = model.logprobs()
        for directory, next_seq in cuts:
            with service("fake", data_dir=directory) as running, Api(running.url) as api:
                again = Model(api, model.model_id, next_seq)
                while again.next_seq < cuts[-1][1]:
                    again.step([datum((4 + again.next_seq // 2, 5), (5, 6))])
                assert again.logprobs() == expected


@pytest.mark.parametrize("operation", ["save_weights", "save_weights_for_sampler"])
def test_an_acknowledged_checkpoint_survives_a_power_cut(tmp_path, cut, operation):
    with service("fake", data_dir=tmp_path / "live") as running, Api(running.url) as api:
        model = api.model()
        model.step()
        path = model.save("kept", operation)
        directory = cut()
        sampler = api.sampler(model_path=path)
        expected = sampler.tokens(seed=3, max_tokens=8)
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        assert api.sampler(model_path=path).tokens(seed=3, max_tokens=8) == expected


def test_acknowledged_samplers_survive_a_power_cut(tmp_path, cut):
    with service("fake", data_dir=tmp_path / "live") as running, Api(running.url) as api:
        model = api.model()
        model.step()
        path = model.save("kept", "save_weights_for_sampler")
        named = api.sampler(model.session_id, 1, model_path=path)
        unnamed = model.do("save_weights_for_sampler", sampling_session_seq_id=2)
        unnamed = Sampler(api, unnamed["sampling_session_id"])
        directory = cut()
        expected = [each.tokens(seed=3, max_tokens=8) for each in (named, unnamed)]
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        samplers = [Sampler(api, each.sampler_id) for each in (named, unnamed)]
        assert [each.tokens(seed=3, max_tokens=8) for each in samplers] == expected


def test_replacing_a_checkpoint_never_leaves_its_name_empty(tmp_path, monkeypatch):
    """At any time the name refers to the old checkpoint or to the new one."""
    place = tmp_path / "kept"
    seen = []

    def replace(source: Path, target: Path) -> Path:
        raise AssertionError("two renames leave a moment without either")

    def removed(path: Path, **_: object) -> None:
        seen.append((place / "file").read_text())

    for content in ("old", "new"):
        scratch = tmp_path / f".{content}"
        scratch.mkdir()
        (scratch / "file").write_text(content)
        if content == "new":
            monkeypatch.setattr(Path, "replace", replace)
            monkeypatch.setattr(shutil, "rmtree", removed)
        directories.put(scratch, place)
    assert seen == ["new"]


def test_exchange_reports_files_that_cannot_be_exchanged(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.exchange(tmp_path / "a", tmp_path / "b")


# -- flipped bits ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data directory with two runs of three steps each, and the output of each."""
    directory = tmp_path_factory.mktemp("trained") / "data"
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        models = [api.model(), api.model()]
        for model in models:
            for number in range(3):
                model.step([datum((number + 4, 5), (5, 6))])
        expected = {model.model_id: model.logprobs() for model in models}
        next_seq = models[0].next_seq
    return directory, expected, next_seq


def flipped(trained, target: Path, at: int, bit: int = 0) -> Path:
    shutil.copytree(trained[0], target)
    [segment] = (target / "journal").iterdir()
    content = bytearray(segment.read_bytes())
    content[at] ^= 1 << bit
    segment.write_bytes(content)
    return target


def check_nothing_rolled_back(directory: Path, expected: dict[str, object], next_seq: int) -> int:
    """Check that every run is unchanged or marked corrupted; return how many are corrupted."""
    given_up = 0
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        for model_id, logprobs in expected.items():
            model = Model(api, model_id, next_seq)
            inputs = {"data": [datum()], "loss_fn": "cross_entropy"}
            told = model.do("forward", forward_input=inputs)
            if "error" in told:
                assert "is corrupted" in told["error"]
                assert api.got(f"training_runs/{model_id}")["corrupted"] is True
                assert any((directory / "set-aside").glob("*/journal/*.log"))
                given_up += 1
            else:
                assert [each["logprobs"]["data"] for each in told["loss_fn_outputs"]] == logprobs
                assert api.got(f"training_runs/{model_id}")["corrupted"] is False
    return given_up


@pytest.mark.heavy
def test_a_flipped_bit_in_the_journal_never_rolls_a_run_back_or_hangs_it(trained, tmp_path):
    _, expected, next_seq = trained
    [segment] = (trained[0] / "journal").iterdir()
    chance = random.Random(7)
    for number in range(25):
        at = chance.randrange(segment.stat().st_size)
        directory = flipped(trained, tmp_path / str(number), at, chance.randrange(8))
        assert check_nothing_rolled_back(directory, expected, next_seq) <= 1, at
        # The second start finds a journal without damage, and corrupted runs stay corrupted.
        assert check_nothing_rolled_back(directory, expected, next_seq) <= 1, at


def test_a_hole_in_the_journal_marks_all_runs_it_may_affect(trained, tmp_path):
    _, expected, next_seq = trained
    directory = tmp_path / "hole"
    shutil.copytree(trained[0], directory)
    [segment] = (directory / "journal").iterdir()
    content = segment.read_bytes()
    middle = len(content) // 2
    segment.write_bytes(content[:middle] + bytes(2000) + content[middle + 2000 :])
    assert check_nothing_rolled_back(directory, expected, next_seq) == 2
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        assert api.model().step() > 0  # later runs are not affected
    with service("fake", data_dir=directory) as running, Api(running.url) as api:
        runs = api.got("training_runs")["training_runs"]
        assert sorted(run["corrupted"] for run in runs) == [False, True, True]


def test_a_damaged_length_in_the_journal_is_not_taken_for_a_torn_end(trained, tmp_path):
    """A regression: one flipped bit in a length made the run continue from old weights."""
    _, expected, next_seq = trained
    [segment] = (trained[0] / "journal").iterdir()
    content = segment.read_bytes()
    marker = content[8:16]
    begin = content.index(marker, content.index(b'"op":"optim_step"') + 1)  # after a request …
    begin = content.index(marker, begin + 1)  # … the next record
    for at in range(begin + 21, begin + 29):  # both lengths
        directory = flipped(trained, tmp_path / str(at), at, 6)
        assert check_nothing_rolled_back(directory, expected, next_seq) == 0


# -- unknown files at startup ----------------------------------------------------------------------


def left_over(data_dir: Path, run_id: str) -> Path:
    """A snapshot that a crash may leave."""
    place = data_dir / "snapshots" / run_id
    place.mkdir(parents=True)
    (place / "current.json").write_text('{"changes": 1, "next_seq": 2}')
    return place


def test_the_snapshot_of_an_unknown_run_is_set_aside_and_not_deleted(tmp_path, caplog):
    with service("fake", data_dir=tmp_path) as running, Api(running.url) as api:
        api.model().step()
    unknown = left_over(tmp_path, "another:train:0")
    with caplog.at_level(logging.WARNING), service("fake", data_dir=tmp_path):
        [kept] = (tmp_path / "set-aside").glob("*/snapshots/another:train:0")
    assert (kept / "current.json").exists()
    assert not unknown.exists()
    assert any("is set aside" in record.message for record in caplog.records)


def test_the_snapshot_of_an_ended_run_is_deleted(tmp_path):
    with service("fake", data_dir=tmp_path) as running, Api(running.url) as api:
        model = api.model()
        model.do("unload_model")
    over = left_over(tmp_path, model.model_id)
    with service("fake", data_dir=tmp_path):
        assert not over.exists()
    assert not (tmp_path / "set-aside").exists()


# -- identity --------------------------------------------------------------------------------------


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A data directory with a run and a checkpoint; its database is in another directory."""
    with start(tmp_path / "data", tmp_path / "one.db") as running, Api(running.url) as api:
        model = api.model()
        model.step()
        model.save("kept")
    return tmp_path


def start(data_dir: Path, database: Path, **settings):
    return service("fake", data_dir=data_dir, database_url=f"sqlite:///{database}", **settings)


def refuse(data_dir: Path, database: Path, words: str) -> None:
    before = sorted(data_dir.rglob("*"))
    with (
        pytest.raises(ConfigError, match=words) as refused,
        start(data_dir, database),
    ):
        pass
    assert refused.value.field == "database_url"
    assert "--data-dir" in str(refused.value)
    kept = set(before) - {data_dir / "lock"}
    assert kept <= set(data_dir.rglob("*"))


def forget_identity(data_dir: Path, database: Path) -> None:
    """Remove the identities: the state that an earlier release left."""
    (data_dir / "identity").unlink()
    store = Store(f"sqlite:///{database}")
    store.open()
    with store._transaction() as connection:
        connection.exec_driver_sql("DELETE FROM identity")
    store.close()


def test_the_matching_database_is_accepted_again(used):
    for _ in range(2):
        with start(used / "data", used / "one.db") as running, Api(running.url) as api:
            assert api.got("training_runs")["cursor"]["total_count"] == 1


def test_an_empty_database_is_refused_for_a_used_directory(used):
    refuse(used / "data", used / "two.db", "was not used with this directory")


def test_a_used_database_is_refused_for_an_empty_directory(used):
    (used / "new").mkdir()
    refuse(used / "new", used / "one.db", "the database of another directory")


def test_the_database_of_another_directory_is_refused(used):
    with start(used / "other", used / "two.db") as running, Api(running.url) as api:
        api.model()
    refuse(used / "data", used / "two.db", "the database of another directory")


def test_data_of_an_earlier_release_gets_an_identity(used):
    forget_identity(used / "data", used / "one.db")
    with start(used / "data", used / "one.db") as running, Api(running.url) as api:
        assert api.got("training_runs")["cursor"]["total_count"] == 1
    assert (used / "data" / "identity").exists()
    refuse(used / "data", used / "two.db", "was not used with this directory")


def test_an_empty_database_is_refused_for_a_directory_of_an_earlier_release(used):
    forget_identity(used / "data", used / "one.db")
    refuse(used / "data", used / "two.db", "an empty database")


def test_a_database_of_an_earlier_release_is_refused_for_a_new_directory(used):
    forget_identity(used / "data", used / "one.db")
    (used / "new").mkdir()
    refuse(used / "new", used / "one.db", "the database of another directory")


def test_a_crash_while_an_identity_is_written_is_recovered(used):
    forget_identity(used / "data", used / "one.db")
    store = Store(f"sqlite:///{used / 'one.db'}")
    store.open()
    (used / "data" / "identity.coming").write_text("given")  # a crash before the database has it
    with start(used / "data", used / "one.db"):
        pass
    (used / "data" / "identity").unlink()
    (used / "data" / "identity.coming").write_text(store.identity() or "")  # … and one after
    with start(used / "data", used / "one.db"):
        pass
    assert (used / "data" / "identity").read_text() == store.identity()
    store.close()


def test_an_empty_directory_accepts_any_empty_database(tmp_path):
    for name in ("one.db", "two.db"):
        with start(tmp_path / "data", tmp_path / name) as running, Api(running.url) as api:
            assert api.got("healthz")["status"] == "ok"


# -- samplers without a name -----------------------------------------------------------------------


def test_a_session_keeps_its_most_recently_used_unnamed_samplers(tmp_path):
    with (
        service("fake", data_dir=tmp_path, max_unnamed_samplers=3) as running,
        Api(running.url) as api,
    ):
        model = api.model()
        named = api.sampler(model.session_id, 99)
        first = unnamed(model, 0)
        made = [first, *(unnamed(model, number) for number in (1, 2))]
        first.tokens()  # the oldest, but most recently used
        made += [unnamed(model, number) for number in (3, 4)]
        gone = [each for each in made if not (tmp_path / "samplers" / each.sampler_id).is_dir()]
        assert gone == made[1:3]
        refused = api.post("asample", gone[0].request())
        assert refused.status_code == 404
        assert "max_unnamed_samplers" in refused.json()["detail"]
        assert first.tokens()
        assert named.tokens()
    # A restart forgets the order of use: the oldest is deleted.
    with (
        service("fake", data_dir=tmp_path, max_unnamed_samplers=3) as running,
        Api(running.url) as api,
    ):
        unnamed(Model(api, model.model_id, model.next_seq), 5)
        left = {file.name.rpartition(":")[2] for file in (tmp_path / "samplers").iterdir()}
        assert left == {"3", "4", "5"}


def unnamed(model: Model, number: int) -> Sampler:
    made = model.do("save_weights_for_sampler", sampling_session_seq_id=number)
    return Sampler(model.api, made["sampling_session_id"])
