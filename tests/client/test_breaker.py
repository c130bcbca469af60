"""The circuit breaker: when it opens, whom it lets through, and what clients make of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from tinkex._client.breaker import Circuit, Circuits
from tinkex._client.retry import HTTPRetryPolicy, RetryConfig, SampleRetryPolicy
from tinkex._client.runtime import SampleFuture, TaskGroup, runtime
from tinkex.config import CircuitBreaker
from tinkex.errors import APIConnectionError, CircuitOpenError, InternalServerError

from ..scripted import Answer, FakeClock, Hang, promise
from .helpers import (
    POLL,
    SAMPLE,
    STEP,
    answer_training,
    datum,
    new_sampler,
    new_trainer,
    sample,
    sampled,
    seq_ids,
)


@dataclass
class Told:
    status: int


async def answered(status: int) -> Told:
    return Told(status)


async def silence() -> Told:
    raise APIConnectionError


def outcome(work: Any) -> Any:
    """What a call of a circuit comes to."""
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


def test_it_opens_after_so_many_failures_in_a_row(circuit):
    for _ in range(2):
        circuit.record_failure()
    circuit.record_success()
    for _ in range(2):
        circuit.record_failure()
    assert circuit.state == "closed"
    circuit.record_failure()
    assert circuit.state == "open"
    assert not circuit.allow_request()


def test_after_a_while_one_request_may_try(circuit, clock):
    broken(circuit)
    clock.advance(29)
    assert (circuit.state, circuit.retry_after) == ("open", 1)
    clock.advance(1)
    assert circuit.state == "half_open"
    assert circuit.allow_request()
    assert not circuit.allow_request()


def test_a_success_closes_it(circuit, clock):
    broken(circuit)
    clock.advance(30)
    assert outcome(circuit.call(answered(200))) == 200
    assert circuit.state == "closed"
    circuit.record_failure()
    assert circuit.state == "closed"  # it has forgotten what was before


def test_a_failure_opens_it_again(circuit, clock):
    broken(circuit)
    clock.advance(30)
    assert outcome(circuit.call(silence())) is APIConnectionError
    assert (circuit.state, circuit.retry_after) == ("open", 30)


def test_failures_that_come_together_are_all_counted(circuit):
    async def together() -> list[Any]:
        return await asyncio.gather(
            *(circuit.call(silence()) for _ in range(3)), return_exceptions=True
        )

    assert len(asyncio.run(together())) == 3
    assert circuit.state == "open"


def test_who_comes_late_does_not_keep_it_open(circuit, clock):
    broken(circuit)
    clock.advance(29)
    circuit.record_failure()  # sent before it opened
    assert circuit.retry_after == 1


def test_a_request_that_was_given_up_leaves_its_place_to_another(circuit, clock):
    broken(circuit)
    clock.advance(30)

    async def give_up() -> None:
        trying = asyncio.ensure_future(circuit.call(asyncio.sleep(3600, Told(200))))
        await asyncio.sleep(0)
        assert circuit.refuses
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)

    asyncio.run(give_up())
    assert outcome(circuit.call(answered(200))) == 200


def test_the_callers_own_deadline_says_nothing_of_the_service(circuit, clock):
    for _ in range(5):
        assert outcome(circuit.call(silence(), deadline=clock.now)) is APIConnectionError
    assert circuit.state == "closed"


@pytest.mark.parametrize(("status", "state"), [(500, "open"), (503, "open"), (404, "closed")])
def test_a_refusal_of_the_service_is_no_failure(circuit, status, state):
    for _ in range(3):
        assert outcome(circuit.call(answered(status))) == status
    assert circuit.state == state


def test_what_a_failure_is_can_be_chosen(clock):
    policy = CircuitBreaker(failure_threshold=1, is_failure=lambda status: status == 429)
    circuit = Circuit("sampling", policy, clock.monotonic)
    assert outcome(circuit.call(silence())) is APIConnectionError
    assert outcome(circuit.call(answered(500))) == 500
    assert circuit.allow_request()
    outcome(circuit.call(answered(429)))
    assert not circuit.allow_request()


def test_circuits_have_names_and_do_not_share_their_fate(clock):
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


# -- what is made of a refusal -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [HTTPRetryPolicy(), SampleRetryPolicy(RetryConfig())])
def test_a_new_call_fails_at_once_and_one_under_way_waits(policy):
    error = CircuitOpenError(retry_after=12.0)
    assert policy.wait_before_retry(error, 0, 0.0, 0.0) is None
    assert policy.wait_before_retry(error, 1, 0.0, 0.0) > 0


def test_one_under_way_waits_until_it_may_try():
    assert HTTPRetryPolicy().wait_before_retry(CircuitOpenError(retry_after=12.0), 1, 0, 0) == 12


def impatient(client: Any) -> Any:
    return new_sampler(client, retry_config=RetryConfig(enable_retry_logic=False))


def test_without_the_option_there_is_none(server, service):
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


def test_a_refused_operation_of_training_takes_no_number(server, service, clock):
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


def test_a_call_under_way_outlives_an_open_circuit(server, service):
    server.on(STEP, *[Answer({}, 500)] * 5, promise("step"))
    server.on_future("step", Answer({"metrics": {"x": 1.0}}))
    breaker = CircuitBreaker(reset_timeout=8.0)
    trainer = new_trainer(service(circuit_breaker=breaker))
    assert trainer.optim_step().result(10).metrics == {"x": 1.0}
    assert len(server.asked(STEP)) == 6


def test_a_promised_result_is_waited_for_though_polls_are_refused(server, service):
    server.on(SAMPLE, promise("s"))
    server.on_future("s", *[Answer({}, 503)] * 4, sampled(7))
    breaker = CircuitBreaker(failure_threshold=2, reset_timeout=5.0)
    assert sample(new_sampler(service(circuit_breaker=breaker))).result(10).sequences
    assert len(server.asked(POLL)) == 5


def test_a_call_that_was_cancelled_counts_for_nothing(server, service):
    server.on(SAMPLE, Hang())
    client = service(circuit_breaker=CircuitBreaker(failure_threshold=1))
    sampler = new_sampler(client)
    drawing = sample(sampler)
    server.wait_for(SAMPLE)
    drawing.cancel()
    server.on(SAMPLE, sampled(7))
    assert sample(sampler).result(10).sequences[0].tokens == [7]
    assert client.holder.transport.circuits.state("sampling") == "closed"


def test_it_belongs_to_the_loop_of_the_clients():
    # Nothing here takes a lock; two threads never see the same circuit.
    done: SampleFuture[Told] = SampleFuture()
    circuit = Circuit("session", CircuitBreaker(), FakeClock().monotonic)
    assert runtime().submit(circuit.call(answered(204)), done, TaskGroup()).result(10).status == 204
