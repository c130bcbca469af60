"""`tinkex checkpoint`, as a user runs it, against a service that really trains."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from .commands import payload
from .conftest import TINY


@pytest.fixture(scope="module")
def training(here):
    return here.trained()


@pytest.fixture(scope="module")
def path(training):
    return training.save_weights_for_sampler("kept").result().path


def saved(training, *names: str) -> list[str]:
    return [training.save_state(name).result().path for name in names]


def left(here, training) -> set[str]:
    found = here.client.create_rest_client().list_checkpoints(training.model_id).result()
    return {checkpoint.checkpoint_id.rpartition("/")[2] for checkpoint in found.checkpoints}


def found(here, path):
    """What the service knows of a checkpoint."""
    run_id = path.removeprefix("tinker://").partition("/")[0]
    of_run = here.client.create_rest_client().list_checkpoints(run_id).result().checkpoints
    return next(one for one in of_run if one.tinker_path == path)


# -- saving and looking ----------------------------------------------------------------------------


def test_save_writes_the_path_of_the_weights_to_a_file(here, tmp_path):
    file = tmp_path / "deep" / "saved.json"
    printed = here.ask(
        "checkpoint save", "--base-model", TINY, "--rank", 4, "--output", file, "--no-train-mlp"
    )
    assert json.loads(file.read_text()) == printed
    assert printed["base_model"] == TINY
    assert printed["weights_path"].endswith("/checkpoint-tinkex-tiny")
    rest = here.client.create_rest_client()
    info = rest.get_weights_info_by_tinker_path(printed["weights_path"]).result()
    assert (info.lora_rank, info.train_mlp, info.train_attn) == (4, False, True)
    again = tmp_path / "again.json"
    state = here.trained().save_state("state").result().path
    # As in the Elixir command line: saving has no subcommand.
    outcome = here.quick("checkpoint", "--model-path", state, "--name", "twin", "--output", again)
    assert outcome.code == 0, outcome.err
    assert outcome.out == ""
    assert json.loads(again.read_text())["weights_path"].endswith("/twin")


def test_list_fits_100_columns_and_wide_shows_the_rest(here, training, path):
    narrow = here.quick("checkpoint", "list", "--run-id", training.model_id).out
    head, *rows = narrow.splitlines()
    assert head.split() == ["Path", "Size", "Created"]
    assert any(row.startswith(path) for row in rows)
    assert max(map(len, [head, *rows])) <= 100
    shown = here.type("checkpoint", "list", "--run-id", training.model_id, "--wide")
    assert shown.code == 0
    head, *rows = shown.out.splitlines()
    assert head.split() == ["Path", "Type", "Size", "Public", "Created", "Expires"]
    (row,) = [row for row in rows if path in row]
    assert "sampler" in row
    assert "KB" in row
    assert "Never" in row
    assert row.count("just now") or row.count("ago")
    assert "shown" in shown.err  # not on stdout, which may be piped
    printed = here.ask("checkpoint list", "--run-id", training.model_id)
    assert printed["run_id"] == training.model_id
    assert printed["size_bytes"] == sum(one["size_bytes"] for one in printed["checkpoints"])
    assert printed["shown"] == printed["total"] == len(printed["checkpoints"])


def test_limit_and_offset_of_a_list_are_respected(here, training):
    saved(training, "page-1", "page-2", "page-3")

    def listed(*options):
        return payload("checkpoint list", here.quick("checkpoint", "list", "--json", *options))

    whole = listed("--limit", 0)
    assert whole["shown"] == whole["total"] >= 3
    part = listed("--limit", 2, "--offset", 1)
    assert part["total"] == whole["total"]
    assert part["checkpoints"] == whole["checkpoints"][1:3]
    times = [one["time"] for one in whole["checkpoints"]]
    assert times == sorted(times, reverse=True)
    assert listed("--offset", 10_000)["checkpoints"] == []
    assert "Nothing to show" in here.quick("checkpoint", "list", "--offset", 10_000).err
    assert here.quick("checkpoint", "list", "--limit", -1).code == 2


def test_list_of_a_run_is_complete_without_limit(here, of_many):
    def shown(*options):
        printed = here.quick("checkpoint", "list", "--run-id", of_many.model_id, "--json", *options)
        return payload("checkpoint list", printed)["shown"]

    assert shown() == shown("--limit", 0) == 21
    assert shown("--offset", 2) == 19
    assert shown("--limit", 20) == 20


@pytest.fixture(scope="module")
def of_many(here):
    training = here.client.create_lora_training_client(TINY, rank=1)
    for saving in [training.save_state(f"many-{number}") for number in range(21)]:
        saving.result()
    return training


def test_one_checkpoint_in_full(here, path):
    printed = here.ask("checkpoint info", path)
    assert printed["tinker_path"] == path
    assert printed["base_model"] == TINY
    assert printed["is_lora"] is True
    told = here.type("checkpoint", "info", path).out
    assert "LoRA rank:" in told
    unknown = here.quick("checkpoint", "info", path + "-not")
    assert unknown.code == 1
    assert "There is no checkpoint" in unknown.err
    wrong = here.quick("checkpoint", "info", "weights/none")
    assert wrong.code == 1
    assert "tinker://" in wrong.err
    assert "Traceback" not in wrong.err + unknown.err


# -- changing --------------------------------------------------------------------------------------


def test_publish_and_unpublish(here, path):
    assert here.ask("checkpoint publish", path) == {"checkpoint_path": path, "public": True}
    assert found(here, path).public is True
    outcome = here.type("checkpoint", "unpublish", path)
    assert (outcome.code, outcome.out) == (0, "")
    assert "is private" in outcome.err
    assert found(here, path).public is False
    again = here.quick("checkpoint", "unpublish", path, "--json")  # does no harm
    assert payload("checkpoint unpublish", again)["public"] is False
    unknown = here.quick("checkpoint", "publish", path + "-not")
    assert unknown.code == 1


def test_ttl_of_checkpoint_is_set_and_removed(here, path):
    assert here.ask("checkpoint set-ttl", path, "--ttl", 86_400)["ttl_seconds"] == 86_400
    ends = found(here, path).expires_at
    assert timedelta(hours=23) < ends - datetime.now(UTC) <= timedelta(days=1)
    assert "in 23 hours" in here.quick("checkpoint", "info", path).out
    removed = here.quick("checkpoint", "set-ttl", path, "--remove")
    assert "never deleted" in removed.err
    assert found(here, path).expires_at is None
    for wrong in ([], ["--ttl", 5, "--remove"], ["--ttl", 0]):
        assert here.quick("checkpoint", "set-ttl", path, *wrong).code == 2


# -- downloading -----------------------------------------------------------------------------------


def test_a_download_is_a_directory_that_is_not_overwritten(here, path, tmp_path):
    printed = here.ask("checkpoint download", path, "-o", tmp_path)
    directory = tmp_path / path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
    assert printed == {"checkpoint_path": path, "destination": str(directory)}
    assert (directory / "adapter_model.safetensors").stat().st_size > 0
    (directory / "note").write_text("mine")
    again = here.quick("checkpoint", "download", path, "-o", tmp_path)
    assert again.code == 1
    assert f"{directory} exists; --force replaces it" in again.err
    assert (directory / "note").exists()
    forced = here.quick("checkpoint", "download", path, "-o", tmp_path, "--force")
    assert forced.code == 0, forced.err
    assert not (directory / "note").exists()
    assert list(tmp_path.iterdir()) == [directory]


def test_download_of_a_missing_checkpoint_fails(here, path, tmp_path):
    for wrong in (path + "-not", "nonsense", "tinker://nobody:train:0/sampler_weights/x"):
        outcome = here.quick("checkpoint", "download", wrong, "-o", tmp_path)
        assert outcome.code == 1, wrong
        assert "Traceback" not in outcome.err
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert here.quick("checkpoint", "download", path, "-o", tmp_path / "file").code == 2


# -- deleting --------------------------------------------------------------------------------------


@pytest.fixture
def run(here):
    training = here.trained()
    saved(training, "step-1", "step-2", "step-3", "other")
    training.save_weights_for_sampler("drawn").result()
    return training


def test_delete_by_path_asks_first(here, run):
    paths = [f"tinker://{run.model_id}/weights/{name}" for name in ("step-1", "step-2")]
    for answer in ("n\n", "", "maybe\n"):
        declined = here.quick("checkpoint", "delete", *paths, "--json", input=answer)
        printed = payload("checkpoint delete", declined)
        assert (printed["cancelled"], printed["deleted"]) == (True, 0)
        assert "[y/N]" in declined.err
    assert {"step-1", "step-2"} <= left(here, run)
    done = here.quick("checkpoint", "delete", *paths, "--json", input="YES\n")
    printed = payload("checkpoint delete", done)
    assert (printed["deleted"], printed["cancelled"]) == (2, False)
    assert [done.err.count(f"{path}\n") for path in paths] == [1, 1]  # each is listed once
    assert "Deleting" not in done.err  # progress is for terminals
    assert left(here, run) == {"step-3", "other", "drawn"}


def test_one_invalid_path_prevents_all_deletions(here, run):
    good = f"tinker://{run.model_id}/weights/step-1"
    outcome = here.quick("checkpoint", "delete", good, "nonsense", "--yes")
    assert outcome.code == 1
    assert "step-1" in left(here, run)


def test_delete_continues_after_a_failure_and_reports_it(here, run):
    bad, good = (f"tinker://{run.model_id}/weights/{name}" for name in ("none", "step-1"))
    printed = here.ask("checkpoint delete", bad, good, "--yes", code=1)
    assert (printed["deleted"], printed["failed"]) == (1, 1)
    assert printed["failures"][0]["path"] == bad
    assert "step-1" not in left(here, run)


def test_delete_by_filters_shows_a_preview(here, run):
    of_run = ["--run-id", run.model_id]
    preview = here.ask("checkpoint delete", *of_run, "--pattern", "step-*", "--dry-run")
    assert preview["dry_run"] is True
    assert len(preview["paths"]) == 3
    assert preview["size_bytes"] > 0
    assert preview["deleted"] == 0
    told = here.quick("checkpoint", "delete", *of_run, "--type", "sampler", "--dry-run")
    assert told.out == ""
    assert "drawn" in told.err
    assert "1 checkpoint to delete, " in told.err
    for kind, count in (("weights", 4), ("sampler_weights", 1)):
        told = here.quick("checkpoint", "delete", *of_run, "--type", kind, "--dry-run")
        assert f"{count} checkpoint" in told.err
    none = here.quick("checkpoint", "delete", *of_run, "--before", "1d", "--yes")
    assert "Nothing was deleted" in none.err
    assert len(left(here, run)) == 5
    printed = here.ask(
        "checkpoint delete",
        *of_run,
        "--pattern",
        "step-*",
        "--keep-newest",
        1,
        "--after",
        "1h",
        "-y",
    )
    assert printed["deleted"] == 2
    assert left(here, run) == {"step-3", "other", "drawn"}
    # The newest of each type.
    here.quick("checkpoint", "delete", *of_run, "--keep-newest", 1, "--yes")
    assert left(here, run) == {"other", "drawn"}
    here.quick("checkpoint", "delete", *of_run, "--yes")
    assert left(here, run) == set()


def test_filters_that_make_no_sense(here, run):
    path = f"tinker://{run.model_id}/weights/step-1"
    for wrong in ([], [path, "--all"], [path, "--keep-newest", 1], ["--type", "sampler"]):
        outcome = here.quick("checkpoint", "delete", *wrong, "--yes")
        assert outcome.code == 2, wrong
    for date in ("yesterday", "7y", "99999999999w"):
        outcome = here.quick("checkpoint", "delete", "--before", date, "--yes")
        assert outcome.code == 1
        assert "before" in outcome.err
        assert "Traceback" not in outcome.err
    unknown = here.quick("checkpoint", "delete", "--run-id", "none:train:0", "--yes")
    assert unknown.code == 1
    assert len(left(here, run)) == 5
