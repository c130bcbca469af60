from __future__ import annotations

import threading

import pytest

import tinkex
from tinkex.errors import ClientClosedError, InvalidInputError, RequestFailedError
from tinkex.recovery import RecoveryError, RecoveryExecutor, RecoveryPolicy
from tinkex.telemetry.events import RecoveryEvent
from tinkex.types import Checkpoint, TrainingRun

from ..client.helpers import LOAD, answer_training, failed, new_trainer, until
from ..scripted import Answer, promise
from .scripts import ASK, ENABLED, NEW, PATH, RUN, answer_restoring, run

OTHER = f"tinker://{RUN}/weights/other"


def names(events):
    return [event.name.removeprefix("tinkex.recovery.") for event in events]


def recover(client, run_id=RUN, policy=ENABLED, **options):
    return RecoveryExecutor().recover(run_id, client, policy=policy, **options).result(10)


def loaded(server):
    return [request.json["path"] for request in server.asked(LOAD)]


def test_run_is_restored_from_its_last_checkpoint_with_its_optimizer(server, service, heard):
    answer_restoring(server)
    server.on(ASK, run(user_metadata={"a": "b"}))
    events = heard(RecoveryEvent)
    restored = recover(service(), metadata={"why": "test"})
    assert (restored.run_id, restored.checkpoint, restored.attempt) == (RUN, PATH, 1)
    assert restored.client.model_id == NEW
    (sent,) = server.asked(LOAD)
    assert (sent.json["path"], sent.json["optimizer"]) == (PATH, True)
    assert sent.json["user_metadata"] == {"a": "b"}
    assert names(events) == ["started", "checkpoint_selected", "client_created", "completed"]
    for event in events:
        assert event.measurements == {"attempt": 1}
        assert (event.run_id, event.strategy, event.metadata["why"]) == (RUN, "latest", "test")
    assert [event.checkpoint for event in events[1:]] == [PATH] * 3
    assert events[-1].client is restored.client


def test_optimizer_state_can_be_left_out(server, service):
    answer_restoring(server)
    server.on(ASK, run())
    recover(service(), policy={"enabled": True, "restore_optimizer": False})
    assert server.asked(LOAD)[0].json["optimizer"] is False


@pytest.mark.parametrize(
    "given",
    [
        OTHER,
        {"path": OTHER},
        {"tinker_path": OTHER},
        Checkpoint.model_validate(run(checkpoint=OTHER).body["last_checkpoint"]),
    ],
)
def test_given_checkpoint_is_used_without_a_request(server, service, given):
    answer_restoring(server)
    recover(service(), last_checkpoint=given)
    assert loaded(server) == [OTHER]
    assert server.asked(ASK) == []


def test_known_run_is_not_requested_again(server, service):
    answer_restoring(server)
    recover(service(), known=TrainingRun.model_validate(run().body))
    assert loaded(server) == [PATH]
    assert server.asked(ASK) == []


def test_known_run_is_used_only_for_the_first_attempt(server, service):
    answer_restoring(server)
    server.on(ASK, run(checkpoint=OTHER))
    server.on(LOAD, promise("gone"), Answer({"path": OTHER, "model_id": NEW}))
    server.on_future("gone", failed("no such checkpoint"))
    restored = recover(service(), known=TrainingRun.model_validate(run().body))
    assert loaded(server) == [PATH, OTHER]
    assert (restored.checkpoint, restored.attempt) == (OTHER, 2)


def test_a_policy_may_name_the_checkpoint(server, service):
    answer_restoring(server)
    policy = RecoveryPolicy(enabled=True, checkpoint_strategy=OTHER)
    recover(service(), policy=policy, last_checkpoint=PATH)
    assert loaded(server) == [OTHER]


@pytest.mark.parametrize(
    ("strategy", "reason"), [("latest", "missing_checkpoint"), ("best", "unsupported_strategy")]
)
def test_without_a_checkpoint_it_fails_at_once(server, service, heard, strategy, reason):
    server.on(ASK, run(checkpoint=None))
    events = heard(RecoveryEvent)
    told = []
    policy = RecoveryPolicy(
        enabled=True, checkpoint_strategy=strategy, on_failure=lambda *what: told.append(what)
    )
    with pytest.raises(RecoveryError) as error:
        recover(service(), policy=policy)
    assert error.value.reason == reason
    assert names(events) == ["started", "failed", "exhausted"]
    assert told == [(RUN, error.value)]


def test_failures_are_retried_with_increasing_waits(server, service, clock, heard):
    answer_restoring(server)
    done = Answer({"path": PATH, "model_id": NEW})
    server.on(LOAD, promise(), promise(), done)
    server.on_future("r-1", failed("busy", "server"))
    events = heard(RecoveryEvent)
    policy = RecoveryPolicy(enabled=True, backoff=2)
    restored = recover(service(), policy=policy, last_checkpoint=PATH)
    assert restored.attempt == 3
    assert [wait for wait in clock.slept if wait in {2, 4}] == [2, 4]
    assert names(events) == [
        *("started", "checkpoint_selected", "failed") * 2,
        *("started", "checkpoint_selected", "client_created", "completed"),
    ]


