"""The circuit breaker: when it opens, which calls it admits, and how clients react."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from tinkex._client.breaker import Circuit, Circuits
from tinkex._client.retry import RetryConfig
from tinkex._client.runtime import SampleFuture, TaskGroup, runtime
from tinkex.config import CircuitBreaker
from tinkex.errors import APIConnectionError, CircuitOpenError, InternalServerError
from tinkex.telemetry import attach, detach
from tinkex.telemetry.events import CircuitStateChange

from ..scripted import Answer, FakeClock, Hang, Raw, promise
from .helpers import (
    CONFIG,
    PASS,
    POLL,
    SAMPLE,
    STEP,
    answer_training,
    datum,
    flags,
    new_sampler,
    new_trainer,
    sample,
    sampled,
    seq_ids,
    seq_of,
    until,
)


@dataclass
class Told:
    status: int


async def answered(status: int) -> Told:
    return Told(status)


async def silence() -> Told:
    raise APIConnectionError


def outcome(work: Any) -> Any:
    """The status that `work` returns, or the type of its exception."""
    try:
        return asyncio.run(work).status
    except Exception as error:
        return type(error)


@pytest.fixture
def circuit(clock: FakeClock) -> Circuit:
    return Circuit("training", CircuitBreaker(failure_threshold=3), clock.monotonic)


def broken(circuit: Circuit) -> Circuit:
    while circuit.state == "closed":
        circuit.record_failure()
    return circuit


# -- states --------------------------------------------------------------------------------------


def test_circuit_opens_after_failure_threshold(circuit):
    for _ in range(2):
        circuit.record_failure()
    circuit.record_success()
    for _ in range(2):
        circuit.record_failure()
    assert circuit.state == "closed"
    circuit.record_failure()
    assert circuit.state == "open"
    assert not circuit.allow_request()


def test_one_probe_is_allowed_after_reset_timeout(circuit, clock):
    broken(circuit)
    clock.advance(29)
    assert (circuit.state, circuit.retry_after) == ("open", 1)
    clock.advance(1)
    assert circuit.state == "half_open"
    assert circuit.allow_request()
    assert not circuit.allow_request()


def test_success_closes_circuit(circuit, clock):
    broken(circuit)
    clock.advance(30)
    assert outcome(circuit.learn_from(answered(200))) == 200
    assert circuit.state == "closed"
    circuit.record_failure()
    assert circuit.state == "closed"  # the earlier failures are cleared


def test_failed_probe_keeps_circuit_open(circuit, clock):
    broken(circuit)
    clock.advance(30)
    assert circuit.allow_request()
    assert outcome(circuit.learn_from(silence())) is APIConnectionError
    assert (circuit.state, circuit.retry_after) == ("open", 30)


def test_concurrent_failures_are_all_counted(circuit):
    async def together() -> list[Any]:
        return await asyncio.gather(
            *(circuit.learn_from(silence()) for _ in range(3)), return_exceptions=True
        )

    assert len(asyncio.run(together())) == 3
    assert circuit.state == "open"


@pytest.mark.parametrize("seconds", [29, 31])
def test_late_failure_does_not_extend_open_state(circuit, clock, seconds):
    broken(circuit)
    clock.advance(seconds)
    circuit.record_failure()  # of a request sent before the circuit opened
    assert circuit.retry_after == max(0, 30 - seconds)


def test_lost_probe_is_followed_by_another(circuit, clock):
    broken(circuit)
    clock.advance(30)
    assert circuit.allow_request()
    assert (circuit.allow_request(), circuit.retry_after) == (False, 30)
    clock.advance(30)
    assert circuit.allow_request()


def test_several_probes_may_be_sent(clock):
    circuit = broken(Circuit("training", CircuitBreaker(half_open_max_calls=2), clock.monotonic))
    clock.advance(30)
    assert [circuit.allow_request() for _ in range(3)] == [True, True, False]


def test_one_failed_probe_of_several_reopens_circuit(clock):
    circuit = broken(Circuit("training", CircuitBreaker(half_open_max_calls=2), clock.monotonic))
    clock.advance(31)
    assert circuit.allow_request()
    circuit.record_failure()
    assert (circuit.state, circuit.retry_after) == ("open", 30)
    assert not circuit.allow_request()
    clock.advance(30)
    assert [circuit.allow_request() for _ in range(3)] == [True, True, False]


def test_deadline_of_caller_is_not_a_failure(circuit, clock):
    for _ in range(5):
        assert outcome(circuit.learn_from(silence(), deadline=clock.now)) is APIConnectionError
    assert circuit.state == "closed"


@pytest.mark.parametrize(("status", "state"), [(500, "open"), (503, "open"), (404, "closed")])
def test_refusal_by_service_is_not_a_failure(circuit, status, state):
    for _ in range(3):
        assert outcome(circuit.learn_from(answered(status))) == status
    assert circuit.state == state


def test_is_failure_can_be_customised(clock):
    policy = CircuitBreaker(failure_threshold=1, is_failure=lambda status: status == 429)
    circuit = Circuit("sampling", policy, clock.monotonic)
    assert outcome(circuit.learn_from(answered(500))) == 500
    assert circuit.allow_request()
    assert outcome(circuit.learn_from(answered(429))) == 429
    assert not circuit.allow_request()


def test_connection_error_is_failure_without_calling_is_failure(clock):
    policy = CircuitBreaker(failure_threshold=1, is_failure=lambda status: status >= 500)
    circuit = Circuit("sampling", policy, clock.monotonic)
    assert outcome(circuit.learn_from(silence())) is APIConnectionError
    assert circuit.state == "open"


def test_failing_is_failure_callback_does_not_lose_answer(clock, caplog):
    policy = CircuitBreaker(failure_threshold=1, is_failure=lambda status: status / 0 > 1)
    circuit = Circuit("sampling", policy, clock.monotonic)
    assert outcome(circuit.learn_from(answered(200))) == 200
    assert circuit.state == "open"
    assert "is_failure failed" in caplog.text


def test_named_circuits_are_independent(clock):
    circuits = Circuits(CircuitBreaker(failure_threshold=1), clock)

    def states() -> list[str]:
        return [circuits.state(name) for name in ("training", "sampling")]

    assert states() == ["closed", "closed"]
    circuits.of("training").record_failure()
    assert states() == ["open", "closed"]
    assert circuits.names() == ["training"]
    circuits.reset("training")
    assert states() == ["closed", "closed"]
    assert circuits.names() == []


def test_state_changes_emit_events(circuit, clock, quiet_bus):
    told: list[Any] = []
    number = attach(told.append, CircuitStateChange)
    for _ in range(3):
        circuit.record_failure()
    clock.now += 30
    assert circuit.allow_request()
    circuit.record_failure()
    clock.now += 30
    assert circuit.allow_request()
    circuit.record_success()
    circuit.record_success()
    detach(number)
    assert [event.state for event in told] == ["open", "half_open", "open", "half_open", "closed"]
    assert (told[0].circuit, told[0].failures, told[0].retry_after) == ("training", 3, 30)


def test_late_failures_of_open_circuit_emit_no_event(circuit, quiet_bus):
    told: list[Any] = []
    number = attach(told.append, CircuitStateChange)
    for _ in range(5):
        circuit.record_failure()
    detach(number)
    assert [event.state for event in told] == ["open"]


def test_resetting_open_circuit_emits_event(clock, quiet_bus):
    circuits = Circuits(CircuitBreaker(failure_threshold=1), clock)
    circuits.of("training").record_failure()
    told: list[Any] = []
    number = attach(told.append, CircuitStateChange)
    circuits.reset("training")
    circuits.reset("sampling")
    detach(number)
    assert [(event.circuit, event.state) for event in told] == [("training", "closed")]


# -- reactions of clients to a refusal -----------------------------------------------------------


def impatient(client: Any) -> Any:
    return new_sampler(client, retry_config=RetryConfig(enable_retry_logic=False))


def test_no_circuit_without_the_setting(server, service):
    server.on(SAMPLE, Answer({}, 500))
    sampler = impatient(service())
    for _ in range(8):
        with pytest.raises(InternalServerError):
            sample(sampler).result(10)
    assert len(server.asked(SAMPLE)) == 8


def test_an_open_circuit_sends_nothing(server, service, clock):
    server.on(SAMPLE, Answer({"detail": "down"}, 500))
    sampler = impatient(service(circuit_breaker=True))
    for _ in range(5):
        with pytest.raises(InternalServerError):
            sample(sampler).result(10)
    with pytest.raises(CircuitOpenError, match="5 sampling requests in a row failed") as caught:
        sample(sampler).result(10)
    assert caught.value.retry_after == 30
    assert len(server.asked(SAMPLE)) == 5
    server.on(SAMPLE, sampled(7))
    clock.now += 30
    assert sample(sampler).result(10).sequences[0].tokens == [7]


def test_client_lists_and_resets_its_circuits(server, service):
    server.on(SAMPLE, Answer({"detail": "down"}, 500))
    client = service(circuit_breaker=CircuitBreaker(failure_threshold=1))
    sampler = impatient(client)
    with pytest.raises(InternalServerError):
        sample(sampler).result(10)
    assert client.circuits.state("sampling") == "open"
    server.on(SAMPLE, sampled(7))
    client.circuits.reset("sampling")
    assert sample(sampler).result(10).sequences[0].tokens == [7]


def test_without_the_setting_all_circuits_are_closed(service):
    assert service().circuits.state("sampling") == "closed"


def test_refused_training_operation_takes_no_sequence_number(server, service, clock):
    answer_training(server)
    client = service(circuit_breaker=True)
    trainer = new_trainer(client)
    broken(client.holder.transport.circuits.of("training"))
    for refused in (trainer.optim_step(), trainer.forward([datum(1, 2)], "cross_entropy")):
        with pytest.raises(CircuitOpenError):
            refused.result(10)
    clock.now += 30
    trainer.optim_step().result(10)
    assert seq_ids(server.asked(STEP)) == [1]


def test_call_in_flight_continues_while_circuit_is_open(server, service):
    server.on(STEP, *[Answer({}, 500)] * 5, promise("step"))
    server.on_future("step", Answer({"metrics": {"x": 1.0}}))
    breaker = CircuitBreaker(reset_timeout=8.0)
    trainer = new_trainer(service(circuit_breaker=breaker))
    assert trainer.optim_step().result(10).metrics == {"x": 1.0}
    assert len(server.asked(STEP)) == 6


def test_admitted_batch_is_sent_completely(server, service, clock):
    # All chunks have sequence numbers. A chunk held back would be skipped, and the others counted twice on a repeat.
    answer_training(server)
    flags(server, fwdbwd_max_chunk_len=1)
    client = service(circuit_breaker=True)
    trainer = new_trainer(client)
    broken(client.holder.transport.circuits.of("training"))
    clock.now += 30
    data = [datum(1, 2) for _ in range(4)]
    assert trainer.forward_backward(data, "cross_entropy").result(10).metrics == {"loss:sum": 4.0}
    trainer.optim_step().result(10)
    assert sorted(map(seq_of, server.asked(PASS))) == [1, 2, 3, 4]
    assert seq_ids(server.asked(STEP)) == [5]


def test_operation_with_sequence_number_is_sent_even_if_circuit_opens(server, service):
    answer_training(server)
    client = service(circuit_breaker=True)
    trainer = new_trainer(client)
    room = client.holder.service.training_room
    full = room.size + 1
    assert room.try_take(full)  # the operation has its number and waits for room
    waiting = trainer.forward([datum(1, 2)], "cross_entropy")
    until(lambda: room.waiting == 1)
    broken(client.holder.transport.circuits.of("training"))
    runtime().post(room.give_back, full)
    assert waiting.result(10).metrics == {"loss:sum": 1.0}


def test_probe_may_fetch_new_token(server, service, clock):
    flags(server, pjwt_auth_enabled=True)
    # The token expires at 1090.
    server.on("POST /api/v1/auth/token", Answer({"jwt": "eyJ.eyJleHAiOjEwOTB9.x"}))
    server.on("GET /api/v1/healthz", Answer({"status": "ok"}))
    client = service(circuit_breaker=True)
    client.health()
    broken(client.holder.transport.circuits.of("session"))
    clock.now += 100
    assert client.health()
    assert len(server.asked("POST /api/v1/auth/token")) > 1


def test_polls_bypass_circuit(server, service, clock):
    server.on(SAMPLE, promise("s"))
    server.on_future("s", *[Answer({}, 503)] * 4, Raw(), sampled(7))
    client = service(circuit_breaker=CircuitBreaker(failure_threshold=2))
    assert sample(new_sampler(client)).result(10).sequences
    assert len(server.asked(POLL)) == 6
    assert "futures" not in client.holder.transport.circuits.names()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get_server_capabilities(),
        lambda client: client.http.get("/api/v1/healthz").result(10),
        lambda client: client.create_rest_client().get_audit_log().result(10),
        lambda client: client.create_rest_client().get_checkpoint_archive_url("r", "c").result(10),
        new_sampler,
    ],
)
def test_every_new_call_is_refused(server, service, call):
    client = service(circuit_breaker=True)
    new_sampler(client)
    broken(client.holder.transport.circuits.of("session"))
    before = len(server.requests)
    with pytest.raises(CircuitOpenError):
        call(client)
    assert len(server.requests) == before


def test_failing_service_is_not_contacted_by_every_call(server, service):
    server.on(CONFIG, Answer({}, 500))
    client = service(circuit_breaker=True, max_retries=4)
    with pytest.raises(InternalServerError):
        new_sampler(client)
    with pytest.raises(CircuitOpenError):
        new_sampler(client)
    assert len(server.asked(CONFIG)) == 5


def test_cancelled_call_is_not_counted(server, service):
    server.on(SAMPLE, Hang())
    client = service(circuit_breaker=CircuitBreaker(failure_threshold=1))
    sampler = new_sampler(client)
    drawing = sample(sampler)
    server.wait_for(SAMPLE)
    drawing.cancel()
    server.on(SAMPLE, sampled(7))
    assert sample(sampler).result(10).sequences[0].tokens == [7]
    assert client.holder.transport.circuits.state("sampling") == "closed"


def test_circuit_works_on_runtime_loop():
    # Circuits take no lock: only the runtime's loop uses them.
    done: SampleFuture[Told] = SampleFuture()
    circuit = Circuit("session", CircuitBreaker(), FakeClock().monotonic)
    assert (
        runtime().submit(circuit.learn_from(answered(204)), done, TaskGroup()).result(10).status
        == 204
    )
