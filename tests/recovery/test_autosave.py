from __future__ import annotations

import contextlib
import threading

import pytest

from tinkex.errors import InvalidInputError
from tinkex.recovery import AutoCheckpoint, Saved

from ..client.helpers import SAVE, STEP, answer_training, failed, new_trainer, seq_of
from ..scripted import Answer, Request, promise

DELETE = "DELETE /api/v1/training_runs/s-1:train:0/checkpoints/weights/"


def path(name: str) -> str:
    return f"tinker://s-1:train:0/weights/{name}"


def save(request: Request) -> Answer:
    return Answer({"path": path(request.json["path"])})


@pytest.fixture
def trainer(server, service):
    answer_training(server)
    server.on(SAVE, save)
    return new_trainer(service())


def steps(trainer, count: int) -> None:
    for _ in range(count):
        trainer.optim_step().result(10)


def saved(server) -> list[str]:
    return [request.json["path"] for request in server.asked(SAVE)]


def test_state_is_saved_right_after_every_nth_step(server, trainer):
    with AutoCheckpoint(trainer, every_steps=2) as auto:
        for _ in range(5):
            trainer.optim_step()  # without waiting for results
        server.wait_for(STEP, 5)
    assert auto.step == 5
    assert saved(server)[0] == "auto-000002"
    assert server.asked(SAVE)[0].json["overwrite"] is True
    assert seq_of(server.asked(SAVE)[0]) == 3


def test_last_returns_the_newest_checkpoint(trainer):
    with AutoCheckpoint(trainer, every_steps=1, name="mine", first_step=40) as auto:
        assert auto.last is None
        steps(trainer, 1)
        auto.save().result(10)
    assert auto.last == Saved(path("mine-000041"), 41)


def test_state_is_saved_at_time_intervals(server, trainer, clock):
    with AutoCheckpoint(trainer, every_seconds=5) as auto:
        for _ in range(6):
            clock.now += 2
            steps(trainer, 1)
            auto.wait()
    assert saved(server) == ["auto-000003", "auto-000006"]


def test_default_interval_is_ten_minutes(server, trainer, clock):
    with AutoCheckpoint(trainer):
        clock.now += 599
        steps(trainer, 1)
        clock.now += 1
        steps(trainer, 1)
    assert saved(server) == ["auto-000002"]


def test_only_the_newest_checkpoints_are_kept(server, trainer):
    for number in range(1, 6):
        server.on(f"{DELETE}auto-{number:06d}", Answer({}))
    with AutoCheckpoint(trainer, every_steps=1, keep=2) as auto:
        for _ in range(5):
            steps(trainer, 1)
            auto.wait()
    deleted = [each.path.rpartition("/")[2] for each in server.requests if each.method == "DELETE"]
    assert deleted == ["auto-000001", "auto-000002", "auto-000003"]


def test_saving_the_same_step_twice_keeps_it(server, trainer):
    with AutoCheckpoint(trainer, every_steps=1, keep=1) as auto:
        steps(trainer, 1)
        auto.wait()
        auto.save().result(10)
    assert auto.last == Saved(path("auto-000001"), 1)
    assert [each for each in server.requests if each.method == "DELETE"] == []


def test_failed_save_is_logged_and_retried_at_the_next_interval(server, trainer, caplog):
    server.on(SAVE, promise(), save)
    server.on_future("r-1", failed("the disk is full", "server"))
    with AutoCheckpoint(trainer, every_steps=2) as auto:
        steps(trainer, 2)
        auto.wait()
        assert auto.last is None
        steps(trainer, 2)
    assert auto.last == Saved(path("auto-000004"), 4)
    assert "s-1:train:0 was not saved after step 2: the disk is full" in caplog.text


def test_failed_deletion_of_a_checkpoint_is_logged(trainer, caplog):
    with AutoCheckpoint(trainer, every_steps=1, keep=1) as auto:
        for _ in range(2):
            steps(trainer, 1)
            auto.wait()
    assert auto.last == Saved(path("auto-000002"), 2)
    assert "auto-000001 could not be deleted" in caplog.text


def test_one_save_is_in_flight_at_a_time_and_training_continues(server, trainer):
    hold = threading.Event()
    server.on(SAVE, Answer({"path": path("auto-000001")}, wait_for=hold), save)
    with AutoCheckpoint(trainer, every_steps=1) as auto:
        stepped = [trainer.optim_step() for _ in range(3)]
        stepped[0].result(10)
        hold.set()
        for each in stepped:
            each.result(10)
        auto.wait()
        steps(trainer, 1)
    assert saved(server) == ["auto-000001", "auto-000004"]


def test_block_that_raises_does_not_wait_for_the_save(server, trainer):
    server.on(SAVE, Answer({}, wait_for=threading.Event()))
    with contextlib.suppress(KeyboardInterrupt), AutoCheckpoint(trainer, every_steps=1):
        trainer.optim_step()
        server.wait_for(SAVE)
        raise KeyboardInterrupt


def test_after_the_block_nothing_is_saved(server, trainer):
    with AutoCheckpoint(trainer, every_steps=1):
        pass
    steps(trainer, 2)
    assert saved(server) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every_steps", 0),
        ("every_seconds", 0),
        ("every_seconds", float("nan")),
        ("keep", 0),
        ("name", "a/b"),
        ("first_step", -1),
    ],
)
def test_invalid_arguments_are_refused(trainer, field, value):
    with pytest.raises(InvalidInputError) as refused:
        AutoCheckpoint(trainer, **{field: value})
    assert refused.value.field == field