def test_recovery_gives_up_after_the_last_attempt(server, service, heard):
    answer_restoring(server)
    server.on(LOAD, promise())
    server.on_future("r-1", failed("torn"))
    events = heard(RecoveryEvent)
    told = []
    policy = RecoveryPolicy(enabled=True, backoff=1, on_failure=lambda *what: told.append(what))
    executor = RecoveryExecutor()
    with pytest.raises(RequestFailedError, match="torn") as error:
        executor.recover(RUN, service(), policy=policy, last_checkpoint=PATH).result(10)
    assert names(events)[-2:] == ["failed", "exhausted"]
    assert [event.attempt for event in events if names([event]) == ["failed"]] == [1, 2, 3]
    assert told == [(RUN, error.value)]
    assert executor.pending == ()


def test_the_callback_gets_both_clients_and_may_use_them(server, service):
    answer_training(server)
    answer_restoring(server)
    client = service()
    old = new_trainer(client)
    told = []

    def on_recovery(*what):
        what[1].optim_step().result(10)  # callbacks run on a thread where blocking is allowed
        told.append(what)

    policy = RecoveryPolicy(enabled=True, on_recovery=on_recovery)
    restored = recover(client, old, policy, last_checkpoint=PATH)
    assert told == [(old, restored.client, PATH)]


def test_failing_callback_does_not_affect_the_recovery(server, service, caplog):
    answer_restoring(server)

    def on_recovery(*_):
        raise ZeroDivisionError

    policy = RecoveryPolicy(enabled=True, on_recovery=on_recovery)
    assert recover(service(), policy=policy, last_checkpoint=PATH).client.model_id == NEW
    assert "A recovery callback failed" in caplog.text


def test_the_policy_is_a_setting_of_the_client(server, service):
    answer_restoring(server)
    server.on(ASK, run())
    restored = RecoveryExecutor().recover(RUN, service(recovery={"enabled": True})).result(10)
    assert restored.checkpoint == PATH


@pytest.mark.parametrize("policy", [None, {}, RecoveryPolicy()])
def test_nothing_is_restored_unless_recovery_is_enabled(server, service, policy):
    with pytest.raises(RecoveryError) as error:
        RecoveryExecutor().recover(RUN, service(), policy=policy)
    assert error.value.reason == "recovery_disabled"
    assert server.requests == []


def test_run_cannot_be_restored_twice_at_the_same_time(server, service):
    answer_restoring(server)
    hold = threading.Event()
    server.on(ASK, Answer(run().body, wait_for=hold))
    client, executor = service(), RecoveryExecutor()
    first = executor.recover(RUN, client, policy=ENABLED)
    with pytest.raises(RecoveryError) as error:
        executor.recover(RUN, client, policy=ENABLED)
    assert error.value.reason == "already_pending"
    hold.set()
    first.result(10)
    assert executor.recover(RUN, client, policy=ENABLED).result(10).checkpoint == PATH


@pytest.mark.parametrize("most", [1, 2])
def test_runs_are_restored_in_order_and_at_most_max_concurrent_at_a_time(server, service, most):
    answer_restoring(server)
    runs = [f"s-0:train:{number}" for number in range(4)]
    holds = [threading.Event() for _ in runs]
    routes = [f"GET /api/v1/training_runs/{each}" for each in runs]
    for route, hold in zip(routes, holds, strict=True):
        server.on(route, Answer(run().body, wait_for=hold))
    client, executor = service(), RecoveryExecutor(max_concurrent=most)
    futures = [executor.recover(each, client, policy=ENABLED) for each in runs]
    for number, hold in enumerate(holds):
        server.wait_for(routes[min(number + most, len(runs)) - 1])
        assert [route for route in routes if server.asked(route)] == routes[: number + most]
        hold.set()
        futures[number].result(10)


def test_cancelling_frees_a_slot_for_the_next_run(server, service):
    answer_restoring(server)
    server.on(ASK, Answer(run().body, wait_for=threading.Event()))
    client, executor = service(), RecoveryExecutor()
    stuck = executor.recover(RUN, client, policy=ENABLED)
    server.wait_for(ASK)
    waiting = executor.recover("other", client, policy=ENABLED, last_checkpoint=PATH)
    assert executor.pending == (RUN, "other")
    stuck.cancel()
    assert waiting.result(10).run_id == "other"
    until(lambda: executor.pending == ())


def test_a_closed_client_restores_nothing(service):
    client, executor = service(), RecoveryExecutor()
    client.close().result(10)
    with pytest.raises(ClientClosedError):
        executor.recover(RUN, client, policy=ENABLED)
    assert executor.pending == ()


def test_max_concurrent_of_zero_is_refused():
    with pytest.raises(InvalidInputError, match="max_concurrent"):
        RecoveryExecutor(max_concurrent=0)
    assert tinkex.recovery.RecoveryExecutor is RecoveryExecutor
